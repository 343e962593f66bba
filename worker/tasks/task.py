"""A task, as the worker sees it: functions and facts of a workload that a user or Gradwire provides."""

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
    """A task that cannot be used: it raised an exception while loading, or its function returned no usable
    `Task`.

    Example:
        >>> try:
        ...     gradwire.load_task("string:capwords:s=a")  # a function that returns no Task
        ... except gradwire.TaskError as error:
        ...     print(error)
        task 'string:capwords:s=a': ...
    """


class TaskSpecError(TaskError):
    """A spec that the user has to correct: the task does not exist, or does not accept these options.

    Example:
        >>> try:
        ...     gradwire.load_task("digit")
        ... except gradwire.TaskSpecError as error:
        ...     print(error)
        unknown task 'digit' (did you mean 'digits'?)...
    """


@dataclass(frozen=True, kw_only=True)
class Task:
    """A workload: a model, training samples, a loss and an evaluation.

    Every worker of a job builds the same task from the same spec. Everything here must therefore depend on
    the spec alone: the same samples under the same indices on every machine, in every process.

    Attributes:
        name: for people, in logs and tables.
        train_samples: number of samples in one epoch; their indices are 0 … train_samples - 1.
        model: returns a new model with float32 parameters on the CPU. The caller has seeded torch from the
            job's seed, and moves the model to its device.
        batch: returns the training samples with the given indices (int64, shape (samples,), at least one, in
            any order) as CPU tensors, in any nest of tuples, lists and dicts. The caller moves them to the
            model's device. They are this worker's share of one round. An epoch's last round may have fewer.
        loss: returns the mean loss over such a batch, a scalar with a gradient, in training mode.
        evaluate: measures the model on the validation data, in evaluation mode with gradients off; returns
            finite numbers by name. The model may be on any device: move the data there.
        groups: returns the model's parameter groups as mappings, like those of torch's optimizers. The key
            `params` holds the parameters. Other keys hold the options that differ from the job's, as in
            `{"params": biases, "weight_decay": 0.0}`. The key `lr` is the group's learning rate before the
            job's schedule. Two keys count with `--optimizer muon` alone: `optimizer`, "muon" or "adamw", says
            which one steps the group, and `split` how many matrices a parameter holds one above the other.
            Parameters in no group have the job's options.
        split: shares of workers that are not to have identically distributed samples. A worker takes samples
            of its share in place of the assigned ones.

    Raises:
        TaskError: `train_samples` is below 1, or an attribute that must be a function is not one.

    Example:
        >>> x, y = torch.randn(100, 4), torch.randn(100, 1)
        >>> task = gradwire.Task(
        ...     name="line",
        ...     train_samples=100,
        ...     model=lambda: torch.nn.Linear(4, 1),
        ...     batch=lambda indices: (x[indices], y[indices]),
        ...     loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        ...     evaluate=lambda model: {"loss": float(torch.nn.functional.mse_loss(model(x), y))},
        ... )
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
