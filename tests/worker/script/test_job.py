"""What a script does in its loops, against a connection that answers at once. Beside real servers:
tests/end_to_end/test_scripts.py."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import LIMITS, Script, updates
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradwire
from gradwire.compressors import AbsentPayload
from gradwire.places import PlaceError
from gradwire.planning.parts import arrange
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.proto.manifest import Manifest
from gradwire.settings import JobTerms
from gradwire.worker.script import job as job_module

BATCH, STEPS, EPOCHS = 4, 3, 2  # steps in an epoch
Connect = Callable[..., tuple["Server", gradwire.Job]]
DATA = TensorDataset(torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(1)))


class Server(Script):
    """Gives out one step after the other, and takes every push. Parameters stay as they are.

    Attributes:
        asks: whether each epoch is evaluated.
        ended: why the script has left. address: that it has connected to.
    """

    def __init__(self, *, saves: int = -1, begins: int = 0, **terms: Any) -> None:
        """saves: version at which workers write down their state. begins: the one that there is, of another
        server."""
        super().__init__()
        self.job = job_message(
            JobTerms(id="j", work="gradients", script=True, batch_size=BATCH, epochs=EPOCHS, **terms)
        )
        self.asks, self.ended, self.address = False, "", ""
        self.manifest: Manifest | None = None
        self.told: list[m.Assignment] = []
        self._steps, self._saves, self._begins = begins, saves, begins
        self.worker = "w0"
        self._replica: Any = None

    def join(self, software: str, compressor: str, compressors: Any) -> m.JoinResponse:
        at = self._begins
        return m.JoinResponse(
            job=self.job, limits=LIMITS, rank=1, version=at, epoch=at // STEPS, initialize=not at
        )

    def initialize(self, manifest: Manifest, values: Any, state: Any = None, least: int = 1) -> bool:
        self.manifest = manifest
        return True

    def ready(self, manifest: Manifest, *, restored: bool = False) -> None:
        sizes = [spec.elements for spec in manifest.specs]
        self.messages.append(arrange(sizes, [1] * len(sizes), []))  # a part for each tensor
        if self._begins:  # made when their turn comes
            self.messages += [partial(self._part, part) for part in range(len(sizes))]
        self.messages.append(self.assignment())

    def _part(self, part: int) -> Any:
        return updates(self.replica, self._begins)[part]

    def assignment(self) -> m.Assignment:
        """What is to be done now."""
        epoch, step = divmod(self._steps, STEPS)
        found = m.Assignment(
            id=1 + self._steps,
            version=self._steps,
            epoch=epoch,
            world=1,
            ranges=(m.Range(start=step * BATCH, count=BATCH),) if epoch < EPOCHS else (),
            finished=epoch == EPOCHS,
            evaluate_epoch=epoch if self.asks and not step else 0,
            plan=1,
        )
        self.told.append(found)
        return found

    def commit(self, commit: m.Commit) -> None:
        super().commit(commit)
        self._steps += 1
        outcome = m.Outcome(seq=commit.seq, decision=m.Decision.ACCEPTED, version=self._steps)
        save = [m.Save(version=self._steps)] if self._steps == self._saves else []
        self.messages += [outcome, *updates(self.replica, self._steps), *save, self.assignment()]

    @property
    def replica(self) -> Any:
        assert self._replica is not None
        return self._replica

    def follow(self, job: gradwire.Job) -> None:
        """Whose parameters go down."""
        session: Any = job._session  # pyright: ignore
        self._replica = session.replica

    def next(self, timeout_s: float) -> Any:
        assert self.messages, "the script waits for what never comes"
        return super().next(timeout_s)

    def leave(self, reason: str, *, failed: bool) -> None:
        self.ended = reason

    def close(self) -> None:
        pass

    @property
    def sent(self) -> tuple[int, float]:
        return 0, 0.0


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    jobs: list[gradwire.Job] = []

    def make(of: Server | None = None, **given: Any) -> tuple[Server, gradwire.Job]:
        """of: a server that there is. given: options of the script then, and otherwise terms of the job."""
        server = of if of is not None else Server(**given)
        options: dict[str, Any] = given if of is not None else {}

        def connection(address: str, **_: Any) -> Server:
            server.address = address
            return server

        monkeypatch.setattr(job_module, "Connection", connection)
        if "MASTER_ADDR" not in os.environ:
            options = {"server": "localhost", **options}
        job = gradwire.connect(compressor="none", **options)
        begin = job._begin  # pyright: ignore

        def begun(*given: Any) -> Any:
            found = begin(*given)
            server.follow(job)
            return found

        monkeypatch.setattr(job, "_begin", begun)
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


def test_what_is_logged_after_a_step_says_nothing_of_the_next_one(connect: Connect) -> None:
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
    assert [commit.loss for commit, _ in server.pushed] == [0, 0, 7, 0, 0, 7]


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


def test_a_place_that_cannot_be_reached_ends_the_membership(connect: Connect) -> None:
    server = Server()
    with pytest.raises(PlaceError, match="Protocol not known: nonsense"):
        connect(server, state="nonsense://bucket", worker_id="w0")
    assert server.ended.startswith("failed: nonsense://bucket/w0: Protocol not known")


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


def test_a_loader_without_batches_is_refused(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    batches = iter(DataLoader(DATA, batch_size=BATCH))
    for _ in zip(job.epochs(), [0], strict=False):
        for (inputs,) in job.steps(batches, per_epoch=STEPS):
            take(model, optimizer, inputs)
    with pytest.raises(gradwire.ScriptError, match=r"none any more.*and not a generator"):
        next(job.steps(batches, per_epoch=STEPS))


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
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)  # has momentum follow
    (inputs,) = next(job.batches(DATA))
    with pytest.raises(gradwire.ScriptError, match=r"group 0: .*momentum=0\.9.*cycle_momentum=False"):
        take(model, optimizer, inputs)


def test_an_optimizer_that_remembers_something_is_not_taken_in_silence(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    _, job = connect()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(DATA.tensors[0]).square().mean().backward()
    optimizer.step()
    job.attach(model, optimizer)
    assert "momentum_buffer" in caplog.text


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
    assert "some of its parts have left" in caplog.text


def test_what_the_loss_does_not_reach_and_what_is_frozen_is_not_pushed(connect: Connect) -> None:
    server, job = connect()
    model, other = network(), nn.Linear(2, 2)
    model.add_module("other", other)
    other.bias.requires_grad_(False)
    _, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (inputs,) = next(job.batches(DATA))
    first: nn.Module = nn.Sequential(*list(model.children())[:3])
    first(inputs).square().mean().backward()
    optimizer.step()
    assert server.manifest is not None
    names = [spec.name for spec in server.manifest.specs]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias", "other.weight", "other.bias"]
    ((_, payloads),) = server.pushed
    assert [isinstance(payload, AbsentPayload) for payload in payloads] == [False] * 4 + [True] * 2


def test_a_closure_computes_the_gradients_of_its_step(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    (inputs,) = next(job.batches(DATA))

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
    (inputs,) = next(job.batches(DATA))
    take(model, optimizer, inputs)
    assert {header.learning_rates for header, _ in server.parts.values()} == {(0.375,)}
