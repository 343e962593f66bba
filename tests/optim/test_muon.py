"""Muon's step is torch's, and the rule that says which parameters it steps is right for usual models."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import gradwire
from gradwire.optim import steps
from gradwire.optim.matrices import declared, described, matrices
from gradwire.optim.optimizer import Optimizer, OptimizerGroup, optimizer_spec, parse_optimizer
from gradwire.optim.steps import AdamW, Muon, orthogonal
from gradwire.worker.tasks.characters import Gpt

RATES = (0.02, 0.02, 0.007, 0.0, 0.05)
Matrix = npt.NDArray[np.float64]


@pytest.fixture
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the iterations run in float32 on every CPU."""
    monkeypatch.setattr(steps, "cpu_has_bfloat16", lambda: False)


def give(step: int, *models: nn.Module) -> None:
    for model in models:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def by_recipe(
    weight: Matrix, gradients: list[Matrix], rates: tuple[float, ...], momentum: float, decay: float
) -> Matrix:
    """The recipe in float64: M = μ M + (1 - μ) g; N = μ M + (1 - μ) g; u = 0.2 √max(rows, columns) NS5(N)."""
    average = np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        average = momentum * average + (1 - momentum) * gradient
        x = momentum * average + (1 - momentum) * gradient
        x = x / np.linalg.norm(x)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        weight = weight - rate * (0.2 * math.sqrt(max(weight.shape)) * x + decay * weight)
    return weight


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_a_step_is_that_of_the_recipe(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in RATES]
    expected = by_recipe(
        weight.double().numpy(), [each.double().numpy() for each in gradients], RATES, 0.9, 0.3
    )
    optimizer = Optimizer(parse_optimizer("muon:momentum=0.9,weight_decay=0.3"), [weight], 0.0)
    for gradient, rate in zip(gradients, RATES, strict=True):
        weight.grad = gradient
        optimizer.learning_rates = [rate]
        optimizer.step()
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bfloat16", [True, False])
def test_steps_of_a_model_are_those_of_torchs_two_optimizers_to_the_bit(
    bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's runs its iterations in bfloat16 on every CPU. The test makes that float32 for the CPUs on which
    ours does."""
    pytest.importorskip("torch.optim._muon", reason="torch has Muon from 2.9 on")

    def kept(self: torch.Tensor) -> torch.Tensor:
        return self.clone()

    monkeypatch.setattr(steps, "cpu_has_bfloat16", lambda: bfloat16)
    if not bfloat16:
        monkeypatch.setattr(torch.Tensor, "bfloat16", kept)
    torch.manual_seed(1)
    ours = Gpt(8, 2, 64)
    theirs = copy.deepcopy(ours)
    optimizer = gradwire.optim.muon(ours, 0.0, weight_decay=0.2, momentum=0.9, beta2=0.99)
    named, chosen = dict(theirs.named_parameters()), matrices(theirs)
    rest = [each for name, each in named.items() if name not in chosen]
    groups: list[Any] = [
        {"params": [each for each in rest if each.dim() > 1], "weight_decay": 0.2},
        {"params": [each for each in rest if each.dim() < 2], "weight_decay": 0.0},
    ]
    torchs: Any = torch.optim
    references = [
        torchs.Muon(
            [named[name] for name in named if name in chosen],
            weight_decay=0.2,
            momentum=0.9,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(groups, betas=(0.9, 0.99)),
    ]
    for step, rate in enumerate(RATES):
        give(step, ours, theirs)
        for group in [group for each in (optimizer, *references) for group in each.param_groups]:
            group["lr"] = rate
        for each in (optimizer, *references):
            each.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)


def test_the_iterations_bring_singular_values_near_1() -> None:
    for shape in ((16, 16), (40, 8), (8, 40)):
        found = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1))).float()
        values = cast(torch.Tensor, torch.linalg.svdvals(found))
        assert float(values.min()) > 0.4
        assert float(values.max()) < 1.3


def test_a_split_weight_is_stepped_like_its_matrices_by_themselves_and_a_kernel_like_its_rows() -> None:
    torch.manual_seed(1)
    whole, kernel = torch.randn(12, 4), torch.randn(6, 3, 2, 2)
    parts = [whole[start : start + 4].clone() for start in (0, 4, 8)]
    flat = kernel.flatten(1).clone()
    whole.grad, kernel.grad = torch.randn(12, 4), torch.randn(6, 3, 2, 2)
    for part, start in zip(parts, (0, 4, 8), strict=True):
        part.grad = whole.grad[start : start + 4]
    flat.grad = kernel.grad.flatten(1)
    for spec, tensors in (("muon:split=3", [whole]), ("muon", [*parts, flat, kernel])):
        Optimizer(parse_optimizer(spec), tensors, 0.1).step()
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(kernel.flatten(1), flat)
    other = torch.cat(parts).clone()
    other.grad = whole.grad
    before = other.clone()
    Optimizer(parse_optimizer("muon"), [other], 0.1).step()
    assert not torch.allclose(other - before, whole - before)


class Untied(nn.Module):
    """A transformer with a head, and tables of positions and classes as bare parameters."""

    def __init__(self, words: int = 50) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 16)
        self.pos_table = nn.Parameter(torch.zeros(1, 8, 16))
        self.class_token = nn.Parameter(torch.zeros(3, 16))
        self.mixed = nn.Parameter(torch.ones(16, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, words)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.widened = nn.ConvTranspose2d(8, 4, 2)
        self.classifier = nn.Linear(8, 16)
        self.fc = nn.Linear(16, 10)


EXPECTED: list[tuple[nn.Module, set[str]]] = [
    (
        Gpt(8, 2, 64),
        {f"blocks.{at}.{name}.weight" for at in (0, 1) for name in ("attention", "joined", "wide", "narrow")},
    ),
    (Gpt(8, 1, 64), {f"blocks.0.{name}.weight" for name in ("attention", "joined", "wide", "narrow")}),
    (
        Untied(),
        {"mixed"}
        | {
            f"layers.layers.{at}.{name}"
            for at in (0, 1)
            for name in (
                "self_attn.in_proj_weight",
                "self_attn.out_proj.weight",
                "linear1.weight",
                "linear2.weight",
            )
        },
    ),
    (Vision(), {"body.0.weight", "body.3.weight"}),
    (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)), {"0.weight"}),
    (nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 4), nn.Linear(4, 5)), set()),
    (nn.Sequential(OrderedDict(only=nn.Linear(3, 4))), set()),
    (nn.LayerNorm(3), set()),
]


@pytest.mark.parametrize(("model", "expected"), EXPECTED, ids=[str(at) for at in range(len(EXPECTED))])
def test_the_rule_finds_the_matrices_between_hidden_states(model: nn.Module, expected: set[str]) -> None:
    assert matrices(model) == expected


def test_each_parameter_is_in_one_group_and_the_text_tells_in_which() -> None:
    model = Vision()
    groups = declared(model, [], Muon(weight_decay=0.3, beta1=0.8))
    names = [name for each in groups for name in each.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    by_options = {each.options: set(each.names) for each in groups}
    assert by_options[Muon(weight_decay=0.3, beta1=0.8)] == {"body.0.weight", "body.3.weight"}
    assert by_options[AdamW(beta1=0.8, weight_decay=0.3)] == {
        "widened.weight",
        "classifier.weight",
        "fc.weight",
    }
    assert "body.1.weight" in by_options[AdamW(beta1=0.8, weight_decay=0.0)]
    text = described(model, groups)
    assert text.startswith("Muon steps 2 parameters of 792 elements (body.*.weight); AdamW steps 10 ")
    assert "body.1.weight" in text


def test_query_key_and_value_of_torchs_attention_are_matrices_of_their_own() -> None:
    """Also in a model that is the attention itself, and a group may still say otherwise."""
    layer = torch.nn.TransformerEncoderLayer(8, 2)
    splits = {
        name: each.options.split
        for each in declared(layer, (), Muon())
        if isinstance(each.options, Muon)
        for name in each.names
    }
    assert splits["self_attn.in_proj_weight"] == 3
    assert splits["self_attn.out_proj.weight"] == splits["linear1.weight"] == 1
    attention = torch.nn.MultiheadAttention(8, 2)
    group = {"params": attention.in_proj_weight, "split": 1, "optimizer": "muon"}
    for given, expected in (((), 3), ([group], 1)):
        (found,) = (each for each in declared(attention, given, Muon()) if "in_proj_weight" in each.names)
        assert isinstance(found.options, Muon)
        assert found.options.split == expected


def test_groups_may_name_optimizer_split_rate_and_options() -> None:
    model = Gpt(8, 1, 64)
    block = cast(Any, model.blocks[0])
    given: list[dict[str, Any]] = [
        {"params": block.attention.weight, "split": 3, "lr": 0.5},
        {"params": [model.positions], "optimizer": "muon", "weight_decay": 0.0},
        {"params": [block.wide.weight, block.wide.bias], "optimizer": "adamw", "betas": (0.5, 0.6)},
        {"params": [block.narrow.weight, block.narrow.bias], "weight_decay": 0.7},
    ]
    found = {name: each for each in declared(model, given, Muon()) for name in each.names}
    assert found["blocks.0.attention.weight"].options == Muon(split=3)
    assert found["blocks.0.attention.weight"].learning_rate == 0.5
    assert found["positions"].options == Muon(weight_decay=0.0)
    assert found["blocks.0.wide.weight"].options == AdamW(beta1=0.5, beta2=0.6, weight_decay=0.1)
    assert found["blocks.0.wide.bias"].options == AdamW(beta1=0.5, beta2=0.6, weight_decay=0.0)
    assert found["blocks.0.narrow.weight"].options == Muon(weight_decay=0.7)
    assert found["blocks.0.narrow.bias"].options == AdamW(weight_decay=0.7)
    assert found["blocks.0.joined.weight"].options == Muon()
    plain = parse_optimizer("sgd")
    assert declared(model, given[:1], plain)[0].learning_rate == 0.5
    assert declared(model, [{"params": block.attention.weight, "split": 3}], plain) == []


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"optimizer": "sgd"}, "optimizer: expected 'muon' or 'adamw', got 'sgd'"),
        ({"optimizer": "muon"}, "muon steps matrices, and 'bias' has 1 dimensions"),
        (
            {"split": 2, "optimizer": "muon", "weight": True},
            "split: 'weight' has 5 rows, which are no multiple",
        ),
        ({"split": 2.0}, "split: expected a whole number, got 2.0"),
        ({"split": 0}, "split: expected at least 1, got 0"),
        ({"nesterov": True}, "unknown option 'nesterov'"),
    ],
)
def test_groups_that_cannot_be_are_refused_by_number(group: dict[str, Any], words: str) -> None:
    model = nn.Linear(6, 5)
    params = [model.weight] if group.pop("weight", False) else [model.bias]
    with pytest.raises(ValueError, match=f"parameter group 0: .*{words}"):
        declared(model, [{"params": params, **group}], Muon())


def test_the_helper_of_scripts_saves_its_state_and_follows_a_scheduler() -> None:
    torch.manual_seed(1)
    ours = Vision()
    theirs = copy.deepcopy(ours)
    first, second = gradwire.optim.muon(ours, 0.1), gradwire.optim.muon(theirs, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda step: 1 / (1 + step))
    for step in range(4):
        give(step, ours, theirs)
        if step == 2:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            theirs.load_state_dict(ours.state_dict())
        if step >= 2:
            second.param_groups[0]["lr"] = first.param_groups[0]["lr"]
            second.param_groups[1]["lr"] = second.param_groups[2]["lr"] = first.param_groups[0]["lr"]
            second.step()
        first.step()
        schedule.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.step(lambda: 7.0) == 7.0
    with pytest.raises(ValueError, match="unknown option 'momentun'"):
        gradwire.optim.muon(ours, 0.1, momentun=0.9)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not its parameters, got generator"):
        gradwire.optim.muon(cast("nn.Module", ours.parameters()), 0.1)


def test_specs_and_limits() -> None:
    options = parse_optimizer("muon:momentum=0.9,beta2=0.99,split=3")
    assert options == Muon(momentum=0.9, beta2=0.99, split=3)
    assert parse_optimizer(optimizer_spec(options)) == options
    for text, words in (
        ("momentum=1", "momentum: expected at least 0 and below 1"),
        ("weight_decay=-1", "weight_decay: expected a finite number"),
        ("split=0", "split: expected at least 1"),
        ("split=x", "expected int"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_optimizer(f"muon:{text}")


def test_a_copy_of_a_parameter_takes_the_same_step() -> None:
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    group = OptimizerGroup(options=Muon(), learning_rate=0.1)
    optimizer = Optimizer.of_groups([group], [weight], [0])
    copied, gradient = weight.clone(), torch.ones(6, 5)
    memory = optimizer.copy_memory(0)
    optimizer.step_copies([0], [copied], [gradient])
    optimizer.restore_memory(0, memory)
    weight.grad = gradient
    optimizer.step()
    assert torch.equal(weight, copied)
