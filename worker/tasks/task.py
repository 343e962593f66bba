"""A task, as the worker sees it: five functions and facts about a workload, and one that is optional."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

    from ..training.splits import SampleSplit


class TaskError(ValueError):
    """A task that cannot be used: it raised while loading, or what it returned is not a usable `Task`."""


class TaskSpecError(TaskError):
    """A spec that a person has to correct: no such task, or options that it does not take."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A workload that any worker of a job can do its share of.

    Every worker of a job builds the same task from the same spec, so everything here must be a function of
    the spec alone: the same samples under the same indices on every machine, in every process.

    name: for people, in logs and tables.
    train_samples: samples in one epoch; their indices are 0 … train_samples - 1.
    model: makes the model, with float32 parameters on the CPU. The caller has seeded torch from the job's
        seed, and moves the model to its device.
    batch: the training samples with these indices (int64, shape (samples,), at least one, no order implied)
        as CPU tensors, in any nest of tuples, lists and dicts. The caller moves them to the model's device.
        They are this worker's share of one round, and there may be fewer of them in an epoch's last round.
    loss: the mean loss over such a batch, a scalar with a gradient. The model is in training mode.
    evaluate: measures the model on the validation data; finite numbers by name, which logs, gc-run and
        /metrics show. The model is in evaluation mode, gradients are off, and
        it may be on any device: move the data there.
    groups: the model's parameter groups, as torch's optimizers take them: each a mapping with `params` and
        what is to be another than the optimizer says: `{"params": biases, "weight_decay": 0.0}`. `lr` is
        the group's learning rate before the job's schedule. Parameters in no group are as the job says.
    split: how the samples are divided among workers where they are not to be distributed alike; None for
        that. A worker then takes its own share's samples for the assigned ones.

    Raise `TaskError` when made with something that no job can train on.
    """

    name: str
    train_samples: int
    model: Callable[[], nn.Module]
    batch: Callable[[npt.NDArray[np.int64]], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    groups: Callable[[nn.Module], Iterable[Mapping[str, Any]]] | None = None
    split: SampleSplit | None = None

    def __post_init__(self) -> None:
        if self.train_samples < 1:
            got = self.train_samples
            raise TaskError(f"task {self.name!r}: train_samples: expected at least 1, got {got}")
        for part in ("model", "batch", "loss", "evaluate", *(["groups"] if self.groups is not None else [])):
            if not callable(getattr(self, part)):
                kind = type(getattr(self, part)).__name__
                remedy = "; pass a function that makes the model" if part == "model" else ""
                raise TaskError(f"task {self.name!r}: {part}: expected a function, got a {kind}{remedy}")
