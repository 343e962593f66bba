"""Tasks for the end-to-end tests: quick ones, and ones that misbehave."""

import dataclasses
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections import UserDict
from collections.abc import Mapping
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradwire.worker.tasks import Task, load


def regression(
    samples: int = 96,
    width: int = 16,
    dropout: float = 0.1,
    jitter: float = 0.0,
    slow: float = 0.0,
    load: float = 0.0,
    evaluation: float = 0.0,
) -> Task:
    """A noisy linear problem.

    Args:
        jitter: up to so many seconds of delay per step, different in each process.
        slow, load, evaluation: seconds of delay per step, for loading, and per evaluation.
    """
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 12, generator=generator)
    targets = inputs @ torch.randn(12, 4, generator=generator)
    clock = random.Random()
    time.sleep(load)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(slow + jitter * clock.random())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def batch(indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs[indices], targets[indices]

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        time.sleep(evaluation)
        return {"loss": float(nn.functional.mse_loss(model(inputs), targets)), "accuracy": 0.5}

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 4))

    return Task(
        name="regression", train_samples=samples, model=model, batch=batch, loss=loss, evaluate=evaluate
    )


def steady(samples: int = 96) -> Task:
    """A gradient that depends on the parameters alone."""

    def loss(model: nn.Module, batch: npt.NDArray[np.int64]) -> torch.Tensor:
        return sum((each - 1).square().sum() for each in model.parameters()) + torch.zeros(())

    return Task(
        name="steady",
        train_samples=samples,
        model=lambda: nn.Linear(5, 3),
        batch=lambda indices: indices,
        loss=loss,
        evaluate=lambda model: {"loss": 0.0},
    )


def grouped() -> Task:
    """The noisy linear problem without dropout, in three groups: biases, the last weight, the rest."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        biases = [named[name] for name in ("0.bias", "3.bias")]
        return [{"params": biases, "weight_decay": 0.0}, {"params": named["3.weight"], "lr": 0.02}]

    return dataclasses.replace(regression(dropout=0.0), groups=groups)


class Stateful(nn.Module):
    """A model with an entry of each kind in its state_dict."""

    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(True))  # one byte, so that others begin anywhere
        self.frozen = nn.Linear(12, 16)
        self.frozen.requires_grad_(False)
        self.narrow = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.BatchNorm1d(16)
        self.inner = nn.Linear(16, 16, bias=False)
        self.again = nn.Linear(16, 16, bias=False)
        self.again.weight = self.inner.weight
        self.last = nn.Linear(16, 4)
        self.register_buffer("counts", torch.zeros(2, 2, dtype=torch.int64))
        self.void = nn.Parameter(torch.empty(0, 4))
        self.frozen_void = nn.Parameter(torch.empty(2, 0), requires_grad=False)
        self.register_buffer("empty", torch.empty(0, 3, dtype=torch.float64))
        self.register_buffer("none", None)
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counts += 1
        hidden = self.inner(torch.tanh(self.norm(self.frozen(inputs))))
        found: torch.Tensor = self.last(torch.relu(self.again(hidden)))
        return found


def stateful(samples: int = 96, slow: float = 0.0) -> Task:
    """The noisy linear problem with BatchNorm, tied and frozen parameters, and inputs whose statistics differ
    much from sample to sample."""
    task = regression(samples, dropout=0.0, slow=slow)

    def shifted(indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = task.batch(indices)
        return inputs * 3 + torch.from_numpy(indices % 7).float()[:, None], targets

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        inputs, targets = shifted(np.arange(samples))
        loss = float(nn.functional.mse_loss(model(inputs), targets))
        return {"loss": loss, "spread": float(model(inputs).std())}

    return dataclasses.replace(task, model=Stateful, batch=shifted, evaluate=evaluate)


def unseeded(nan: float = 0.0) -> Task:
    """The noisy linear problem, with a loss that comes out differently wherever it is computed.

    Args:
        nan: how often it is a NaN instead, and otherwise the same everywhere; 0 for always different.
    """
    task = regression()
    chance = random.Random()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        factor = 1.0 + 0.2 * chance.random()
        if nan:
            factor = float("nan") if chance.random() < nan else 1.0
        return factor * task.loss(model, batch)

    return dataclasses.replace(task, loss=loss)


def paced(seconds: float = 0.001, samples: int = 192) -> Task:
    """The noisy linear problem, at so many seconds per sample, times SLOWER in the environment."""
    task = regression(samples=samples)
    pace_s = seconds * float(os.environ.get("SLOWER", "1"))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(pace_s * len(batch[0]))
        return task.loss(model, batch)

    return dataclasses.replace(task, loss=loss)


def spiked(samples: int = 320) -> Task:
    """The noisy linear problem. A worker with SPIKES in its environment has a loss a million times as large,
    once, in its 16th step."""
    task, steps = regression(samples), itertools.count()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        factor = 1e6 if "SPIKES" in os.environ and next(steps) == 15 else 1.0
        return factor * task.loss(model, batch)

    return dataclasses.replace(task, loss=loss)


def drifting(samples: int = 1280) -> Task:
    """The noisy linear problem. In a worker with DRIFTS in its environment the model's code changes a
    parameter in place, once."""
    task, steps = regression(samples), itertools.count(1)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if "DRIFTS" in os.environ and next(steps) == 5:
            with torch.no_grad():
                next(model.parameters()).mul_(1.01)
        return task.loss(model, batch)

    return dataclasses.replace(task, loss=loss)


def drawn() -> Task:
    """The noisy linear problem, on data that DATA in the environment says."""
    task = regression()
    shift = float(os.environ.get("DATA", "0"))

    def batch(indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = task.batch(indices)
        return inputs + shift, targets

    return dataclasses.replace(task, batch=batch)


def dying(samples: int = 96, width: int = 16) -> Task:
    """The noisy linear problem. A worker with DIES in its environment is killed in the middle of its third
    backward pass: the gradients of the last layer have left, those of the first do not exist yet."""
    task, steps = regression(samples, width), itertools.count(1)

    def die(gradient: torch.Tensor) -> None:
        time.sleep(1.0)  # in which the parts arrive
        os.kill(os.getpid(), signal.SIGKILL)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        *layers, last = model.children()
        hidden: Any = nn.Sequential(*layers)(batch[0])  # its hooks have no types
        if "DIES" in os.environ and next(steps) == 3:
            hidden.register_hook(die)
        return nn.functional.mse_loss(last(hidden), batch[1])

    return dataclasses.replace(task, loss=loss)


def hanging(where: str = "loss", seconds: float = 3600.0, samples: int = 192, slow: float = 0.05) -> Task:
    """The noisy linear problem. A worker with HANGS in its environment hangs once, after three steps.

    Args:
        where: loss, batch or evaluate.
        seconds: for how long.
    """
    task, steps = regression(samples, slow=slow), itertools.count(1)
    left = ["HANGS"] if "HANGS" in os.environ else []

    def hang(at: str) -> None:
        if at == where and left and (at == "evaluate" or next(steps) > 3):
            left.clear()
            time.sleep(seconds)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hang("loss")
        return task.loss(model, batch)

    def batch(indices: npt.NDArray[np.int64]) -> Any:
        hang("batch")
        return task.batch(indices)

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        hang("evaluate")
        return task.evaluate(model)

    return dataclasses.replace(task, batch=batch, loss=loss, evaluate=evaluate)


def slow_digits(slow: float = 0.1) -> Task:
    """Digits, with so many seconds of delay per step."""
    task = load("digits")

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(slow)
        return task.loss(model, batch)

    return dataclasses.replace(task, loss=loss)


def raises_while_loading() -> Task:
    raise OSError("the data set is not here")


def raises_while_training() -> Task:
    task = regression()

    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        raise ZeroDivisionError("no such loss")

    return Task(
        name="broken",
        train_samples=task.train_samples,
        model=task.model,
        batch=task.batch,
        loss=loss,
        evaluate=task.evaluate,
    )


def not_finite() -> Task:
    task = regression()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.sum(model(batch[0])) * float("nan")

    return Task(
        name="nan",
        train_samples=10_000,
        model=task.model,
        batch=lambda i: task.batch(i % 96),
        loss=loss,
        evaluate=task.evaluate,
    )


def doubles() -> Task:
    task = regression()
    return Task(
        name="doubles",
        train_samples=96,
        model=lambda: task.model().double(),
        batch=task.batch,
        loss=task.loss,
        evaluate=task.evaluate,
    )


class Block(nn.Module):
    """Thirty tensors of 1920 elements: ten that are compressed, and twenty that travel dense."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 16) for _ in range(10))
        self.biases = nn.ParameterList(torch.zeros(32) for _ in range(20))


def many_tensors(blocks: int = 500, samples: int = 40, slow: float = 0.0) -> Task:
    """Parameters that come closer to values, which every sample scales otherwise.

    Args:
        slow: seconds of delay per step.
    """
    generator = torch.Generator().manual_seed(5)
    wanted = torch.randn(1920 * blocks, generator=generator)
    scales = torch.randn(samples, generator=generator)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Half of the square of the distance, without what no parameter changes."""
        time.sleep(slow)
        values = torch.cat([parameter.reshape(-1) for parameter in model.parameters()])
        return 0.5 * torch.dot(values, values) - batch.mean() * torch.dot(values, wanted)

    return Task(
        name="many tensors",
        train_samples=samples,
        model=lambda: nn.Sequential(*(Block() for _ in range(blocks))),
        batch=lambda indices: scales[indices],
        loss=loss,
        evaluate=lambda model: {"loss": loss(model, scales).item()},
    )


class Shared(nn.Module):
    """The first and the third layer have the same weight; the second takes part in nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.unreached = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        self.third.weight = self.first.weight
        self.last = nn.Linear(width, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        outputs: torch.Tensor = self.last(torch.tanh(self.third(hidden)))
        return outputs


def shared(seconds: float = 0.001, samples: int = 192, width: int = 96) -> Task:
    """A weight that two layers share, and a layer that the loss does not reach; paced as `paced`."""
    task = paced(seconds, samples)

    def batch(indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = task.batch(indices)
        return inputs.repeat(1, width // 12), targets

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        return {}

    return dataclasses.replace(task, model=lambda: Shared(width), batch=batch, evaluate=evaluate)


class Encoding(UserDict[str, torch.Tensor]):
    """A mapping that is no dict, as tokenizers return them."""


class Sentences(Dataset[Encoding]):
    """Some words, and what they come to."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.words = torch.randint(50, (samples, 6), generator=generator)
        self.targets = torch.randn(samples, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, place: Any) -> Encoding:
        return Encoding(words=self.words[place], targets=self.targets[place])


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=True)
        self.still = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.tanh(self.still(self.embedding(words).mean(dim=1))))
        return outputs


def _collated(sentences: list[Encoding]) -> Encoding:
    return Encoding({key: torch.stack([each[key] for each in sentences]) for key in sentences[0]})


def everyday(processes: int = 0, samples: int = 24) -> Task:
    """Return a task with features of users' scripts: batches of a class of their own, sparse gradients, a
    frozen layer.

    Args:
        processes: that load the data of each step. If any do, each step starts another one, too, and ends it.
    """
    data, forks = Sentences(samples), multiprocessing.get_context("fork")

    def batch(indices: npt.NDArray[np.int64]) -> Encoding:
        if not processes:
            return data[indices]
        begun = forks.Event()
        child = forks.Process(target=_stay, args=(begun,), daemon=True)
        child.start()
        assert begun.wait(20)
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        loader = DataLoader(
            data,
            sampler=indices.tolist(),
            batch_size=len(indices),
            num_workers=processes,
            collate_fn=_collated,
            multiprocessing_context=forks,
        )
        found: Encoding
        (found,) = loader
        return found

    def loss(model: nn.Module, found: Encoding) -> torch.Tensor:
        return nn.functional.mse_loss(model(found["words"]), found["targets"])

    return Task(
        name="everyday",
        train_samples=samples,
        model=Words,
        batch=batch,
        loss=loss,
        evaluate=lambda model: {"loss": float(loss(model, data[np.arange(samples)]))},
    )


def _stay(begun: Event) -> None:
    begun.set()
    time.sleep(60)
