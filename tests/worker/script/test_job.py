"""Loops of a script, against a connection that answers at once. Beside real servers:
tests/end_to_end/test_scripts.py."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import LIMITS, Script, updates
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradwire
from gradwire import ScriptError
from gradwire.common.addresses import parse_address
from gradwire.common.configuration import UsageError
from gradwire.common.parts import arrange
from gradwire.compressors import AbsentPayload, decode
from gradwire.compressors.four_bit import RunningMagnitude
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.proto.manifest import Manifest
from gradwire.settings import JobTerms, WorkerSettings
from gradwire.storage.backends import BackendError
from gradwire.worker.script import membership, part, process
from gradwire.worker.script.schedules import Each
from gradwire.worker.session.own_state import OwnState

BATCH, STEPS, EPOCHS = 4, 3, 2  # steps in an epoch
Connect = Callable[..., tuple["Server", gradwire.Job]]
DATA = TensorDataset(torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(1)))


class Server(Script):
    """Gives out one step after the other, and takes every push. Parameters stay as they are.

    Attributes:
        asks: whether each epoch is evaluated.
        interrupts: version at which an evaluation interrupts the epoch, as in async mode; -1 for none.
        total_steps: of the whole job, as the server says.
        address: that it has connected to.
    """

    def __init__(self, *, saves: int = -1, begins: int = 0, **terms: Any) -> None:
        """saves: version at which workers write down their state. begins: the one that there is, of another
        server."""
        super().__init__()
        self.job = job_message(
            JobTerms(id="j", work="gradients", script=True, batch_size=BATCH, epochs=EPOCHS, **terms)
        )
        self.asks, self.address = False, ""
        self.interrupts, self.total_steps = -1, EPOCHS * STEPS
        self.manifest: Manifest | None = None
        self.told: list[m.Assignment] = []
        self._steps, self._saves, self._begins = begins, saves, begins
        self.worker = "w0"
        self._replica: Any = None

    def join(self, software: str, compressor: str, compressors: Any) -> m.JoinResponse:
        at, self.rank = self._begins, 1
        return m.JoinResponse(
            job=self.job, limits=LIMITS, rank=1, version=at, epoch=at // STEPS, initialize=not at
        )

    def initialize(
        self, manifest: Manifest, values: Any, state: Any = None, least: int = 1, earlier: Any = None
    ) -> bool:
        self.manifest, self.earlier = manifest, earlier
        return True

    def ready(self, manifest: Manifest, *, restored: bool = False, accumulate: int = 0) -> None:
        sizes = [spec.elements for spec in manifest.specs]
        self.messages.append(arrange(sizes, [1] * len(sizes), []))  # a part for each tensor
        if self._begins:  # made when their turn comes
            self.messages += [partial(self._part, part) for part in range(len(sizes))]
        self.messages.append(self.assignment())

    def _part(self, part: int) -> Any:
        return updates(self.replica, self._begins)[part]

    def assignment(self) -> m.Assignment:
        """Return the present assignment."""
        epoch, step = divmod(self._steps, STEPS)
        found = m.Assignment(
            id=1 + self._steps,
            version=self._steps,
            epoch=epoch,
            world=1,
            progress=self._steps / STEPS,
            total_steps=self.total_steps if epoch < EPOCHS else 0,
            ranges=(m.Range(start=step * BATCH, count=BATCH),) if epoch < EPOCHS else (),
            finished=epoch == EPOCHS,
            evaluate_epoch=epoch if self.asks and not step else 0,
            plan=1,
        )
        self.told.append(found)
        return found

    def queue_commit(self, commit: m.Commit) -> None:
        super().queue_commit(commit)
        self._steps += 1
        outcome = m.Outcome(seq=commit.seq, decision=m.Decision.ACCEPTED, version=self._steps)
        save = [m.Save(version=self._steps)] if self._steps == self._saves else []
        evaluate = [self.evaluation()] if self._steps == self.interrupts else []
        self.messages += [outcome, *updates(self.replica, self._steps), *save, *evaluate, self.assignment()]

    def evaluation(self) -> m.Assignment:
        """Return an evaluation apart from any work."""
        return m.Assignment(id=0, version=self._steps, progress=self._steps / STEPS, evaluate_epoch=1)

    @property
    def replica(self) -> Any:
        assert self._replica is not None
        return self._replica

    def follow(self, job: gradwire.Job) -> None:
        """Follow a job: its parameters are sent as updates."""
        assignments: Any = job._driver.assignments  # pyright: ignore
        self._replica = assignments.session.replica


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    jobs: list[gradwire.Job] = []

    def make(of: Server | None = None, **given: Any) -> tuple[Server, gradwire.Job]:
        """Connect a script to a server. of: an existing server. given: options of the script then, and
        otherwise terms of the job."""
        server = of if of is not None else Server(**given)
        options: dict[str, Any] = given if of is not None else {}

        def connection_of(settings: WorkerSettings, metrics: object) -> Server:
            server.address = parse_address(settings.server)
            return server

        monkeypatch.setattr(membership, "connection_of", connection_of)
        if "MASTER_ADDR" not in os.environ:
            options = {"server": "localhost", **options}
        job = gradwire.connect(**{"compressor": "none", **options})
        driver = job._driver  # pyright: ignore
        begin = driver.begin

        def begun(*given: Any) -> Any:
            found = begin(*given)
            server.follow(job)
            return found

        monkeypatch.setattr(driver, "begin", begun)
        jobs.append(job)
        return server, job

    yield make
    for job in jobs:
        job.leave()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def attached(job: gradwire.Job) -> tuple[nn.Module, Any]:
    model = network()
    return job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def take(model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    """A step."""
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def test_each_epoch_comes_once_with_all_of_its_steps(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    seen: list[tuple[int, int]] = []
    for epoch in job.epochs():
        for step, (inputs,) in enumerate(job.batches(DATA)):
            take(model, optimizer, inputs)
            seen.append((epoch, step))
    assert seen == [(epoch, step) for epoch in range(EPOCHS) for step in range(STEPS)]
    assert job.done
    assert [commit.samples for commit, _ in server.pushed] == [BATCH] * (EPOCHS * STEPS)


def test_a_script_may_do_without_the_loop_over_epochs(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    epochs = 0
    while not job.done:
        epochs += 1
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
    assert (epochs, len(server.pushed)) == (EPOCHS, EPOCHS * STEPS)


def test_after_it_has_left_the_loops_end(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
            job.leave("enough")
    assert (len(server.pushed), server.ended) == (1, "enough")
    with pytest.raises(gradwire.ScriptError, match="this script has left the job"):
        optimizer.step()
    assert list(job.batches(DATA)) == list(job.epochs()) == []


def test_a_script_that_never_steps_leaves_before_it_hears_why(connect: Connect) -> None:
    server, job = connect()
    attached(job)
    one = TensorDataset(DATA.tensors[0][:BATCH])
    with pytest.raises(ScriptError, match=r"without optimizer\.step\(\)"):
        list(job.batches(one, num_workers=1))
    part_of_job = job._part  # pyright: ignore
    assert part_of_job not in process.joined.values()
    assert part_of_job.loading._loader is None  # pyright: ignore
    assert server.ended.startswith("the script failed: ScriptError(")
    assert server.failed


def test_a_worker_that_never_gets_the_jobs_parameters_says_so(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(begins=EPOCHS * STEPS - 1)
    ended = dataclasses.replace(server.assignment(), ranges=(), finished=True)

    def ready(*_: Any, **__: Any) -> None:
        server.messages = [*server.messages, ended]

    monkeypatch.setattr(server, "ready", ready)
    _, job = connect(server)
    attached(job)
    assert list(job.batches(DATA)) == []
    assert job.done
    assert "the model still has those of the script" in caplog.text


def test_what_is_logged_after_a_step_says_nothing_of_the_next_one(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server, job = connect()
    model, optimizer = attached(job)
    losses = iter([1.0, math.inf, 3.0, math.nan, 5.0, 6.0])
    for _ in job.epochs():
        for number, (inputs,) in enumerate(job.batches(DATA)):
            if number == 2:
                job.log(loss=7.0)
            take(model, optimizer, inputs)
            assert job.applied
            job.log(loss=next(losses))
    assert [commit.loss for commit, _ in server.pushed] == [None, None, 7, None, None, 7]
    assert sum("before optimizer.step()" in each for each in caplog.messages) == 1


def test_a_loss_that_is_not_finite_leaves_out_its_step(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    applied: list[bool] = []
    for _ in job.epochs():
        for number, (inputs,) in enumerate(job.batches(DATA)):
            job.log(loss=math.nan if number == 1 else 1.0)
            take(model, optimizer, inputs)
            applied.append(job.applied)
    assert applied == [True, False, True] * EPOCHS
    assert "version 1: the loss is nan; this step contributes nothing" in caplog.messages


def test_the_metrics_of_an_epoch_stay_what_they_were_when_they_are_asked_for_again(connect: Connect) -> None:
    server, job = connect()
    server.asks = True
    model, optimizer = attached(job)
    number = 0
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            number += 1
            job.log(number=number)
            take(model, optimizer, inputs)
            if number == STEPS + 1:  # the work was answered, and the stream broke
                server.messages = [server.told[STEPS], *server.messages]
    found = {report.epoch: report.metrics for report in server.reports}
    assert found[1] == {"number": 2.0}
    assert all(report.metrics == found[report.epoch] for report in server.reports)


def test_under_torchrun_the_server_is_where_its_master_is(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    assert connect()[0].address == "10.1.2.3:50051"
    monkeypatch.setenv("GC_SERVER", "10.1.2.4:99")
    assert connect()[0].address == "10.1.2.4:99"


# ---- what outlives a script


@pytest.mark.parametrize("loop", ["batches", "steps"])
def test_what_a_script_does_at_an_epochs_end_is_not_left_out_when_it_goes_on_there(
    connect: Connect, tmp_path: Path, loop: str
) -> None:
    """A checkpoint there is of the state before that."""

    def trained(server: Server) -> tuple[list[object], object]:
        _, job = connect(server, state=str(tmp_path), worker_id="w0")
        torch.manual_seed(5)
        model, optimizer = attached(job)
        loader = DataLoader(DATA, BATCH, shuffle=True)
        seen: list[object] = []
        for epoch in job.epochs():
            for (inputs,) in job.batches(DATA) if loop == "batches" else job.steps(loader):
                take(model, optimizer, inputs)
                seen.append((epoch, inputs.tolist(), float(torch.rand(()))))
            job.state["ends"] = (*job.state.get("ends", ()), epoch, float(torch.rand(())))
        return seen, job.state["ends"]

    server = Server(saves=STEPS)
    seen, ends = trained(server)
    while not server.saved_at:  # on another thread
        time.sleep(0.01)
    assert server.saved_at == [(STEPS, "")]
    assert trained(Server(begins=STEPS)) == (seen[STEPS:], ends)


@pytest.mark.parametrize(("begins", "epoch"), [(STEPS - 1, 0), (STEPS + 1, 1)])
def test_a_script_that_was_killed_alone_finds_what_it_kept(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture, begins: int, epoch: int
) -> None:
    """The job has gone on meanwhile, in the same epoch or to the next one."""
    server = Server(saves=1)
    _, job = connect(server, state=str(tmp_path), worker_id="w0")
    model, optimizer = attached(job)
    job.state["best"] = 0.5
    loader = DataLoader(DATA, BATCH)
    for inputs, _ in zip(job.steps(loader), range(2), strict=False):
        take(model, optimizer, inputs[0])
    while not server.saved_at:  # on another thread
        time.sleep(0.01)
    job.leave()
    _, job = connect(Server(begins=begins), state=str(tmp_path), worker_id="w0")
    assert job.state["best"] == 0.5
    model, optimizer = attached(job)
    assert next(iter(job.epochs())) == epoch
    (inputs,) = next(iter(job.steps(loader)))
    # One batch of the first epoch had been taken when the state was written.
    assert torch.equal(inputs, DATA.tensors[0][BATCH : 2 * BATCH] if not epoch else DATA.tensors[0][:BATCH])
    assert f"own state of version 1 in a job at version {begins}" in caplog.text
    assert "the residual is dropped" in caplog.text


def test_a_place_that_cannot_be_reached_ends_the_membership(connect: Connect) -> None:
    server = Server()
    with pytest.raises(BackendError, match="Protocol not known: nonsense"):
        connect(server, state="nonsense://bucket", worker_id="w0")
    assert server.ended.startswith("failed: nonsense://bucket/j.w0: Protocol not known")


# ---- loaders of a script's own


def test_a_loader_is_begun_anew_within_an_epoch(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    epochs: list[int] = []
    loader = DataLoader(TensorDataset(DATA.tensors[0][: 2 * BATCH]), batch_size=BATCH)
    for epoch in job.epochs():
        epochs.append(epoch)
        for (inputs,) in job.steps(loader, per_epoch=STEPS):
            take(model, optimizer, inputs)
    assert epochs == [0, 1]
    assert len(server.pushed) == EPOCHS * STEPS


def test_a_script_takes_the_jobs_compressor_unless_it_names_one(connect: Connect) -> None:
    server = Server(preset="low-communication", compressor="1bit:block=4096,decay=0.9")
    assert connect(server, compressor="")[1]._member.compressor.text == "1bit:block=4096,decay=0.9"  # pyright: ignore
    assert connect(server, compressor="8bit")[1]._member.compressor.text == "8bit"  # pyright: ignore


def test_a_script_whose_optimizer_does_not_suit_the_preset_is_refused(connect: Connect) -> None:
    _, job = connect(preset="low-communication")
    model = network()
    with pytest.raises(ScriptError, match="optimizer SGD: the server's --preset low-communication expects"):
        job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    job.attach(model, torch.optim.AdamW(model.parameters()))


def incomplete(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters][1:], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer_of", "message"),
    [
        (
            torch.optim.LBFGS,
            r"LBFGS: the server steps SGD, Adam, .* and Adagrad.*attach\(\.\.\., steps='local'\)",
        ),
        (partial(torch.optim.Adam, amsgrad=True), r"group 0: amsgrad=True: the server has no amsgrad"),
        (
            incomplete,
            r"parameter '0\.weight' requires a gradient, but the optimizer does not have it",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_attached_is_refused_by_name(
    connect: Connect, optimizer_of: Any, message: str
) -> None:
    _, job = connect()
    model = network()
    with pytest.raises(ScriptError, match=message):
        job.attach(model, optimizer_of(model.parameters()))


def test_steps_outside_of_the_loop_and_other_batches_than_the_jobs_are_refused(connect: Connect) -> None:
    _, job = connect()
    _, optimizer = attached(job)
    with pytest.raises(ScriptError, match=r"call it in the loop over job\.batches"):
        optimizer.step()
    with pytest.raises(ScriptError, match=f"the job has {BATCH}; start gc-server with --batch-size 64"):
        job.batches(DATA, batch_size=64)


def test_a_script_may_insist_on_a_preset(connect: Connect) -> None:
    connect(Server(preset="sparse-sgd"), preset="sparse-sgd")
    with pytest.raises(UsageError, match="--preset diloco: job j has --preset sparse-sgd"):
        connect(Server(preset="sparse-sgd"), preset="diloco")


def test_a_loader_without_batches_is_refused(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    batches = iter(DataLoader(DATA, batch_size=BATCH))
    for _ in zip(job.epochs(), [0], strict=False):
        for (inputs,) in job.steps(batches, per_epoch=STEPS):
            take(model, optimizer, inputs)
    with pytest.raises(gradwire.ScriptError, match=r"run out of them.*not a generator"):
        next(iter(job.steps(batches, per_epoch=STEPS)))


@pytest.mark.parametrize(("replicas", "samples"), [(1, 3 * BATCH), (3, 3 * BATCH)])
def test_an_epoch_has_the_batches_of_all_replicas(connect: Connect, replicas: int, samples: int) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    sampler = DistributedSampler[Any](DATA, replicas, job.rank % replicas)
    for (inputs,) in job.steps(DataLoader(DATA, BATCH, sampler=sampler)):
        take(model, optimizer, inputs)
    assert server.manifest is not None
    assert server.manifest.train_samples == samples


# ---- optimizers and gradients


def test_options_of_groups_other_than_the_rate_may_not_change(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    (inputs,) = next(iter(job.batches(DATA)))
    take(model, optimizer, inputs)
    schedule.step()  # has momentum follow
    (inputs,) = next(iter(job.batches(DATA)))
    with pytest.raises(gradwire.ScriptError, match=r"group 0: .*momentum=0\.95,.*to .*cycle_momentum=False"):
        take(model, optimizer, inputs)


def test_the_servers_optimizer_begins_with_what_the_scripts_remembers(connect: Connect) -> None:
    server, job = connect()
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(DATA.tensors[0]).square().mean().backward()
    plain.step()
    _, optimizer = job.attach(model, plain)
    saved = optimizer.state_dict()
    assert saved["state"][0]["momentum_buffer"].shape == (8, 6)
    job.epochs(start=1)
    with pytest.raises(gradwire.ScriptError):  # this server begins with epoch 0 all the same
        next(iter(job.batches(DATA)))
    assert server.earlier.epoch == 1
    assert sorted(server.earlier.moments) == [0, 1, 2, 3]
    (values,) = server.earlier.moments[0].values()
    assert torch.equal(torch.from_numpy(values), saved["state"][0]["momentum_buffer"].flatten())


def loaded(optimizer: Any, **changes: Any) -> None:
    """Load a state_dict of an SGD with momentum, changed."""
    other = network()
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    other(DATA.tensors[0]).square().mean().backward()
    plain.step()
    optimizer.load_state_dict({**plain.state_dict(), **changes})


def test_a_state_that_cannot_be_continued_from_is_refused_by_name(connect: Connect) -> None:
    _, job = connect()
    model = network()
    _, optimizer = job.attach(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(gradwire.ScriptError, match=r"group 0 has no .*betas.* another kind .* than Adam"):
        loaded(optimizer)
    _, job = connect()
    model, optimizer = attached(job)
    loaded(optimizer, state={0: {"momentum_buffer": torch.zeros(2, 2)}})
    with pytest.raises(gradwire.ScriptError, match=r"of '0\.weight' has shape \(2, 2\), expected \(8, 6\)"):
        next(iter(job.batches(DATA)))
    _, job = connect()
    model, optimizer = attached(job)
    (inputs,) = next(iter(job.batches(DATA)))
    with pytest.raises(gradwire.ScriptError, match="the job has begun, and the server's optimizer"):
        loaded(optimizer)
    take(model, optimizer, inputs)
    job.leave()
    with pytest.raises(gradwire.ScriptError, match=r"state_dict\(\): this script has left the job"):
        optimizer.state_dict()


def test_the_state_of_the_servers_optimizer_is_not_read_as_an_attribute(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    loaded(optimizer)
    first = next(model.parameters())
    assert "momentum_buffer" in optimizer.state[first]  # until batches begin it is the script's
    (inputs,) = next(iter(job.batches(DATA)))
    with pytest.raises(gradwire.ScriptError, match=r"optimizer\.state: .* call optimizer\.state_dict\(\)"):
        _ = optimizer.state[first]
    take(model, optimizer, inputs)
    assert not deepcopy(optimizer).state


LATER = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_file_without_keys_of_schedulers_and_newer_torch_is_loaded(connect: Connect, kind: Any) -> None:
    """The optimizer loads it like torch's own."""
    server, job = connect()
    other = network()
    saved = kind(other.parameters(), lr=0.375).state_dict()
    older = [
        {key: value for key, value in group.items() if key not in LATER} for group in saved["param_groups"]
    ]
    assert all(group.keys() < saved["param_groups"][0].keys() for group in older)
    model = network()
    model, optimizer = job.attach(model, kind(model.parameters(), lr=0.1))
    job.follow(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))  # adds initial_lr
    optimizer.load_state_dict({**saved, "param_groups": older})
    (inputs,) = next(iter(job.batches(DATA)))
    take(model, optimizer, inputs)
    assert {header.learning_rates for header, _ in server.parts.values()} == {(0.375,)}
    assert LATER & optimizer.param_groups[0].keys() == LATER & saved["param_groups"][0].keys()


def test_an_epoch_whose_loop_ends_early_comes_again_and_the_log_says_so(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    epochs: list[int] = []
    for epoch in job.epochs(EPOCHS):
        epochs.append(epoch)
        for inputs, _ in zip(job.batches(DATA), range(2), strict=False):
            take(model, optimizer, inputs[0])
    assert epochs == [0, 0, 1, 1]
    assert [record.message for record in caplog.records if "is repeated" in record.message] == [
        "epoch 1 is repeated: the script's loop over batches ended before all samples of the epoch were "
        "trained on. To end early, call job.stop()"
    ]


def test_an_evaluation_that_interrupts_an_epoch_is_no_warning(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server, job = connect()
    server.interrupts = 2
    model, optimizer = attached(job)
    seen: list[tuple[int, int, bool]] = []
    for epoch in job.epochs():
        before = job.version
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
        seen.append((epoch, job.version - before, job.evaluating))
    assert seen == [(0, 2, True), (0, 1, False), (1, 3, False)]
    assert "is repeated" not in caplog.text


def test_what_batches_returns_is_looped_over_in_each_epoch_and_is_no_iterator(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    batches: Any = job.batches(DATA)
    with pytest.raises(TypeError, match="not an iterator"):
        next(batches)
    taken = 0
    while not job.done:
        for (inputs,) in batches:
            take(model, optimizer, inputs)
            taken += 1
    assert taken == EPOCHS * STEPS


def test_batches_and_steps_have_the_attributes_of_a_data_loader(connect: Connect) -> None:
    _, job = connect()
    batches: Any = job.batches(DATA, num_workers=2)
    assert (len(batches.dataset), batches.batch_size, batches.num_workers) == (len(DATA), BATCH, 2)
    assert not batches.drop_last
    assert callable(batches.collate_fn)
    loader = DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 1, 0))
    steps: Any = job.steps(loader)
    assert (steps.dataset, steps.sampler) == (DATA, loader.sampler)
    with pytest.raises(AttributeError, match="nothing"):
        steps.nothing  # noqa: B018


def test_a_script_whose_file_has_all_epochs_of_the_job_is_told_so(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    attached(job)
    assert list(job.epochs(start=EPOCHS)) == []
    (record,) = [record for record in caplog.records if "--epochs" in record.message]
    assert record.levelno == logging.WARNING
    assert record.message.startswith(
        "job.epochs(start=2): the job has 2 epochs, and the script trains on none"
    )


def test_a_script_that_wants_other_epochs_than_the_job_is_refused(connect: Connect) -> None:
    _, job = connect()
    with pytest.raises(
        gradwire.ScriptError, match=r"job.epochs\(5\): the job has 2 epochs; start gc-server with"
    ):
        job.epochs(5)
    with pytest.raises(gradwire.ScriptError, match="expected 0 to 2"):
        job.epochs(start=-1)
    with pytest.raises(gradwire.ScriptError, match=r"start=3\): expected 0 to 2, the job's number of epochs"):
        job.epochs(start=3)
    assert list(job.epochs(start=2)) == []


def test_a_job_that_is_not_as_far_as_the_script_is_refused(connect: Connect) -> None:
    _, job = connect()
    attached(job)
    job.epochs(start=1)
    with pytest.raises(
        gradwire.ScriptError, match=r"start=1\): the job is only in epoch 1, with the parameters"
    ):
        next(iter(job.batches(DATA)))


def test_the_script_knows_how_long_the_job_is(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    with pytest.raises(gradwire.ScriptError, match=r"total_steps: the number of samples .* call job.batches"):
        _ = job.total_steps
    batches = job.batches(DATA)
    assert (len(batches), job.total_steps, job.total_epochs) == (STEPS, EPOCHS * STEPS, EPOCHS)
    parts: list[float] = []
    for _ in job.epochs():
        for (inputs,) in batches:
            parts.append(job.progress)
            take(model, optimizer, inputs)
    assert parts == [step / (EPOCHS * STEPS) for step in range(EPOCHS * STEPS)]
    assert job.progress == 1.0


def test_the_last_number_of_steps_stays_while_the_server_gives_no_work(connect: Connect) -> None:
    """Another one than the estimate, because more workers have joined than --min-workers says."""
    server, job = connect()
    server.interrupts, server.total_steps = 2, 5
    model, optimizer = attached(job)
    found: list[int] = []
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
        found.append(job.total_steps)
    assert found == [5, 5, 5]


def test_a_schedule_of_another_length_than_the_job_is_named(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    schedule = job.follow(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9))
    job.follow(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS), each="epoch")
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            take(model, optimizer, inputs)
            schedule.step()
    (said,) = [record.message for record in caplog.records if "made for" in record.message]
    assert said.startswith(
        "CosineAnnealingLR is made for 9 steps, and the job takes 6: its rates do not reach"
    )


def test_a_rank_that_the_server_changes_is_the_scripts(connect: Connect) -> None:
    server, job = connect()
    assert job.rank == 1
    server.rank = 3
    assert job.rank == 3


def test_a_push_that_is_begun_anew_has_the_rates_of_the_step(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    for number, (inputs,) in enumerate(job.batches(DATA), start=1):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] = number / 8
        optimizer.step()
        optimizer.zero_grad()
    committed = [commit.seq for commit, _ in server.pushed]
    rates = {seq: header.learning_rates for (seq, _), (header, _) in server.parts.items()}
    assert [rates[seq] for seq in committed] == [(0.125,), (0.25,), (0.375,)]
    assert len(server.abandoned) == 1


def test_where_parts_count_at_once_a_step_is_not_taken_back(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The last tensors' parts leave first; then a gradient is found that is not finite."""
    caplog.set_level(logging.WARNING)
    server, job = connect(overlap="both")
    model, optimizer = attached(job)
    for number, (inputs,) in enumerate(job.batches(DATA)):
        model(inputs).square().mean().backward()
        if number == 1:
            first = next(model.parameters())
            assert first.grad is not None
            first.grad[0, 0] = math.inf
        optimizer.step()
        optimizer.zero_grad()
    assert server.abandoned == []
    assert [commit.seq for commit, _ in server.pushed] == [1, 2, 3]
    assert len({part for seq, part in server.parts if seq == 2}) == len(server.replica.plan.parts)
    assert not server.parts[2, len(server.replica.plan.parts) - 1][1]  # empty
    assert server.parts[2, 0][1]
    assert "parts that were sent count, the others are sent empty" in caplog.text


def test_what_the_loss_does_not_reach_and_what_is_frozen_is_not_pushed(connect: Connect) -> None:
    server, job = connect()
    model, other = network(), nn.Linear(2, 2)
    model.add_module("other", other)
    other.bias.requires_grad_(False)
    _, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (inputs,) = next(iter(job.batches(DATA)))
    first: nn.Module = nn.Sequential(*list(model.children())[:3])
    first(inputs).square().mean().backward()
    optimizer.step()
    assert server.manifest is not None
    names = [spec.name for spec in server.manifest.specs]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias", "other.weight", "other.bias"]
    ((_, payloads),) = server.pushed
    assert [isinstance(payload, AbsentPayload) for payload in payloads] == [False] * 4 + [True] * 2


def test_a_frozen_member_of_the_optimizer_keeps_its_dtype(connect: Connect) -> None:
    """Like the base of adapters, it is uploaded once, as it is, and is no tensor of the job."""
    server, job = connect()
    model = network()
    model.add_module("base", nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False))
    _, optimizer = job.attach(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    next(iter(job.batches(DATA)))
    assert server.manifest is not None
    assert [spec.name for spec in server.manifest.specs] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    entries = {entry.name: (entry.kind, entry.dtype) for entry in server.manifest.entries}
    assert entries == dict.fromkeys(["base.weight", "base.bias"], (m.EntryKind.FROZEN, "bfloat16"))
    optimizer.zero_grad()


def test_a_closure_computes_the_gradients_of_its_step(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    (inputs,) = next(iter(job.batches(DATA)))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    ((_, payloads),) = server.pushed
    assert not any(isinstance(payload, AbsentPayload) for payload in payloads)


def test_an_optimizers_state_that_is_loaded_brings_its_rates(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.375
    optimizer.load_state_dict(saved)
    (inputs,) = next(iter(job.batches(DATA)))
    take(model, optimizer, inputs)
    assert {header.learning_rates for header, _ in server.parts.values()} == {(0.375,)}


AGAIN = """
import sys
import scripted, gradwire
from gradwire.common import stored
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.settings import JobTerms
from gradwire.worker.script import membership, part, process
from gradwire.worker.script.schedules import Each
from gradwire.worker.session.own_state import OwnState

class Server(scripted.Script):
    worker = "w0"
    def join(self, *told):
        job = job_message(JobTerms(id="j", work="gradients", script=True))
        return m.JoinResponse(job=job, limits=scripted.LIMITS, rank=0, version=3, initialize=False)

membership.connection_of = lambda settings, metrics: Server()
assert stored.class_of("running-magnitude") is None  # this process has not compressed anything yet
job = gradwire.connect(server="localhost", compressor="4bit", state=sys.argv[1], worker_id="w0")
print(job._member.restored[1]["states"])
"""


def test_a_new_process_reads_the_state_of_its_compressor(tmp_path: Path) -> None:
    own = OwnState(tmp_path, job="j", worker="w0")
    tree = {"states": [RunningMagnitude(total=2.0, elements=4.0)], "owner": {"epoch": 0}}
    own.write(3, tree, lambda error: None)
    assert own.close()
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "RunningMagnitude(total=2.0, elements=4.0)" in done.stdout, done.stderr


# ---- mode local

EACH = 2  # local steps of a round
WORK = "local:correction=0.0,delayed=off"
Make = Callable[[torch.optim.Optimizer, gradwire.Job], LambdaLR]
OF_JOB = EPOCHS * STEPS * EACH


class LocalServer(Server):
    """Gives out rounds of two local steps."""

    def __init__(self, *, begins: int = 0) -> None:
        super().__init__(begins=begins)
        terms = JobTerms(
            id="j", work=WORK, mode="local", script=True, batch_size=BATCH // EACH, epochs=EPOCHS
        )
        self.job, self.total_steps = job_message(terms), OF_JOB

    def assignment(self) -> m.Assignment:
        found = super().assignment()
        return dataclasses.replace(found, local_steps=EACH * found.version)


def trained(connect: Connect, begins: int, make: Make, each: Each, optimizer: Any = None) -> list[Any]:
    """The rate of each step, and the job's progress then."""
    server, job = connect(LocalServer(begins=begins))
    model = network()
    model, step = job.attach(model, optimizer or torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = job.follow(make(step, job), each=each)
    found: list[Any] = []
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            found.append((scheduler.get_last_lr()[0], job.progress))
            take(model, step, inputs)
            if each == "step":
                scheduler.step()
    assert [commit.samples for commit, _ in server.pushed] == [BATCH] * (EPOCHS * STEPS - begins)
    return found


@pytest.mark.parametrize("begins", [0, 2])
def test_a_scheduler_of_steps_counts_local_steps_also_of_rounds_before_a_worker_joined(
    connect: Connect, begins: int
) -> None:
    found = trained(connect, begins, lambda step, _: LambdaLR(step, lambda number: 1 / (1 + number)), "step")
    assert [rate for rate, _ in found] == [1 / (1 + number) for number in range(EACH * begins, OF_JOB)]


def test_progress_moves_with_each_local_step(connect: Connect) -> None:
    found = trained(connect, 0, lambda step, job: LambdaLR(step, lambda _: 1 - job.progress), "progress")
    assert [part for _, part in found] == pytest.approx([number / OF_JOB for number in range(OF_JOB)])
    assert [rate for rate, _ in found] == pytest.approx([1 - number / OF_JOB for number in range(OF_JOB)])


def test_muon_takes_the_steps_of_a_round(connect: Connect) -> None:
    """Here the pushed change is that of the helper's optimizer without any job."""
    server, job = connect(LocalServer())
    model, plain = network(), network()
    model, step = job.attach(model, gradwire.optim.muon(model, 0.1))
    alone = gradwire.optim.muon(plain, 0.1)
    before = [each.detach().clone() for each in plain.parameters()]
    batches = job.batches(DATA)
    for number, (inputs,) in enumerate(batches):
        take(model, step, inputs)
        if number < EACH:
            take(plain, alone, inputs)
    pushed = [np.asarray(decode(each)) for each in server.pushed[0][1]]
    for began, ended, change in zip(before, plain.parameters(), pushed, strict=True):
        expected = (began - ended.detach()).numpy().reshape(-1)
        np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-7)


def test_muon_where_the_server_steps_is_refused_with_a_remedy(connect: Connect) -> None:
    _, job = connect()
    model = network()
    with pytest.raises(gradwire.ScriptError, match=r"MuonWithAdamW: the server steps .* steps='local'"):
        job.attach(model, gradwire.optim.muon(model, 0.1))


# ---- batches that are compared with other workers'


def test_the_first_batches_of_the_scripts_own_loader_are_reported(connect: Connect) -> None:
    def reported(*, seed: int) -> list[int]:
        server, job = connect()
        model, optimizer = attached(job)
        torch.manual_seed(seed)
        loader = DataLoader(DATA, BATCH, shuffle=True)
        for _ in job.epochs():
            for (inputs,) in job.steps(loader):
                take(model, optimizer, inputs)
        job.leave()
        return [commit.batch for commit, _ in server.pushed]

    first, alike, other = reported(seed=1), reported(seed=1), reported(seed=2)
    assert first == alike
    assert all(first)
    assert len({*first, *other}) == 2 * len(first)


def test_batches_of_the_server_are_not_reported(connect: Connect) -> None:
    server, job = connect()
    part_of_an_epoch(job, lambda: None)
    assert not any(commit.batch for commit, _ in server.pushed)


# ---- the end of the process


def part_of_an_epoch(job: gradwire.Job, each: Callable[[], None]) -> None:
    """Train for the job, calling `each` before each backward pass."""
    model, optimizer = attached(job)
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            loss = model(inputs).square().mean()
            each()
            loss.backward()
            optimizer.step()


@pytest.fixture
def sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default handler, before and after."""
    monkeypatch.setattr(process, "_stopping", None)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("compressor", ["none", "topk:ratio=24"])
def test_a_step_that_was_interrupted_in_backward_begins_anew(
    connect: Connect, caplog: pytest.LogCaptureFixture, compressor: str
) -> None:
    """Its gradients, also those that have left, count once, as after Ctrl-C in a notebook."""

    def trained(*, interrupted: bool) -> Server:
        server, job = connect(Server(overlap="backward"), compressor=compressor)
        model, optimizer = attached(job)
        # Interrupts the second step, when the last layer's gradients have left.
        steps, second = itertools.count(), interrupted

        def interrupt(gradient: torch.Tensor) -> None:
            nonlocal second
            if second and next(steps) == 1:
                second = False
                raise KeyboardInterrupt

        model[1].register_full_backward_hook(lambda _, given, __: interrupt(given[0]))  # type: ignore[index]
        while not job.done:
            try:
                for _ in job.epochs():
                    for (inputs,) in job.batches(DATA):
                        model(inputs).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except KeyboardInterrupt:
                pass
        job.leave()
        return server

    plain, again = trained(interrupted=False), trained(interrupted=True)
    assert "the step at version 1 was interrupted, and begins anew" in caplog.text
    assert "from now on gradients leave after the backward pass" not in caplog.text
    assert len(plain.pushed) == len(again.pushed) == EPOCHS * STEPS
    for (_, one), (_, other) in zip(plain.pushed, again.pushed, strict=True):
        assert [each.data.tobytes() for each in one] == [each.data.tobytes() for each in other]


@pytest.mark.usefixtures("sigterm")
def test_after_sigterm_the_present_step_and_the_residual_are_pushed(connect: Connect) -> None:
    server, job = connect(Server(), compressor="topk:ratio=24")
    left: list[int] = []

    def stop() -> None:
        if not left:
            left.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        part_of_an_epoch(job, stop)
    assert (ended.value.code, server.ended) == (143, "stopped by SIGTERM")
    # The push of the present step had begun; the next one takes the residual with it.
    sent = [sum(payload.data.size for payload in payloads) for _, payloads in server.pushed]
    assert len(sent) == 2
    assert sent[1] > 4 * sent[0]
    assert not job._driver.assignments.session.held_back  # type: ignore[union-attr]


@pytest.mark.usefixtures("sigterm")
def test_a_script_that_does_not_step_again_after_sigterm_ends_all_the_same(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, job = connect(Server(), compressor="topk:ratio=24")
    monkeypatch.setattr(part.Part, "leave_s", 0.2)
    began = time.monotonic()

    def hang() -> None:
        if server.pushed:
            signal.raise_signal(signal.SIGTERM)
            while time.monotonic() < began + 60:
                time.sleep(0.01)

    with pytest.raises(SystemExit) as ended:
        part_of_an_epoch(job, hang)
    assert ended.value.code == 143
    assert time.monotonic() < began + 30
    job.leave()
    assert server.ended == "stopped by SIGTERM"


@pytest.mark.usefixtures("sigterm")
def test_a_scripts_own_handler_stays_and_the_default_one_comes_back(connect: Connect) -> None:
    _, job = connect()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    job.leave()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    own: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: own.append(number))
    _, job = connect()
    signal.raise_signal(signal.SIGTERM)
    assert own == [signal.SIGTERM]
    part_of_an_epoch(job, lambda: None)
    assert job.done


def test_a_cell_that_runs_again_leaves_the_job_of_its_first_run(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    first, job = connect()
    with pytest.raises(KeyboardInterrupt):
        part_of_an_epoch(job, interrupt)
    connect()
    assert first.ended == "the script has ended"
    assert "connects again: its earlier job leaves" in caplog.text
    second, _ = connect(Server(), worker_id="another")  # of this process, too
    assert not second.ended


def test_two_threads_are_not_the_same_worker(connect: Connect) -> None:
    go = threading.Event()
    thread = threading.Thread(target=lambda: (connect(), go.wait(60)))
    thread.start()
    while not process.joined:
        time.sleep(0.01)
    with pytest.raises(ScriptError, match=r"thread 'Thread-.*worker_id of its own"):
        connect()
    go.set()
    thread.join()


@pytest.mark.parametrize("with_statement", [False, True])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no"), "the script failed: ValueError('no')"),
        (KeyboardInterrupt(), "stopped by KeyboardInterrupt"),
        (None, "the script has ended"),
    ],
)
def test_the_server_hears_of_a_failed_script_with_and_without_a_context(
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    with_statement: bool,
    error: BaseException | None,
    reason: str,
) -> None:
    monkeypatch.setattr(sys, "last_value", OSError("of an earlier cell"), raising=False)
    server, job = connect()
    if with_statement:
        with contextlib.suppress(BaseException), job:
            if error is not None:
                raise error
    else:
        if error is not None:
            monkeypatch.setattr(sys, "last_value", error)  # as the interpreter does before it exits
        process.leave_all()
    assert server.ended == reason
    assert server.failed == isinstance(error, Exception)


@pytest.mark.parametrize(("code", "failed"), [(None, False), (0, False), (3, True)])
def test_a_script_that_exits_with_a_code_has_failed(connect: Connect, code: Any, failed: bool) -> None:
    server, job = connect()
    with contextlib.suppress(SystemExit), job:
        sys.exit(code)
    assert server.failed == failed


def test_a_forked_child_has_no_part_in_the_job(connect: Connect) -> None:
    server, job = connect()
    child = os.fork()
    if not child:  # os._exit, because this process is a test's
        job.leave()
        process.leave_all()
        os._exit(0 if not server.ended and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not server.ended
