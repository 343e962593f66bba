"""The optimizer's steps are torch's, to the bit, and cost no import of torch.compile."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from gradwire.optimizer import Optimizer, parse_optimizer

Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
RATES = (0.1, 0.1, 0.03, 0.0, 0.5)
SHAPES = ((7, 5), (33,), (), (0, 3))

OPTIMIZERS: list[tuple[str, Make]] = [
    ("sgd", lambda p: torch.optim.SGD(p)),
    ("sgd:momentum=0.9", lambda p: torch.optim.SGD(p, momentum=0.9)),
    (
        "sgd:momentum=0.9,nesterov=on,weight_decay=0.01",
        lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    ("adam", lambda p: torch.optim.Adam(p)),
    (
        "adam:beta1=0.8,beta2=0.9,eps=1e-4,weight_decay=0.1",
        lambda p: torch.optim.Adam(p, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
    ),
    ("adamw", lambda p: torch.optim.AdamW(p)),
    ("adamw:weight_decay=0.2", lambda p: torch.optim.AdamW(p, weight_decay=0.2)),
]


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def give_gradients(step: int, parameters: Sequence[torch.Tensor]) -> None:
    """Of every third step the second parameter has none; some elements are negative zeros."""
    generator = torch.Generator().manual_seed(100 + step)
    for place, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if place == 1 and step % 3 == 0 else gradient.clamp_(max=0.0) * 1.0


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize(("spec", "make"), OPTIMIZERS, ids=[spec for spec, _ in OPTIMIZERS])
def test_steps_are_torchs_to_the_bit(spec: str, make: Make, remembered: bool) -> None:
    """remembered: the state is taken before the first step, as coded mode takes it."""
    ours, theirs = parameters(), parameters()
    optimizer, reference = Optimizer(parse_optimizer(spec), ours, 0.0), make(theirs)
    before = optimizer.state() if remembered else []
    assert not any(tensor.any() for _, _, tensor in before)
    for step, rate in enumerate(RATES * 4):
        give_gradients(step, ours)
        give_gradients(step, theirs)
        optimizer.learning_rate = rate
        for group in reference.param_groups:
            group["lr"] = rate
        optimizer.step()
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes()
    expected = {
        (what, place): value
        for place, parameter in enumerate(theirs)
        for what, value in reference.state[parameter].items()
        if value is not None
    }
    state = {(what, place): value for what, place, value in optimizer.state()}
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in state.items())
    if remembered:
        assert [id(tensor) for _, _, tensor in before] == [id(tensor) for _, _, tensor in optimizer.state()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("spec", "make"), OPTIMIZERS, ids=[spec for spec, _ in OPTIMIZERS])
def test_tensors_end_to_end_are_stepped_as_if_each_were_by_itself(spec: str, make: Make, seed: int) -> None:
    """Which of them have a gradient is drawn for each step; what the others hold is not a gradient."""
    sizes, draw = (33, 1, 8, 17, 100, 16), random.Random(seed)
    bounds = [*pairwise(accumulate(sizes, initial=0))]
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(sum(sizes), generator=generator)
    theirs = [flat[start:end].clone().requires_grad_() for start, end in bounds]
    optimizer, reference = Optimizer(parse_optimizer(spec), [torch.ones(3), flat], 0.1), make(theirs)
    for group in reference.param_groups:
        group["lr"] = 0.1
    for step in range(24):
        flat.grad = torch.randn(flat.shape, generator=generator)
        present = [step % 6 == 0 or draw.random() < 0.7 for _ in sizes]
        for (start, end), has, parameter in zip(bounds, present, theirs, strict=True):
            parameter.grad = flat.grad[start:end].clone() if has else None
            if not has:
                flat.grad[start:end] = float("nan")
        ranges = [pair for pair, has in zip(bounds, present, strict=True) if has]
        optimizer.step(1, ranges if step else None)
        reference.step()
        for (start, end), parameter in zip(bounds, theirs, strict=True):
            assert flat[start:end].numpy().tobytes() == parameter.detach().numpy().tobytes()


def test_tensors_that_always_have_a_gradient_are_stepped_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = list[list[int]]()

    def counting(parameters: list[torch.Tensor], *_: Any, **__: Any) -> None:
        sizes.append([each.numel() for each in parameters])

    monkeypatch.setattr(importlib.import_module("torch.optim.adam"), "adam", counting)
    flat = torch.zeros(9)
    flat.grad = torch.ones(9)
    optimizer = Optimizer(parse_optimizer("adam"), [flat], 0.1)
    optimizer.step(0, [(0, 9)])
    optimizer.step(0, [(0, 3), (5, 9)])
    optimizer.step(0, [(0, 9)])
    optimizer.step(0, [])
    assert sizes == [[9], [3, 4], [3, 2, 4]]


def test_a_step_imports_no_compiler() -> None:
    """Building any torch.optim optimizer imports torch._dynamo: more than a second of each daemon's start."""
    program = """
import sys, torch
from gradwire.optimizer import Optimizer, parse_optimizer
for spec in ("sgd:momentum=0.9", "adam", "adamw"):
    parameter = torch.zeros(3)
    parameter.grad = torch.ones(3)
    Optimizer(parse_optimizer(spec), [parameter], 0.1).step()
print("torch._dynamo" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_what_is_divided_anew_keeps_no_memory_of_what_it_was_cut_from() -> None:
    elements = 1 << 12
    flat, gradient = torch.zeros(elements), torch.ones(elements)

    def between(borders: list[int]) -> list[torch.Tensor]:
        parameters = [flat[start:end] for start, end in pairwise(borders)]
        for parameter, (start, end) in zip(parameters, pairwise(borders), strict=True):
            parameter.grad = gradient[start:end]
        return parameters

    ours = Optimizer(parse_optimizer("sgd:momentum=0.9"), between([0, elements]), 0.1)
    ours.step()
    for cut in range(64, 64 * 20, 64):  # each time the last sliver stays, and the rest is cut and joined anew
        slivers = [*range(0, cut + 1, 64)]
        ours.divide(between([*slivers, elements // 2, elements]))
        ours.divide(between([*slivers, elements]))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, _, tensor in ours.state()
    }
    assert sum(storages.values()) == 4 * elements
