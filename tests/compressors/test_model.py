"""A whole model: which tensors are compressed, what survives a refusal, what is refused untouched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flat import as_push, by_tensor, ranges_of

from gradwire.common.parts import arrange
from gradwire.common.spec import SpecError
from gradwire.compressors import (
    CompressorEntry,
    DenseFormat,
    DensePayload,
    LayerRule,
    ModelCompressor,
    NonFiniteGradient,
    NoOptions,
    Payload,
    QuantizedPayload,
    StepContext,
    TensorSpec,
    decode,
    parse_compressor,
    registry,
    validate,
)

SPECS = [
    TensorSpec(name="conv.weight", shape=(4, 3, 3, 3)),
    TensorSpec(name="conv.bias", shape=(4,)),
    TensorSpec(name="norm.weight", shape=(4,)),
    TensorSpec(name="fc.weight", shape=(10, 36)),
    TensorSpec(name="fc.bias", shape=(10,)),
    TensorSpec(name="scale", shape=()),
]


def gradients(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.shape, generator=generator) * 0.01 for spec in SPECS]


def model(spec: str = "4bit", rule: LayerRule | None = None, rank: int = 0) -> ModelCompressor:
    return ModelCompressor(SPECS, spec, rule or LayerRule(), seed=1, rank=rank)


def kinds(payloads: list[Payload]) -> list[str]:
    """Return the kind of each tensor's payload; neighbours of a kind are one payload."""
    found: list[str] = []
    bounds, end = list(zip(ranges_of(payloads), payloads, strict=True)), 0
    for spec in SPECS:
        begin, end = end, end + spec.elements
        (payload,) = (each for (first, last), each in bounds if first <= begin and end <= last)
        assert isinstance(payload, QuantizedPayload | DensePayload)
        found.append(payload.format.value)
    return found


@pytest.mark.parametrize(
    ("spec", "large", "small"),
    [
        ("4bit", "signed-4bit", "bfloat16"),
        ("2bit", "signed-2bit", "bfloat16"),
        ("none", "float32", "float32"),
        ("bf16", "bfloat16", "bfloat16"),
        ("fp16", "float16", "float16"),
    ],
)
def test_weights_are_compressed_and_small_tensors_travel_dense(spec: str, large: str, small: str) -> None:
    payloads = model(spec).compress(gradients(), 32, version=0)
    assert kinds(payloads) == [large, small, small, large, small, small]


def test_patterns_overrule_the_rule() -> None:
    rule = LayerRule(dense=("fc.*", "*norm*"), compressed=("*.bias", "norm.weight"))
    payloads = model(rule=rule).compress(gradients(), 32, version=0)
    four, dense = "signed-4bit", "bfloat16"
    # fc.bias and norm.weight match both, and `dense` wins.
    assert kinds(payloads) == [four, four, dense, dense, dense, dense]


def test_patterns_are_case_sensitive() -> None:
    assert not LayerRule(dense=("FC.*",)).choose(SPECS[3], parse_compressor("4bit")).text.startswith("bf16")


def test_a_bad_spec_is_refused_even_if_no_tensor_would_use_it() -> None:
    with pytest.raises(SpecError):
        ModelCompressor([SPECS[1]], "4bit:levels=none", LayerRule(), 0, 0)


def test_gradients_may_have_any_layout() -> None:
    plain, odd = model(), model()
    expected = plain.compress(gradients(), 8, version=0)
    turned = [g.permute(tuple(reversed(range(g.ndim)))).contiguous() for g in gradients()]
    views = [g.permute(tuple(reversed(range(g.ndim)))) for g in turned]
    assert not views[0].is_contiguous()
    for a, b in zip(expected, odd.compress(views, 8, version=0), strict=True):
        assert np.array_equal(a.data, b.data)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", ["4bit", "none", "4bit:levels=groups"])
def test_a_non_finite_gradient_is_refused_before_any_state_changes(spec: str, bad: float) -> None:
    touched, untouched = model(spec), model(spec)
    poisoned = gradients()
    poisoned[3][2, 5] = bad
    with pytest.raises(NonFiniteGradient, match=r"fc\.weight") as refusal:
        touched.compress(poisoned, 32, version=0)
    assert refusal.value.name == "fc.weight"
    assert touched.ledger.norm() == 0.0
    for a, b in zip(
        touched.compress(gradients(), 32, version=0),
        untouched.compress(gradients(), 32, version=0),
        strict=True,
    ):
        assert np.array_equal(a.data, b.data)
        if isinstance(a, QuantizedPayload) and isinstance(b, QuantizedPayload):
            assert np.array_equal(a.levels, b.levels)


Tensors = list[torch.Tensor]


def one_missing(tensors: Tensors) -> Tensors:
    return tensors[:-1]


def one_of_float64(tensors: Tensors) -> Tensors:
    return [tensors[0].double(), *tensors[1:]]


def one_too_small(tensors: Tensors) -> Tensors:
    return [tensors[0][1:], *tensors[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_missing, "expected 6 gradients, got 5"),
        (one_of_float64, r"'conv\.weight': expected torch\.float32, got torch\.float64"),
        (one_too_small, r"'conv\.weight': expected shape \(4, 3, 3, 3\), got shape \(3, 3, 3, 3\)"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(change: Callable[[Tensors], Tensors], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().compress(change(gradients()), 32, version=0)


def test_samples_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="samples: expected at least 1, got 0"):
        model().compress(gradients(), 0, version=0)


def test_without_feedback_a_refused_push_is_added_to_the_next_gradient() -> None:
    compressor = model("none")
    given = gradients()
    compressor.ledger.put_back(as_push(compressor.compress(given, 32, version=0)))
    assert compressor.ledger.norm() > 0
    sent = by_tensor(compressor.compress(given, 32, version=1), SPECS)
    for values, gradient in zip(sent, given, strict=True):
        assert np.array_equal(values, 2 * gradient.reshape(-1).numpy())
    assert compressor.ledger.norm() == 0.0


def test_a_plan_for_the_whole_model_sees_what_was_put_back() -> None:
    spec = "krngc:ratio=4,warmup=0,feedback=off"
    compressor, given = model(spec), gradients()
    given[3] *= 100
    refused = compressor.compress(given, 32, version=0)
    compressor.ledger.put_back(as_push(refused))
    more = [
        gradient + torch.from_numpy(owed).view(gradient.shape)
        for gradient, owed in zip(gradients(1), by_tensor(refused, SPECS), strict=True)
    ]
    expected = model(spec).compress(more, 32, version=1)
    sent = compressor.compress(gradients(1), 32, version=1)
    assert [each.data.tobytes() for each in sent] == [each.data.tobytes() for each in expected]


@pytest.mark.parametrize(
    "spec", ["none", "2bit", "topk:ratio=10,momentum=0.9", "dgc:clip=0.01", "krngc:delay=9"]
)
def test_flushing_sends_all_that_is_left_whole(spec: str) -> None:
    """The sum of earlier pushes and of the flush is the gradient that would have been sent without
    compression."""
    compressor = model(spec)
    given = gradients()
    sent = [by_tensor(compressor.compress(given, 1, version=step), SPECS) for step in range(3)]
    held = compressor.ledger.norm()
    last = compressor.flush([torch.zeros_like(gradient) for gradient in given])
    assert compressor.ledger.norm() == 0.0
    assert all(isinstance(payload, DensePayload) for payload in last)
    if "momentum" in spec or "dgc" in spec or "krngc" in spec:  # velocities go on
        assert any(np.any(decode(payload)) for payload in last)
        return
    assert held == pytest.approx(
        np.sqrt(sum(float((decode(payload) ** 2).sum()) for payload in last)), abs=1e-6
    )
    left = by_tensor(last, SPECS)
    for place, gradient in enumerate(given):
        total = sum(step[place] for step in sent) + left[place]
        np.testing.assert_allclose(total, 3 * gradient.reshape(-1).numpy(), rtol=1e-5, atol=1e-5)


def test_residual_norm_covers_every_tensor() -> None:
    compressor = model("2bit:threshold=1000")
    given = gradients()
    sent = by_tensor(compressor.compress(given, 1, version=0), SPECS)
    squares = 0.0
    for g, values in zip(given, sent, strict=True):
        squares += float(((g.reshape(-1).numpy() - values).astype(np.float64) ** 2).sum())
    assert compressor.ledger.norm() == pytest.approx(np.sqrt(squares), rel=1e-6)


class Drawn:
    """Sends random numbers, which no built-in compressor draws."""

    def init(self, spec: TensorSpec) -> None:
        return None

    def compress(
        self, gradient: torch.Tensor, state: None, context: StepContext
    ) -> tuple[DensePayload, None]:
        values = context.rng.random(gradient.numel(), np.float32)
        data = values.view(np.uint8)
        return DensePayload(format=DenseFormat.FLOAT32, elements=values.size, data=data), None


def build_drawn(options: NoOptions) -> Drawn:
    return Drawn()


def test_the_seed_the_rank_and_the_step_go_into_the_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = CompressorEntry(options=NoOptions, build=build_drawn, wrapping=None, dense=True)
    monkeypatch.setattr(registry, "BUILT_IN", {"drawn": entry})

    def draw(seed: int, rank: int) -> list[bytes]:
        """Return the bytes of two steps."""
        compressor = ModelCompressor(SPECS[:1], "drawn", LayerRule(), seed, rank)
        return [compressor.compress(gradients()[:1], 8, version=v)[0].data.tobytes() for v in range(2)]

    assert draw(1, 0) == draw(1, 0)
    drawn = [*draw(1, 0), *draw(1, 1), *draw(2, 0), *draw(0, 1)]
    assert len(set(drawn)) == len(drawn)


def test_dense_small_tensors_cost_two_bytes_an_element() -> None:
    payload = model().compress(gradients(), 32, version=0)[1]
    assert isinstance(payload, DensePayload)
    assert payload.format is DenseFormat.BFLOAT16
    assert payload.data.nbytes == 2 * (4 + 4)  # both that lie between the weights


@pytest.mark.parametrize("spec", ["4bit", "topk:ratio=20", "8bit", "randk", "l1"])
def test_a_unit_that_goes_as_float32_for_some_steps_loses_nothing(spec: str) -> None:
    shapes = [(40, 30), (40,), (500, 3), (7,)]
    specs = [TensorSpec(name=str(place), shape=shape) for place, shape in enumerate(shapes)]
    plan = arrange([each.elements for each in specs], [2, 2], [])
    subject = ModelCompressor(
        specs, f"{spec}{',' if ':' in spec else ':'}feedback=on", LayerRule(), 1, 0, plan=plan
    )
    generator = torch.Generator().manual_seed(0)
    total, sent = torch.zeros(plan.elements), torch.zeros(plan.elements)
    every = frozenset({0, 1})
    for version, units in enumerate([(), (), {0}, every, every, {1}, (), every]):
        subject.send_whole(frozenset(units))
        given = [torch.randn(shape, generator=generator) for shape in shapes]
        total += torch.cat([each.reshape(-1) for each in given])
        payloads = subject.compress(given, 8, version=version)
        for payload in payloads:
            validate(payload)
        sent += torch.from_numpy(np.concatenate([decode(payload) for payload in payloads]))
        for number in units:
            start, end = plan.units[number].start, plan.units[number].end
            assert not subject.ledger.residual[start:end].any()
        np.testing.assert_allclose((sent + subject.ledger.residual).numpy(), total.numpy(), atol=1e-5)
    subject.compress([torch.zeros(shape) for shape in shapes], 8, version=8)
    assert subject.ledger.unused, "nothing is owed, so nothing is looked up"


@pytest.mark.parametrize("spec", ["4bit", "4bit:clip=1"])
def test_what_a_compressor_remembers_outlasts_the_steps_as_float32(spec: str) -> None:
    specs = [TensorSpec(name="w", shape=(30, 30))]
    left, kept = (ModelCompressor(specs, spec, LayerRule(), 1, 0) for _ in range(2))
    given = [torch.randn(30, 30)]
    for subject in (left, kept):
        subject.compress(given, 8, version=0)
    left.send_whole(frozenset({0}))
    left.compress([torch.zeros(30, 30)], 8, version=1)
    assert left.ledger.states == kept.ledger.states
