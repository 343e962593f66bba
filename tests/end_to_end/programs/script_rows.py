"""Loops as users write them, row by row of the table in docs/reference/scripts.md: `script_rows LOOP ...`.

Each loop also runs alone, with `Plain` in place of a job, and reports its losses and parameters. `everyday`
has a small model for each row in one, so that its rows share a job."""

from __future__ import annotations

import json
import sys
from collections import UserDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

import gradwire
from gradwire.proto.refusal import Refused
from gradwire.worker.training.sharding import epoch_order

SAMPLES, EPOCHS, BATCH, SEED = 96, 2, 8, 3
Trained = tuple[nn.Module, list[float]]


class Plain:
    """In place of a job: the batches of all its workers together, and nobody else."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._epoch = 0

    def attach(self, model: Any, optimizer: Any, **_: object) -> tuple[Any, Any]:
        return model, optimizer

    def epochs(self) -> Generator[int]:
        for self._epoch in range(EPOCHS):
            yield self._epoch

    def batches(
        self, dataset: Any, *, num_workers: int = 0, collate_fn: Callable[[list[Any]], Any] = default_collate
    ) -> Iterable[Any]:
        order = epoch_order(SEED, self._epoch, len(dataset))
        size = BATCH * self._workers
        for start in range(0, len(order), size):
            yield collate_fn([dataset[int(index)] for index in order[start : start + size]])

    def steps(self, loader: Iterable[Any], *, per_epoch: int) -> Iterable[Any]:
        return islice(loader, per_epoch)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class Sample(NamedTuple):
    inputs: Tensor
    words: Tensor
    targets: Tensor


class Samples(Dataset[Sample]):
    """Namedtuples."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(SAMPLES, 12, generator=generator)
        self.words = torch.randint(0, 10, (SAMPLES, 3), generator=generator)
        self.targets = self.inputs @ torch.randn(12, 4, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.inputs[index], self.words[index], self.targets[index])


class Counted(Samples):
    """here: how many of the samples this process has fetched."""

    here = 0

    def __getitem__(self, index: int) -> Sample:
        self.here += 1
        return super().__getitem__(index)


class Stream(IterableDataset[Sample]):
    """The same without a length."""

    def __iter__(self) -> Iterator[Sample]:
        samples = Samples()
        return (samples[index] for index in range(SAMPLES))


def encoded(samples: list[Sample]) -> UserDict[str, Tensor]:
    """A batch such as Hugging Face's tokenizers make."""
    return UserDict(default_collate(samples)._asdict())


class Everyday(nn.Module):
    """A small model for each row; none of them has a say in the others' gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 4))
        self.frozen = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))
        self.frozen[0].requires_grad_(False)
        self.tied = nn.Embedding(10, 4)
        self.tied_linear = nn.Linear(4, 10, bias=False)
        self.tied_linear.weight = self.tied.weight
        self.sparse = nn.Embedding(10, 4, sparse=True)
        self.unreached = nn.Linear(12, 4)
        self.late = nn.Linear(12, 4)
        self.image = nn.Conv2d(3, 4, 2)
        self.mixed = nn.Linear(12, 4)
        self.narrow = nn.Linear(12, 4).to(torch.bfloat16)
        untyped: Any = self
        untyped.to(memory_format=torch.channels_last)

    def forward(self, batch: UserDict[str, Tensor]) -> dict[str, Tensor]:
        inputs, words = batch["inputs"], batch["words"]
        image = inputs.view(-1, 3, 2, 2).to(memory_format=torch.channels_last)
        found = {
            "norm": self.norm(inputs),
            "frozen": self.frozen(inputs),
            "tied": self.tied_linear(self.tied(words).mean(1))[:, :4],
            "sparse": self.sparse(words).mean(1),
            "image": self.image(image).flatten(1),
            "narrow": self.narrow(inputs.to(torch.bfloat16)).float(),
        }
        with torch.autocast("cpu", torch.bfloat16):
            found["mixed"] = self.mixed(inputs)
        if self.frozen[0].weight.requires_grad:
            found["late"] = self.late(inputs)
        return found


def grouped(model: Everyday) -> torch.optim.Optimizer:
    """Biases, norms and embeddings do not decay: groups alternate from tensor to tensor."""
    still = {id(p) for p in model.parameters() if p.dim() == 1} | {id(model.sparse.weight)}
    groups: list[Any] = [
        {"params": [p for p in model.parameters() if id(p) not in still], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if id(p) in still], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def everyday(job: Any) -> Trained:
    """Two losses, of two backward passes; layers that are unfrozen in the second epoch."""
    model = Everyday()
    model, optimizer = job.attach(model, grouped(model))
    losses: list[float] = []
    for epoch in job.epochs():
        if epoch == 1:
            model.frozen[0].requires_grad_(True)
        for batch in job.batches(Samples(), collate_fn=encoded):
            optimizer.zero_grad()
            found = model(batch)
            each = [mse_loss(outputs.float(), batch["targets"]) for outputs in found.values()]
            sum(each[:3], torch.zeros(())).backward()
            sum(each[3:], torch.zeros(())).backward()
            optimizer.step()
            losses.append(sum(loss.item() for loss in each))
    return model, losses


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stepped(job: Any, model: Any, optimizer: Any) -> list[float]:
    """Take a step for each batch of the job, and return the losses."""
    losses: list[float] = []
    for _ in job.epochs():
        for batch in job.batches(Samples()):
            loss = mse_loss(model(batch.inputs), batch.targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def compiled(job: Any) -> Trained:
    model: Any = torch.compile(network(), backend="aot_eager")  # pyright: ignore[reportUnknownMemberType]
    model, optimizer = job.attach(model, sgd(model))
    return model, stepped(job, model, optimizer)


def unscaled(job: Any) -> Trained:
    """With a GradScaler whose work the script does itself, to clip; and a stream that has no length."""
    model = network()
    model, optimizer = job.attach(model, sgd(model))
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    # Alone, the loop runs in the tests' process: a fork of it could inherit a lock that its threads hold.
    loader = DataLoader(Stream(), BATCH, num_workers=0 if isinstance(job, Plain) else 1)
    losses: list[float] = []
    for _ in job.epochs():
        for batch in job.steps(loader, per_epoch=SAMPLES // BATCH):
            loss = mse_loss(model(batch.inputs), batch.targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


def gathered(job: Any) -> Trained:
    """One step for every two batches, whose samples processes fetch."""
    model = network()
    model, optimizer = job.attach(model, sgd(model))
    samples = Counted()
    losses: list[float] = []
    for _ in job.epochs():
        for number, batch in enumerate(job.batches(samples, num_workers=2), start=1):
            loss = mse_loss(model(batch.inputs), batch.targets)
            (loss / 2).backward()
            losses.append(loss.item())
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert samples.here == EPOCHS * SAMPLES if isinstance(job, Plain) else samples.here <= 8  # for a checksum
    return model, losses


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(12, 4000).requires_grad_(False)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.again = self.base  # under a second name

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.base(inputs)[:, :4] + self.up(self.down(inputs))
        return found


def adapters(job: Any) -> Trained:
    """A frozen base that every worker has."""
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = job.attach(model, torch.optim.SGD(trained, lr=0.05), frozen="local")
    losses = stepped(job, model, optimizer)
    if not isinstance(job, Plain):
        assert job.metrics["bytes_up"] < 4 * 12 * 4000, job.metrics
    return model, losses


def sharpness(job: Any) -> Trained:
    """Two passes for each step, the second one at parameters that are moved and moved back (SAM)."""
    model = network()
    model, optimizer = job.attach(model, sgd(model))
    losses: list[float] = []
    for _ in job.epochs():
        for batch in job.batches(Samples()):
            with job.no_sync():
                loss = mse_loss(model(batch.inputs), batch.targets)
                loss.backward()
            kept = [p.detach().clone() for p in model.parameters()]
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = float(sum(each.square().sum() for each in gradients)) ** 0.5
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p.add_(gradient, alpha=0.05 / norm)
            optimizer.zero_grad()
            mse_loss(model(batch.inputs), batch.targets).backward()
            with torch.no_grad():
                for p, value in zip(model.parameters(), kept, strict=True):
                    p.copy_(value)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


def growing(job: Any) -> Trained:
    """A parameter group that comes later."""
    model = network()
    model, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in job.epochs():
        for _ in job.batches(Samples()):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return model, []


LOOPS: dict[str, Callable[[Any], Trained]] = {
    "everyday": everyday,
    "compiled": compiled,
    "unscaled": unscaled,
    "gathered": gathered,
    "growing": growing,
    "adapters": adapters,
    "sharpness": sharpness,
}


def alone(loop: str, workers: int) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters by name and losses, without a job."""
    model, losses = LOOPS[loop](Plain(workers))
    return by_name(model), losses


def by_name(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name.removeprefix("_orig_mod."): p.detach().float() for name, p in named}


def say(message: str, **more: Any) -> None:
    print(json.dumps({"message": message, **more}), file=sys.stderr, flush=True)


def main(loop: str, *options: str) -> int:
    torch.set_num_threads(1)
    given: dict[str, Any] = dict(
        zip((each[2:].replace("-", "_") for each in options[::2]), options[1::2], strict=True)
    )
    try:
        with gradwire.connect(**given) as job:
            model, losses = LOOPS[loop](job)
            found: dict[str, object] = {name: value.tolist() for name, value in by_name(model).items()}
            say("trained", parameters=found, losses=losses)
    except (gradwire.ScriptError, Refused) as error:
        say(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
