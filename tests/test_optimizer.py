"""The optimizer's steps are torch's, to the bit, and cost no import of torch.compile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

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
