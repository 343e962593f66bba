"""Compressors with bases: store and replicas have the same values and the same state at each version."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from pushes import Applied, Share, apply, bits, pushed, receive, replica_bits, snapshot, take

from gradwire.common.parts import Plan, arrange
from gradwire.compressors import (
    Bases,
    LayerRule,
    ModelCompressor,
    ProjectedPayload,
    PushTerms,
    StepContext,
    parse_compressor,
    sum_coordinates,
)
from gradwire.compressors import Random as Chance
from gradwire.compressors.registry import BUILT_IN
from gradwire.optim.optimizer import Optimizer, OptimizerGroup, parse_optimizer
from gradwire.proto import messages as m
from gradwire.server.shard.coordinates import rounded
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.mean import Float32
from gradwire.server.shard.pending import StepRules
from gradwire.server.shard.store import DivergedError, Encoded
from gradwire.server.streams.updates import Broadcast
from gradwire.worker.session.groups import ParameterGroups
from gradwire.worker.session.replica import Replica
from gradwire.worker.session.shared import SharedState

from ...compressors.window import WINDOW

SEED, RATE = 5, 0.05


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "window", WINDOW)


def model() -> torch.nn.Module:
    """A model with a parameter in bfloat16, of which the replica has the master, and a frozen one."""
    torch.manual_seed(3)
    made = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Linear(12, 8), torch.nn.Linear(8, 5))
    made[2].to(torch.bfloat16).bias.requires_grad_(False)
    return made


class Calm(Random):
    """Draws no exception: each worker has all gradients, and none leaves."""

    def random(self) -> float:
        return 1.0


class Lacking(Calm):
    """Draws that no worker has a gradient of some of the five tensors, and no other exception."""

    def __init__(self, *tensors: int) -> None:
        super().__init__()
        self.drawn = [float(tensor not in tensors) for tensor in range(5)]

    def random(self) -> float:
        return self.drawn.pop(0) if self.drawn else 1.0


def values_of(payload: ProjectedPayload) -> Float32:
    found = np.empty(payload.count, np.float32)
    sum_coordinates([payload], [1.0], found)
    return found


class Job:
    """A store, workers that push to it, and their replicas. Everything is drawn from a seed."""

    def __init__(self, optimizer: str, spec: str = "window", downlink: str = "auto", **rules: Any) -> None:
        self.job = OptimizerGroup(options=parse_optimizer(optimizer), learning_rate=RATE)
        decayed = f"{optimizer}{',' if ':' in optimizer else ':'}weight_decay=0.25"
        second = m.Group(optimizer=decayed, learning_rate=0.1)
        self.groups = (m.Group(optimizer=optimizer), second)
        self.compressor = parse_compressor(spec)
        self.manifest = self.replica().manifest
        self.downlink, self.rules = downlink, StepRules(**rules)
        self.store = self.new_store()
        self.workers = [
            ModelCompressor(self.manifest.specs, spec, LayerRule(), SEED, rank) for rank in range(3)
        ]

    def new_store(self, plan: Plan | None = None) -> SteppedStore:
        values = [values.view(np.float32).copy() for values in self.replica().values()]
        groups = self.manifest.optimizer_groups(self.job)
        return SteppedStore(
            self.manifest,
            values,
            self.downlink,
            lambda views: Optimizer.of_groups(groups, views, self.manifest.group_of, self.manifest.ends),
            SEED,
            self.rules,
            plan,
            self.compressor,
        )

    def replica(self) -> Replica:
        """A replica of the first parameters, at no version."""
        names = [name for name, _ in model().named_parameters()]
        number_of = {name: int(name.startswith("1.")) for name in names}
        made = Replica(model(), 100, ParameterGroups(groups=self.groups, number_of=number_of), masters=True)
        bases = Bases.of_job(made.manifest.specs, self.compressor, SEED)
        made.shared = SharedState(bases, made.manifest.optimizer_groups(self.job), made.manifest.group_of)
        made.adopt(self.store.plan if hasattr(self, "store") else made.manifest.plan())
        return made

    def shares(self, draw: Random, version: int) -> list[Share]:
        """The pushes of a version: tensors that are absent, spikes, and a worker's last push among them."""
        found: list[Share] = []
        absent = {index for index in range(len(self.manifest.specs)) if draw.random() < 0.15}
        for rank, worker in enumerate(self.workers):
            generator = torch.Generator().manual_seed(1000 * version + rank)
            scale = 1e4 if version == 17 and rank == 1 else 1.0
            given = [torch.randn(spec.shape, generator=generator) * scale for spec in self.manifest.specs]
            assert self.store.bases is not None
            worker.bases = self.store.bases
            step = worker.begin(PushTerms(samples=rank + 1, version=version, flush=draw.random() < 0.05))
            for index, gradient in enumerate(given):
                step.add(index, None if index in absent or draw.random() < 0.1 else gradient)
            step.finish()
            found.append(pushed(rank + 1, step.sent))
        return found

    def version(self, draw: Random) -> Applied:
        version = self.store.version + 1
        return apply(self.store, version=version, shares=self.shares(draw, version), rate_factor=1 / version)

    def assert_alike(self, replica: Replica) -> None:
        assert bits(replica) == replica_bits(self.store)
        assert self.store.bases is not None
        assert replica.shared is not None
        assert {n: each.tobytes() for n, each in replica.shared.bases.values.items()} == {
            n: each.tobytes() for n, each in self.store.bases.values.items()
        }


def take_early(draw: Random, replica: Replica, update: Broadcast) -> None:
    """Apply some parts early and take them back, then all."""
    assert replica.shared is not None
    parts = receive(update, replica.manifest, replica.plan, replica.shared.sizes)
    for header, payloads in draw.sample(parts, len(parts) - 1):
        replica.apply(header, payloads, early=True)
    before = replica.version
    replica.go_back()
    assert replica.version == before
    take(replica, update)


OPTIMIZERS = ["sgd", "sgd:momentum=0.9", "sgd:momentum=0.9,nesterov=on", "adam", "adamw", "adagrad"]


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replicas_step_to_the_bits_of_the_server(optimizer: str, clip: float) -> None:
    draw = Random(f"{optimizer} {clip}")
    job = Job(optimizer, clip_norm=clip, keep_last=True)
    first, early, late = job.replica(), job.replica(), job.replica()
    for each in (first, early):
        each.version = 0
    sizes = [spec.elements for spec in job.manifest.specs]
    for version in range(1, 25):
        update = job.version(draw)
        assert not update.whole
        take(first, update)
        take_early(draw, early, update)
        if version >= 12:
            take(late, update if version > 12 else snapshot(job.store))
        for each in (first, early, *([late] if version >= 12 else [])):
            job.assert_alike(each)
        if version == 8:  # a plan of one part for each tensor, and of two for a tensor without bases
            plan = arrange(sizes, [1] * len(sizes), [], 2)
            adopting: list[SteppedStore | Replica | ModelCompressor] = [job.store, first, early, late]
            for subject in (*adopting, *job.workers):
                subject.adopt(plan)
        if version == 15:
            image, job.store = job.store.image(), job.new_store(job.store.plan)
            job.store.restore(image)


def test_an_update_has_the_coordinates_of_the_mean_and_no_change() -> None:
    job = Job("adam")
    draw, replica = Calm(), job.replica()
    assert replica.shared is not None
    ((header, _),) = receive(job.version(draw), job.manifest, replica.plan, replica.shared.sizes)
    projected = [each for each in header.payloads if isinstance(each.kind, m.ProjectedHeader)]
    assert len(projected) == 3
    assert {each.content for each in projected} == {m.Content.GRADIENT}
    assert not header.beside


def test_coordinates_leave_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do so, too, where the copy that workers have takes memory of its own between the two, and where
    the step then fails: the server returns to the version before."""
    job = Job("sgd")
    sizes = [spec.elements for spec in job.manifest.specs]
    plan, matrices = arrange(sizes, [1] * len(sizes), [], 2), (0, 2, 4)
    replica = job.replica()
    replica.version = 0
    adopting: list[SteppedStore | Replica | ModelCompressor] = [job.store, replica, *job.workers]
    for subject in adopting:
        subject.adopt(plan)
    before = [each.clone() for each in job.store.parameters]
    moved = list[set[int]]()

    def add(update: Applied, part: Encoded) -> None:
        pairs = enumerate(zip(before, job.store.parameters, strict=True))
        moved.append({tensor for tensor, (old, new) in pairs if not torch.equal(old, new)})
        Broadcast.add(update, part)

    monkeypatch.setattr(Applied, "add", add)
    assert job.store.replica[0].data_ptr() == job.store.parameters[0].data_ptr()
    take(replica, job.version(Calm()))
    assert job.store.replica[0].data_ptr() != job.store.parameters[0].data_ptr()
    assert not set[int]().union(*moved).intersection(matrices)
    assert all(not torch.equal(before[tensor], job.store.parameters[tensor]) for tensor in matrices)
    job.assert_alike(replica)
    before, only = [each.clone() for each in job.store.parameters], Lacking(1, 3)
    with pytest.raises(DivergedError):
        apply(job.store, version=2, shares=job.shares(only, 2), learning_rates=(3e38, 3e38))
    assert all(torch.equal(before[tensor], job.store.parameters[tensor]) for tensor in matrices)
    job.assert_alike(replica)


def test_coordinates_of_coded_pushes_are_rounded_to_eight_bits_without_bias() -> None:
    """Those of pushes as float32 or float16 are float16, of any magnitude."""
    drawn = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    contexts = [StepContext(samples=1, version=0, random=Chance((seed,))) for seed in range(200)]
    coded = [values_of(rounded(512, drawn, context)) for context in contexts]
    step = np.abs(drawn).max() / 127
    assert all(np.abs(each - drawn).max() <= step * 1.001 for each in coded)
    assert np.abs(np.mean(coded, axis=0) - drawn).max() < step / 4
    for scale in (1e-30, 1.0, 1e30):
        given = drawn * np.float32(scale)
        assert np.abs(values_of(rounded(512, given)) - given).max() <= np.abs(given).max() / 1000


@pytest.mark.parametrize("downlink", ["none", "4bit"])
def test_a_downlink_by_name_sends_the_change_and_the_coordinates_beside_it(downlink: str) -> None:
    job = Job("adam", downlink=downlink)
    draw, replica, late = Random(2), job.replica(), job.replica()
    replica.version = 0
    for version in range(1, 12):
        take(replica, update := job.version(draw))
        assert not update.whole
        if version >= 5:
            take(late, update if version > 5 else snapshot(job.store))
            job.assert_alike(late)
        job.assert_alike(replica)
