"""Under torchrun: DDP with gradwire's hook, in every scenario one after the other.

    torchrun --nproc-per-node 3 ranks.py FOLDER COMPRESSOR...

Each rank writes FOLDER/RANK.pt: by exchange and scenario, what it saw. Gradients are what `gradient` says, to
the bit.

    ranks.py FOLDER --killed

Without torchrun, which would end the others itself: for each way three ranks, of which rank 1 dies in a step;
the others write FOLDER/WAY.RANK.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire.ddp
from gradwire.common.one_line import in_one_line
from gradwire.compressors import parse_compressor
from gradwire.compressors.kernels import threads
from gradwire.compressors.registry import BUILT_IN
from gradwire.ddp import buckets
from gradwire.ddp.exchange import Group, Scatter
from gradwire.tests.compressors.window import WINDOW

# Odd sizes, and two that leave a word or a bucket of codes begun. Three ranks each own a piece of `wide`.
SHAPES = {"first": (9, 7), "bias": (9,), "wide": (3, 4115), "scalar": (), "last": (5, 13)}
ORDER = ["wide", "last", "first", "scalar", "bias"]  # of backward, which is not the reverse of the above
STEPS = 3
SMALL_MB = 1e-4  # buckets of one tensor or two
EXCHANGES = {"gather": ("topk:ratio=10", "dgc:ratio=10"), "owners": ("4bit", "8bit")}
LOW_RANK = "lowrank:rank=1"
# For each way: its exchange, and the compressors of buckets, of lost and unused gradients, and of a load.
WAYS = {way: (way, "4bit", *compressors) for way, compressors in EXCHANGES.items()}
WAYS["lowrank"] = ("gather", LOW_RANK, LOW_RANK, LOW_RANK)


def gradient(name: str, rank: int, step: int) -> Tensor:
    """float32, of the tensor's shape."""
    seed = [*SHAPES].index(name) + 100 * rank + 1000 * step
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float32, device="cpu") * 0.01


class Fixed(nn.Module):
    """Its gradients are those that it is told."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 0.5, dtype=dtype, device="cpu")))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        # Backward comes to what was added last first.
        weights = dict(self.named_parameters())
        products = [
            (weights[name] * gradients[name].to(weights[name].dtype)).sum()
            for name in reversed(ORDER)
            if name in gradients
        ]
        found = products[0]
        for product in products[1:]:
            found = found + product
        return found


def steps(
    model: Any,
    numbers: range = range(STEPS),
    change: Callable[[int, dict[str, Tensor]], object] = lambda step, given: None,
    doubled: int | None = None,
) -> list[dict[str, Tensor]]:
    """Return the gradients that DDP left in `grad`, by step. doubled: step that adds to gradients of
    `no_sync`."""
    found: list[dict[str, Tensor]] = []
    for step in numbers:
        model.zero_grad()
        given = {name: gradient(name, dist.get_rank(), step) for name in SHAPES}
        change(step, given)
        if step == doubled:
            with model.no_sync():
                model(given).backward()
        model(given).backward()
        weights = model.module.named_parameters()
        found.append({name: each.grad.clone() for name, each in weights if each.grad is not None})
    return found


def with_names(
    compressor: str, exchange: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Any]:
    """A model and its state."""
    network = Fixed(dtype)
    names = network.named_parameters()
    state = gradwire.ddp.state(compressor, named_parameters=names, seed=3, exchange=exchange, entropy="off")
    options = {"bucket_cap_mb": SMALL_MB, **options}
    model: Any = nn.parallel.DistributedDataParallel(network, **options)
    model.register_comm_hook(state, gradwire.ddp.hook)
    return model, state


def packed(exchange: str) -> dict[str, Any]:
    """Return gradients and bytes of `4bit` in one bundle, with packed frames and without."""
    found: dict[str, Any] = {}
    for entropy in ("on", "off"):
        state = gradwire.ddp.state("4bit", seed=3, exchange=exchange, entropy=entropy)  # type: ignore[arg-type]
        model: Any = nn.parallel.DistributedDataParallel(Fixed())
        model.register_comm_hook(state, gradwire.ddp.hook)
        found[entropy] = {"gradients": steps(model), "sent": state.bytes_sent}
    return found


def each_compressor(compressor: str, exchange: str) -> dict[str, Any]:
    model, state = with_names(compressor, exchange)
    found = steps(model)
    return {"gradients": found, "sent": state.bytes_sent, "raw": state.raw_bytes, "saved": state.state_dict()}


def one_bucket(way: str) -> list[dict[str, Tensor]]:
    exchange, compressor, *_ = WAYS[way]
    return steps(with_names(compressor, exchange, bucket_cap_mb=25)[0])


def small_bundles(exchange: str) -> list[dict[str, Tensor]]:
    """One bucket, cut into bundles as on a slow link."""
    with mock.patch.multiple(buckets, BUNDLE_ELEMENTS=400, CUT_BYTES_PER_S=math.inf):
        return steps(with_names("4bit", exchange, bucket_cap_mb=25)[0])


def static(way: str) -> list[dict[str, Tensor]]:
    exchange, compressor, *_ = WAYS[way]
    return steps(with_names(compressor, exchange, static_graph=True)[0])


def views(way: str) -> list[dict[str, Tensor]]:
    exchange, compressor, *_ = WAYS[way]
    return steps(with_names(compressor, exchange, gradient_as_bucket_view=True)[0])


def half(way: str) -> list[dict[str, Tensor]]:
    exchange, compressor, *_ = WAYS[way]
    return steps(with_names(compressor, exchange, torch.bfloat16)[0])


def accumulated(way: str) -> list[dict[str, Tensor]]:
    exchange, compressor, *_ = WAYS[way]
    return steps(with_names(compressor, exchange)[0], doubled=1)


def not_finite(way: str) -> dict[str, Any]:
    def spoil(step: int, given: dict[str, Tensor]) -> None:
        if step == 1 and dist.get_rank() == 1:
            given["wide"][1, 5] = torch.inf

    exchange, _, compressor, _ = WAYS[way]
    model, state = with_names(compressor, exchange)
    return {"gradients": steps(model, change=spoil), "voided": state.voided, "steps": state.steps}


def spike(exchange: str) -> dict[str, Any]:
    """Rank 1 has one in step 12, with other buckets and a loaded state since step 11."""

    def enlarge(step: int, given: dict[str, Tensor]) -> None:
        if step == 12 and dist.get_rank() == 1:
            given["wide"] *= 1e6

    model, state = with_names("1bit", exchange)
    steps(model, range(11))
    model, again = with_names("1bit", exchange, bucket_cap_mb=25)
    again.load_state_dict(state.state_dict())
    return {"gradients": steps(model, range(11, 15), change=enlarge), "spikes": again.spikes}


def unused(way: str) -> list[dict[str, Tensor]]:
    """`wide` has no gradient in step 1."""

    def drop(step: int, given: dict[str, Tensor]) -> None:
        if step == 1:
            del given["wide"]

    exchange, _, compressor, _ = WAYS[way]
    return steps(with_names(compressor, exchange, find_unused_parameters=True)[0], change=drop)


def interrupted(way: str) -> list[dict[str, Tensor]]:
    """Saved after two steps, and loaded where buckets are others."""
    found = list[dict[str, Tensor]]()
    exchange, first, _, second = WAYS[way]
    for compressor in (first, second, *(["window"] if way == "gather" else [])):
        model, state = with_names(compressor, exchange)
        steps(model, range(2))
        model, again = with_names(compressor, exchange, bucket_cap_mb=25)
        again.load_state_dict(state.state_dict())
        found += steps(model, range(2, 3))
    return found


def nameless() -> list[dict[str, Tensor]]:
    state = gradwire.ddp.state("4bit")
    model: Any = nn.parallel.DistributedDataParallel(Fixed(), bucket_cap_mb=SMALL_MB)
    model.register_comm_hook(state, gradwire.ddp.hook)
    return steps(model)


def defaults() -> list[list[dict[str, Tensor]]]:
    """Under other defaults of torch, which a script may set."""
    found: list[list[dict[str, Tensor]]] = []
    torch.set_default_device("meta")
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        torch.set_default_dtype(dtype)
        found.append(steps(with_names("dgc:ratio=10", "gather")[0]))
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    return found


def errors() -> dict[str, str]:
    """Return the message that every rank gets, by fault."""
    rank, told = dist.get_rank(), dict[str, str]()

    def telling(name: str, model: Any) -> None:
        try:
            steps(model, range(1))
        except (RuntimeError, TypeError, ValueError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    wrong: dict[str, dict[str, Any]] = {
        "seed": {"seed": rank},
        "compressor": {"compressor": "4bit" if rank else "topk"},
        "exchange": {"exchange": "owners" if rank else "auto"},
        "entropy": {"entropy": "on" if rank else "auto"},
        "names": {"named_parameters": []},
    }
    for name, options in wrong.items():
        model: Any = nn.parallel.DistributedDataParallel(Fixed())
        model.register_comm_hook(gradwire.ddp.state(**options), gradwire.ddp.hook)
        telling(name, model)
    # One rank sends bucket by bucket, the other all of them as one.
    model, _ = with_names("4bit:clip=1" if rank else "4bit", "gather", find_unused_parameters=True)
    telling("clip", model)
    model, _ = with_names("4bit", "gather", torch.float64)
    telling("float64", model)
    model, state = with_names("4bit", "gather")
    saved = state.state_dict()
    state.load_state_dict({**saved, "residuals": {"other": torch.zeros(3)}})
    telling("another model", model)
    return told


def scattered() -> bool:
    """Return True if frames of all sizes arrive whole, also those that outgrow their slots."""
    group = Group(None)
    scatter = Scatter(group)
    for sizes in ([0, 3], [200, 200], [70_000, 5], [70_100, 9]):
        flights = [
            scatter.begin(
                bundle, [np.full(size + to, 10 * group.rank + to, np.uint8) for to in range(group.ranks)]
            )
            for bundle, size in zip("ab", sizes, strict=True)
        ]
        for flight, size in zip(flights, sizes, strict=True):
            for sender, frame in enumerate(scatter.end(flight)):
                if frame.tolist() != [10 * sender + group.rank] * (size + group.rank):
                    return False
    return True


def at_another_step() -> dict[str, str]:
    """Return the message of a rank's owners, by exchange, where rank 1 has made a step alone."""
    told = dict[str, str]()
    for exchange in EXCHANGES:
        model, state = with_names("4bit", exchange)
        state.steps += dist.get_rank()
        try:
            steps(model, range(1))
        except gradwire.RanksDisagree as error:
            told[exchange] = str(error)
    return told


def with_a_death(folder: str, way: str, rank: int) -> None:
    """Write the error of a rank whose neighbour, rank 1, dies in the third step."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{way}", rank=rank, world_size=3)
    exchange, _, _, compressor = WAYS[way]
    model, _ = with_names(compressor, exchange)

    def die(step: int, given: dict[str, Tensor]) -> None:
        if (rank, step) == (1, 2):  # DDP itself has a collective in the step before
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        steps(model, change=die)
    except RuntimeError as error:
        Path(folder, f"{way}.{rank}").write_text(f"{in_one_line(error)} after {error.__cause__}")
    os._exit(0)  # a destructor of the group would wait for rank 1


def killed(folder: str) -> None:
    forks = multiprocessing.get_context("fork")
    given = [(folder, way, rank) for way in WAYS for rank in range(3)]
    processes = [forks.Process(target=with_a_death, args=each) for each in given]
    for each in processes:
        each.start()
    for each in processes:
        each.join()


def main(folder: str, compressors: list[str]) -> None:
    dist.init_process_group("gloo")
    buckets.BUNDLE_BYTES = 0  # each bucket travels by itself
    found: dict[str, Any] = {}
    BUILT_IN["window"] = WINDOW  # type: ignore[index]  # as another distribution's compressor
    for exchange in EXCHANGES:
        suited = [
            each for each in compressors if exchange == "gather" or not parse_compressor(each).not_for_means
        ]
        found[exchange] = {compressor: each_compressor(compressor, exchange) for compressor in suited}
        for scenario in (small_bundles, spike, packed):
            found[exchange][scenario.__name__] = scenario(exchange)
    for way in WAYS:
        for of_way in (one_bucket, static, views, half, accumulated, not_finite, unused, interrupted):
            found.setdefault(way, {})[of_way.__name__] = of_way(way)
    for alone in (nameless, defaults, scattered, errors, at_another_step):
        found[alone.__name__] = alone()
    found["threads"] = threads._pool.threads  # pyright: ignore[reportPrivateUsage]
    torch.save(found, Path(folder) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
    # If the interpreter ends before a thread of torch's that holds a Python object, the process aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[2:] == ["--killed"]:
        killed(sys.argv[1])
    else:
        main(sys.argv[1], sys.argv[2:])
