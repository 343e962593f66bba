"""The optimizer's steps are torch's, to the bit, and cost no import of torch.compile."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.optim.optimizer import Optimizer, OptimizerGroup, optimizer_spec, overridden, parse_optimizer

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
    ("adagrad", lambda p: torch.optim.Adagrad(p)),
    (
        "adagrad:lr_decay=0.3,weight_decay=0.1,eps=1e-4",
        lambda p: torch.optim.Adagrad(p, lr_decay=0.3, weight_decay=0.1, eps=1e-4),
    ),
]


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def give_gradients(step: int, parameters: Sequence[torch.Tensor]) -> None:
    """Set gradients; in every third step the second parameter has none; some elements are negative zeros."""
    generator = torch.Generator().manual_seed(100 + step)
    for place, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if place == 1 and step % 3 == 0 else gradient.clamp_(max=0.0) * 1.0


@pytest.mark.parametrize("spec", [*(spec for spec, _ in OPTIMIZERS), "muon"])
def test_torchs_defaults_do_not_affect_the_bits(spec: str, other_defaults: Callable[[], None]) -> None:
    """Also beyond step 256, the last one that bfloat16 counts."""

    def stepped(start: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        parameter = start.clone()
        parameter.grad = gradient
        optimizer = Optimizer(parse_optimizer(spec), [parameter], 0.01)
        for _ in range(20 if spec == "muon" else 300):
            optimizer.step()
        return parameter

    start, gradient = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(3))
    expected = stepped(start, gradient)
    other_defaults()
    assert torch.equal(stepped(start, gradient), expected)


@pytest.mark.parametrize("spec", ["adamw", "adagrad"])
def test_elements_that_never_step_have_no_state(spec: str) -> None:
    parameter = torch.ones(10)
    parameter.grad = torch.ones(10)
    optimizer = Optimizer(parse_optimizer(spec), [parameter], 0.1)
    assert not any(run.memory for run in optimizer.remembered())
    optimizer.step(0, [(2, 5)])
    assert [(run.start, run.end) for run in optimizer.remembered() if run.memory] == [(2, 5)]
    tensors = [each for run in optimizer.remembered() for each in run.memory.values() if each is not None]
    assert all(each.untyped_storage().nbytes() <= 3 * 4 for each in tensors)


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
        optimizer.learning_rates = [rate]
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
    """The tensors with a gradient are drawn for each step; the memory of the others holds no gradient."""
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


def test_tensors_that_always_have_a_gradient_are_stepped_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
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
from gradwire.optim.optimizer import Optimizer, OptimizerGroup, optimizer_spec, overridden, parse_optimizer
for spec in ("sgd:momentum=0.9", "adam", "adamw", "adagrad"):
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


# ---- parameter groups

GROUP_OF = (0, 1, 1, 0)
OF_TORCH: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}
GROUPS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("sgd:weight_decay=0.1", {"weight_decay": 0.1}, "sgd:momentum=0.9", {"momentum": 0.9}),
    (
        "sgd:momentum=0.9,nesterov=on",
        {"momentum": 0.9, "nesterov": True},
        "sgd:momentum=0.5,weight_decay=0.01",
        {"momentum": 0.5, "weight_decay": 0.01},
    ),
    ("adam:beta1=0.8", {"betas": (0.8, 0.999)}, "adam:eps=1e-4", {"eps": 1e-4}),
    ("adamw:weight_decay=0.1", {"weight_decay": 0.1}, "adamw:weight_decay=0.0", {"weight_decay": 0.0}),
    ("adagrad:weight_decay=0.1", {"weight_decay": 0.1}, "adagrad:lr_decay=0.1", {"lr_decay": 0.1}),
]


def halving(step: int) -> float:
    return float(0.5 ** (step // 2))


@pytest.mark.parametrize("given", ["factor", "rates"])
@pytest.mark.parametrize(("first", "of_first", "second", "of_second"), GROUPS, ids=[g[0] for g in GROUPS])
def test_groups_are_stepped_as_torch_steps_them_to_the_bit(
    first: str, of_first: dict[str, Any], second: str, of_second: dict[str, Any], given: str
) -> None:
    """With a scheduler, whose factor is the job's, or whose rates come with the pushes."""
    ours, theirs = parameters(), parameters()
    groups = [
        OptimizerGroup(options=parse_optimizer(first), learning_rate=0.1),
        OptimizerGroup(options=parse_optimizer(second), learning_rate=0.03),
    ]
    optimizer = Optimizer.of_groups(groups, ours, GROUP_OF)
    of_group = [[each for each, of in zip(theirs, GROUP_OF, strict=True) if of == n] for n in range(2)]
    reference = OF_TORCH[first.partition(":")[0]](
        [{"params": of_group[0], **of_first}, {"params": of_group[1], **of_second, "lr": 0.03}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, halving)
    for step in range(10):
        give_gradients(step, ours)
        give_gradients(step, theirs)
        optimizer.follow(halving(step))
        rates = [group["lr"] for group in reference.param_groups]
        assert optimizer.learning_rates == rates
        if given == "rates":
            optimizer.follow(7.0)
            optimizer.learning_rates = rates
        optimizer.step()
        reference.step()
        scheduler.step()
        for one, other in zip(ours, theirs, strict=True):
            assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes()
        optimizer = optimizer.copy() if step == 5 else optimizer


def test_groups_are_kept_when_parameters_are_divided_otherwise() -> None:
    flat, gradient = torch.ones(40), torch.ones(40)

    def between(borders: list[int]) -> list[torch.Tensor]:
        parameters = [flat[start:end] for start, end in pairwise(borders)]
        for parameter, (start, end) in zip(parameters, pairwise(borders), strict=True):
            parameter.grad = gradient[start:end]
        return parameters

    decays = [
        OptimizerGroup(options=parse_optimizer(f"sgd:weight_decay={d}"), learning_rate=1.0) for d in (0, 0.5)
    ]
    ours = Optimizer.of_groups(decays, between([0, 10, 40]), [1, 0])
    ours.divide(between([0, 5, 10, 20, 40]))
    for number in range(4):
        ours.step(number)
    assert flat.tolist() == [-0.5] * 10 + [0.0] * 30
    apart = torch.ones(2)
    ours.step_apart(1, apart, torch.ones(2), np.arange(2), [(0, 5)])
    assert apart.tolist() == [-0.5] * 2
    assert not ours.leaves_zeros
    assert Optimizer.of_groups(decays[:1], (), ()).leaves_zeros


@pytest.mark.parametrize(
    "specs", [("sgd", "sgd:weight_decay=0.1"), ("adam", "adam:eps=1e-4"), ("sgd:momentum=0.9", "sgd")]
)
def test_tensors_of_several_groups_in_one_parameter_step_as_each_would_alone(specs: tuple[str, str]) -> None:
    """Rates of the groups are equal at some steps, tensors lack a gradient at others, and one has no
    element."""
    sizes, of = [5, 9, 0, 4, 7, 11], [0, 0, 1, 1, 0, 2]
    ends = [*accumulate(sizes)]
    options = [parse_optimizer(specs[0]), parse_optimizer(specs[1]), parse_optimizer(specs[0])]
    groups = [OptimizerGroup(options=each, learning_rate=0.1) for each in options]
    draw, generator = random.Random(7), torch.Generator().manual_seed(7)
    together = torch.randn(sum(sizes), generator=generator)
    rates = list[float]()
    any_together: Any = together
    alone: list[torch.Tensor] = [each.clone() for each in any_together.split(sizes)]
    ours = Optimizer.of_groups(groups, [together], of, ends)
    theirs = [Optimizer(options[group], [each], 0.1) for group, each in zip(of, alone, strict=True)]
    for step in range(24):
        rates = [0.1] * 3 if step % 3 else [draw.random() for _ in groups]
        gradient = torch.randn(sum(sizes), generator=generator)
        present = [draw.random() < 0.8 for _ in sizes]
        ours.learning_rates, together.grad = rates, gradient
        ours.step(0, [(e - s, e) for s, e, there in zip(sizes, ends, present, strict=True) if there and s])
        if step == 12:
            ours.divide([together[:7], together[7:]])
            ours.divide([together])
        any_gradient: Any = gradient
        pieces = zip(theirs, alone, any_gradient.split(sizes), of, present, strict=True)
        for optimizer, parameter, its_gradient, group, there in pieces:
            optimizer.learning_rates, parameter.grad = [rates[group]], its_gradient if there else None
            optimizer.step()
        assert together.numpy().tobytes() == torch.cat(alone).numpy().tobytes()
    assert ours.copy().learning_rates == rates


@pytest.mark.parametrize("spec", ["sgd", "adagrad:lr_decay=0.1", "adagrad:initial_accumulator_value=1,eps=0"])
def test_elements_are_stepped_apart_as_with_all_others_zero(spec: str) -> None:
    """Stretches with a gradient are drawn, and so are, within them, the elements where it is not 0."""
    bounds, generator = [(0, 40), (40, 41), (41, 90), (90, 120)], torch.Generator().manual_seed(5)
    whole = torch.randn(120, generator=generator)
    apart = whole.clone()
    reference = Optimizer(parse_optimizer(spec), [torch.ones(3), whole], 0.1)
    ours = Optimizer(parse_optimizer(spec), [torch.ones(3), apart], 0.1)
    assert ours.leaves_zeros
    draw = random.Random(3)
    for _ in range(24):
        ranges = [each for each in bounds if draw.random() < 0.6]
        inside = [place for start, end in ranges for place in range(start, end)]
        places = np.array(sorted(draw.sample(inside, len(inside) // 5)), np.int64)
        whole.grad = torch.zeros(120)
        whole.grad[places] = torch.randn(len(places), generator=generator)
        reference.step(1, ranges)
        stepped = apart[places]
        ours.step_apart(1, stepped, whole.grad[places], places, ranges)
        apart[places] = stepped
        assert apart.numpy().tobytes() == whole.numpy().tobytes()


@pytest.mark.parametrize("spec", [spec for spec, _ in OPTIMIZERS])
def test_the_text_of_an_optimizer_says_all_of_it(spec: str) -> None:
    options = parse_optimizer(spec)
    assert parse_optimizer(optimizer_spec(options)) == options
    assert type(parse_optimizer(optimizer_spec(options))) is type(options)


def test_options_are_overridden_by_torchs_names_and_by_ours() -> None:
    adamw = parse_optimizer("adamw:weight_decay=0.1")
    assert overridden(adamw, {"betas": (0.8, 0.9), "eps": 1, "weight_decay": 0}) == parse_optimizer(
        "adamw:beta1=0.8,beta2=0.9,eps=1.0,weight_decay=0.0"
    )
    assert overridden(adamw, {"beta1": 0.5}) == parse_optimizer("adamw:beta1=0.5,weight_decay=0.1")
    nesterov = overridden(parse_optimizer("sgd"), {"momentum": 0.9, "nesterov": True})
    assert nesterov == parse_optimizer("sgd:momentum=0.9,nesterov=on")


@pytest.mark.parametrize(
    ("spec", "overrides", "words"),
    [
        (
            "sgd",
            {"momentun": 0.9},
            r"unknown option 'momentun' \(did you mean 'momentum'\?\); known options: lr, ",
        ),
        ("sgd", {"betas": (0.9, 0.99)}, "unknown option 'betas'"),
        ("adam", {"betas": 0.9}, "betas: expected two numbers, got 0.9"),
        ("adam", {"betas": (0.9, "x")}, "beta2: expected a number, got 'x'"),
        ("adam", {"betas": (0.9, 1.0)}, "beta2: expected at least 0 and below 1, got 1"),
        ("sgd", {"momentum": 0.9, "nesterov": 1}, "nesterov: expected True or False, got 1"),
        ("sgd", {"weight_decay": True}, "weight_decay: expected a number, got True"),
    ],
)
def test_overrides_that_cannot_be_are_refused(spec: str, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        overridden(parse_optimizer(spec), overrides)
