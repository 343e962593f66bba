"""Under torchrun: DDP with gradwire's hook, in every scenario one after the other.

    torchrun --nproc-per-node 2 ranks.py FOLDER COMPRESSOR...

Each rank writes FOLDER/RANK.pt: by scenario, what it saw. Gradients are what `gradient` says, to the bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire.ddp

# Odd sizes, and two that leave a word or a bucket of codes begun.
SHAPES = {"first": (9, 7), "bias": (9,), "wide": (3, 1371), "scalar": (), "last": (5, 13)}
ORDER = ["wide", "last", "first", "scalar", "bias"]  # of backward, which is not the reverse of the above
STEPS = 3
SMALL_MB = 1e-4  # buckets of one tensor or two


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
) -> list[dict[str, Tensor]]:
    """Return the gradients that DDP left in `grad`, by step."""
    found: list[dict[str, Tensor]] = []
    for step in numbers:
        model.zero_grad()
        given = {name: gradient(name, dist.get_rank(), step) for name in SHAPES}
        change(step, given)
        model(given).backward()
        weights = model.module.named_parameters()
        found.append({name: each.grad.clone() for name, each in weights if each.grad is not None})
    return found


def with_names(compressor: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """A model and its state."""
    network = Fixed(dtype)
    state = gradwire.ddp.state(compressor, named_parameters=network.named_parameters(), seed=3)
    options = {"bucket_cap_mb": SMALL_MB, **options}
    model: Any = nn.parallel.DistributedDataParallel(network, **options)
    model.register_comm_hook(state, gradwire.ddp.hook)
    return model, state


def each_compressor(compressor: str) -> dict[str, Any]:
    model, state = with_names(compressor)
    found = steps(model)
    return {
        "gradients": found,
        "sent": state.bytes_sent,
        "raw": state.raw_bytes,
        "saved": state.state_dict(),
    }


def one_bucket() -> list[dict[str, Tensor]]:
    return steps(with_names("4bit", bucket_cap_mb=25)[0])


def static() -> list[dict[str, Tensor]]:
    return steps(with_names("4bit", static_graph=True)[0])


def views() -> list[dict[str, Tensor]]:
    return steps(with_names("4bit", gradient_as_bucket_view=True)[0])


def half() -> list[dict[str, Tensor]]:
    return steps(with_names("4bit", torch.bfloat16)[0])


def not_finite() -> dict[str, Any]:
    def spoil(step: int, given: dict[str, Tensor]) -> None:
        if step == 1 and dist.get_rank() == 1:
            given["wide"][1, 5] = torch.inf

    model, state = with_names("topk:ratio=10")
    return {"gradients": steps(model, change=spoil), "voided": state.voided, "steps": state.steps}


def spike() -> dict[str, Any]:
    """Rank 1 has one in step 12, with other buckets and a loaded state since step 11."""

    def enlarge(step: int, given: dict[str, Tensor]) -> None:
        if step == 12 and dist.get_rank() == 1:
            given["wide"] *= 1e6

    model, state = with_names("1bit")
    steps(model, range(11))
    model, again = with_names("1bit", bucket_cap_mb=25)
    again.load_state_dict(state.state_dict())
    return {"gradients": steps(model, range(11, 15), change=enlarge), "spikes": again.spikes}


def unused() -> list[dict[str, Tensor]]:
    """`wide` has no gradient in step 1."""

    def drop(step: int, given: dict[str, Tensor]) -> None:
        if step == 1:
            del given["wide"]

    return steps(with_names("topk:ratio=10", find_unused_parameters=True)[0], change=drop)


def interrupted() -> list[dict[str, Tensor]]:
    """Saved after two steps, and loaded where buckets are others."""
    found = list[dict[str, Tensor]]()
    for compressor in ("4bit", "dgc:ratio=10"):
        model, state = with_names(compressor)
        steps(model, range(2))
        model, again = with_names(compressor, bucket_cap_mb=25)
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
        found.append(steps(with_names("dgc:ratio=10")[0]))
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
        "names": {"named_parameters": []},
    }
    for name, options in wrong.items():
        model: Any = nn.parallel.DistributedDataParallel(Fixed())
        model.register_comm_hook(gradwire.ddp.state(**options), gradwire.ddp.hook)
        telling(name, model)
    # One rank sends bucket by bucket, the other all of them as one.
    model, _ = with_names("4bit:clip=1" if rank else "4bit", find_unused_parameters=True)
    telling("clip", model)
    model, _ = with_names("4bit", torch.float64)
    telling("float64", model)
    model, state = with_names("4bit")
    saved = state.state_dict()
    state.load_state_dict({**saved, "residuals": {"other": torch.zeros(3)}})
    telling("another model", model)
    return told


def main(folder: str, compressors: list[str]) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {compressor: each_compressor(compressor) for compressor in compressors}
    for scenario in (
        one_bucket,
        static,
        views,
        half,
        not_finite,
        spike,
        unused,
        interrupted,
        nameless,
        defaults,
        errors,
    ):
        found[scenario.__name__] = scenario()
    torch.save(found, Path(folder) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
    # If the interpreter ends before a thread of torch's that holds a Python object, the process aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
