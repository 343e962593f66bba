"""A server of scripts that takes SGD steps, in place of a connection.

A script's changes to its model between two steps show in its pushes and in its final parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scripted import LIMITS, Script
from torch import nn

import gradwire
from gradwire.common.parts import arrange
from gradwire.compressors import AbsentPayload, DenseFormat, DensePayload, decode
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.proto.manifest import Manifest
from gradwire.proto.replicas import checksum, is_checked
from gradwire.proto.transfer import payload_header
from gradwire.settings import JobTerms
from gradwire.worker.script import membership
from gradwire.worker.session.receiving import Received

BATCH, STEPS, EPOCHS = 4, 4, 2
INPUTS = torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(1))
RATE = 0.25


class Network(nn.Module):
    """Has a parameter of four dimensions, a recurrent layer and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(4, 3)
        self.conv = nn.Conv2d(2, 4, (1, 2))
        self.rnn = nn.GRU(4, 5, batch_first=True)
        self.hidden = nn.Linear(5, 3)
        self.head = nn.Linear(3, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = self.conv(inputs.view(-1, 2, 1, 3))
        states, _ = self.rnn(images.squeeze(2).transpose(1, 2))
        hidden = torch.tanh(self.hidden(states[:, -1]))
        return cast(torch.Tensor, self.head(hidden + self.embedding(torch.arange(len(inputs)) % 4)))


class SteppingServer(Script):
    """Gives out one batch after the other, takes RATE times each push off its parameters, and sends what that
    has changed. Where a worker lets go of its replica, it sends all values.

    Attributes:
        values: the parameters, flat.
        workers: number of workers that it reports.
    """

    workers = 1

    def __init__(self, rate: float = RATE, **terms: Any) -> None:
        """terms: of the job."""
        super().__init__()
        self.messages: list[Any] = []
        self.job = job_message(
            JobTerms(id="j", work="gradients", script=True, batch_size=BATCH, epochs=EPOCHS, **terms)
        )
        self.values: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        self._rate = rate
        self._steps = 0
        self._began = self._given = 0  # batches before the present assignment, and with it
        self._checked = 0, 0

    def join(self, software: str, compressor: str, compressors: Any) -> m.JoinResponse:
        return m.JoinResponse(
            job=self.job, limits=LIMITS, rank=0, version=0, initialize=True, workers=self.workers
        )

    def initialize(
        self, manifest: Manifest, values: Any, state: Any = None, least: int = 1, earlier: Any = None
    ) -> bool:
        self.values = np.concatenate([value.view(np.float32) for value in values])
        sizes = [spec.elements for spec in manifest.specs]
        self.messages.append(arrange(sizes, [1] * len(sizes), []))  # a part for each tensor
        return True

    def ready(self, manifest: Manifest, *, restored: bool = False, accumulate: int = 0) -> None:
        self.messages.append(self._assignment())

    def _assignment(self) -> m.Assignment:
        """Return the next assignment, of one batch."""
        self._began, self._given = self._given, self._given + 1
        return self._present()

    def _present(self, *, exhausted: bool = False) -> m.Assignment:
        epoch, batch = divmod(self._began, STEPS)
        count = self._given - self._began
        return m.Assignment(
            id=1 + self._began,
            version=self._steps,
            epoch=epoch,
            world=1,
            ranges=(m.Range(start=batch * BATCH, count=count * BATCH),) if epoch < EPOCHS else (),
            batches=(BATCH,) * count if count > 1 else (),
            exhausted=exhausted,
            finished=epoch == EPOCHS,
            plan=1,
            checked=self._checked[0],
            checksum=self._checked[1],
        )

    def ask(self, request: m.More) -> None:
        super().ask(request)
        assert (request.assignment, request.batches) == (1 + self._began, self._given - self._began)
        if self._given % STEPS:
            self._given += 1
            self.messages.append(self._present())
        else:
            self.messages += [self._present(exhausted=True), self._assignment()]

    def _update(self, values: npt.NDArray[np.float32], *, whole: bool) -> list[Received]:
        assert self.plan is not None
        found: list[Received] = []
        for number, part in enumerate(self.plan.parts):
            data = values[part.start : part.end].copy().view(np.uint8)
            payload = DensePayload(format=DenseFormat.FLOAT32, elements=part.elements, data=data)
            header = payload_header(payload, m.Content.VALUES if whole else m.Content.DELTA)
            update = m.Update(version=self._steps, part=number, plan=1, whole=whole, payloads=(header,))
            found.append(Received(update, [payload]))
        return found

    def queue_commit(self, commit: m.Commit) -> None:
        super().queue_commit(commit)
        self._steps += 1
        pushed = [
            np.zeros(each.elements, np.float32) if isinstance(each, AbsentPayload) else decode(each)
            for each in self.pushed[-1][1]
        ]
        change = np.zeros_like(self.values)
        if pushed:
            np.multiply(np.concatenate(pushed), np.float32(-self._rate), out=change)
        self.values += change
        if is_checked(self._steps):
            self._checked = self._steps, checksum(self.values)
        outcome = m.Outcome(seq=commit.seq, decision=m.Decision.ACCEPTED, version=self._steps)
        self.messages += [outcome, *self._update(change, whole=False), self._assignment()]

    def reopen_without_replica(self, drifted: int) -> None:
        """The stream is opened anew."""
        self.messages = [*self._update(self.values, whole=True), self._present()]


def joined(monkeypatch: pytest.MonkeyPatch, server: SteppingServer) -> gradwire.Job:
    """A script's job at such a server."""

    monkeypatch.setattr(membership, "connection_of", lambda settings, metrics: server)  # pyright: ignore
    return gradwire.connect(server="localhost", compressor="none")


def train(
    job: gradwire.Job,
    between: Callable[[int, nn.Module], nn.Module | None],
    *,
    early: bool = False,
    network: Network | None = None,
    **options: Any,
) -> Network:
    """Train a `Network` to the end of the job.

    Args:
        between: is called with the number of each step, from 1, and the model after it; what it returns
            computes from then on.
        early: call it before the forward pass instead.
        network: is trained; None for a new one.
        options: of `job.attach`.
    """
    network = Network() if network is None else network
    rest = [*network.parameters()]
    network.head.bias.requires_grad_(False)
    if not options.pop("with_frozen", True):
        rest = [each for each in rest if each.requires_grad]
    model, optimizer = job.attach(network, torch.optim.SGD(rest, lr=RATE), **options)
    computes: nn.Module = model
    steps = 0

    def next_of(step: int) -> nn.Module:
        found = between(step, network)
        return computes if found is None else found

    for _ in job.epochs():
        for inputs in job.batches(INPUTS):
            steps += 1
            if early:
                computes = next_of(steps)
            loss = computes(inputs).square().mean()
            assert math.isfinite(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not early:
                computes = next_of(steps)
    assert steps == STEPS * EPOCHS
    return network


def flat(model: nn.Module) -> npt.NDArray[np.float32]:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).numpy()


def unheard(module: nn.Module, *_: object) -> None:
    """A hook of the script's own."""
