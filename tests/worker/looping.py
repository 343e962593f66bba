"""A server that answers a script at once, and what tests of loops share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from scripted import LIMITS, Script, updates
from torch import nn
from torch.utils.data import TensorDataset

import gradwire
from gradwire.common.parts import arrange
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.proto.manifest import Manifest
from gradwire.settings import JobTerms

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
        given: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, **terms}
        self.job = job_message(JobTerms(id="j", work="gradients", script=True, **given))
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


def part_of_an_epoch(job: gradwire.Job, each: Callable[[], None]) -> None:
    """Train for the job, calling `each` before each backward pass."""
    model, optimizer = attached(job)
    for _ in job.epochs():
        for (inputs,) in job.batches(DATA):
            loss = model(inputs).square().mean()
            each()
            loss.backward()
            optimizer.step()
