"""Spikes: a gradient far larger than usual leaves nothing in error feedback, and others keep their bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from gradwire.common.parts import arrange, divide
from gradwire.compressors import (
    Compressed,
    DensePayload,
    LayerRule,
    ModelCompressor,
    Payload,
    PushTerms,
    TensorSpec,
    decode,
)
from gradwire.compressors.base import Compressor
from gradwire.compressors.kernels.cpu import magnitudes
from gradwire.compressors.kernels.devices import sampled_magnitudes
from gradwire.compressors.kernels.selection import sample
from gradwire.compressors.payload import DenseFormat, Float64
from gradwire.compressors.spikes import FIRST, LARGEST, LIMIT, MEAN, ROWS, Spike, described, judge

SHAPES = ((64, 64), (64,), (32, 96), (300, 200))
SPECS = [TensorSpec(name=f"t{place}", shape=shape) for place, shape in enumerate(SHAPES)]
SIZES = [spec.elements for spec in SPECS]
SPIKED = 2
AT = 20  # the step with the spike


def gradients(step: int, factor: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(shape, generator=generator) * 1e-2 for shape in SHAPES]
    made[SPIKED] = made[SPIKED] * factor
    return made


def compressor(spec: str, units: list[int] | None = None, *, merged: bool = False) -> ModelCompressor:
    plan = divide(SIZES) if units is None else arrange(SIZES, units, [])
    if merged:
        plan = replace(plan, merged=True)
    return ModelCompressor(SPECS, spec, LayerRule(), 1, 0, plan=plan)


def flat(payloads: list[Payload]) -> np.ndarray:
    return np.concatenate([decode(payload) for payload in payloads])


def steps(subject: ModelCompressor, last: int, factor: float = 1e6, at: int = AT) -> Iterator[np.ndarray]:
    for step in range(last):
        yield flat(subject.compress(gradients(step, factor if step == at else 1.0), 8, version=step))


@pytest.mark.parametrize(
    "spec", ["4bit", "8bit", "1bit", "1bit:block=4096", "topk:ratio=100", "fp16", "2bit", "randk", "dgc"]
)
@pytest.mark.parametrize("factor", [1e3, 1e6])
def test_a_spike_goes_out_in_one_step(spec: str, factor: float) -> None:
    """`1bit` took 1,449 steps, `topk` 190, `4bit` 67: of more than ten times the usual norm."""
    generator = torch.Generator().manual_seed(1)
    subject = ModelCompressor([TensorSpec(name="w", shape=(64, 64))], spec, LayerRule(), 1, 0)
    sent: list[float] = []
    for step in range(80):
        gradient = torch.randn(64, 64, generator=generator) * 1e-2
        payloads = subject.compress([gradient * (factor if step == 50 else 1.0)], 8, version=step)
        sent.append(float(np.linalg.norm(flat(payloads))))
    usual = max(sent[30:50])
    assert sent[50] > 0.5 * factor * np.median(sent[30:50])
    assert max(sent[51:]) < 10 * usual
    assert np.median(sent[51:]) > 0.1 * usual


@pytest.mark.parametrize("spec", ["4bit", "1bit", "topk:ratio=100", "dgc:momentum=0.9,warmup=0", "krngc"])
def test_what_is_sent_and_what_is_owed_are_all_that_was_computed(spec: str) -> None:
    subject = compressor(spec)
    list(steps(subject, AT))
    before = subject.ledger.residual.clone().double().numpy()
    velocity = subject.ledger.velocity
    momentum = 0.0 if velocity is None else 0.9 * velocity.clone().double().numpy()
    given = gradients(AT, 1e6)
    payloads = subject.compress(given, 8, version=AT)
    start, end = sum(SIZES[:SPIKED]), sum(SIZES[: SPIKED + 1])
    owed = torch.cat([each.reshape(-1) for each in given]).double().numpy() + before + momentum
    np.testing.assert_allclose(flat(payloads)[start:end], owed[start:end], rtol=1e-6)
    assert not subject.ledger.residual[start:end].any()
    if subject.ledger.velocity is not None:
        assert not subject.ledger.velocity[start:end].any(), "its momentum was sent with it"


@pytest.mark.parametrize("spec", ["4bit", "8bit", "1bit", "topk:ratio=100", "fp16", "randk"])
def test_other_tensors_and_usual_steps_keep_their_bits(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the spike all, and at it the other tensors, are as of a compressor that does not watch."""
    watched = [each.copy() for each in steps(compressor(spec), AT + 1)]

    def never(compressor: Compressor) -> bool:
        return False

    monkeypatch.setattr("gradwire.compressors.tensors.keeps_spikes", never)
    unwatched = [each.copy() for each in steps(compressor(spec), AT + 1)]
    for one, other in zip(watched[:AT], unwatched[:AT], strict=True):
        np.testing.assert_array_equal(one, other)
    start, end = sum(SIZES[:SPIKED]), sum(SIZES[: SPIKED + 1])
    np.testing.assert_array_equal(watched[AT][:start], unwatched[AT][:start])
    np.testing.assert_array_equal(watched[AT][end:], unwatched[AT][end:])
    assert (watched[AT][start:end] != unwatched[AT][start:end]).any()


@pytest.mark.parametrize("spec", ["4bit", "8bit", "1bit", "topk:ratio=100", "fp16", "qsgd", "dgc"])
def test_neither_parts_nor_the_order_of_gradients_have_a_say(spec: str) -> None:
    whole, apart, forward = compressor(spec, [4]), compressor(spec, [1, 1, 1, 1]), compressor(spec, [1, 3])
    for step in range(AT + 3):
        given = gradients(step, 1e6 if step == AT else 1.0)
        found = [flat(each.compress(given, 8, version=step)) for each in (whole, apart)]
        begun = forward.begin(PushTerms(samples=8, version=step))
        sent: dict[int, list[Payload]] = {}
        for place, gradient in enumerate(given):
            sent.update(begun.add(place, gradient))
        begun.finish()
        parts = [part for unit in reversed(forward.plan.units) for part in unit.parts]
        found.append(flat([payload for part in parts for payload in sent[part]]))
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
    np.testing.assert_array_equal(whole.ledger.usual, apart.ledger.usual)
    np.testing.assert_array_equal(whole.ledger.usual, forward.ledger.usual)


def test_a_spike_leaves_a_merged_unit() -> None:
    subject = compressor("topk:ratio=100", [4], merged=True)
    list(steps(subject, AT))
    payloads = subject.compress(gradients(AT, 1e6), 8, version=AT)
    whole = [each for each in payloads if isinstance(each, DensePayload)]
    assert [(each.elements, each.format) for each in whole if each.format is DenseFormat.FLOAT32] == [
        (SIZES[SPIKED], DenseFormat.FLOAT32)
    ]
    after = flat(subject.compress(gradients(AT + 1), 8, version=AT + 1))
    assert np.abs(after).max() < 1.0


def test_a_step_that_is_abandoned_or_undone_changes_nothing_of_what_is_usual() -> None:
    subject = compressor("4bit")
    list(steps(subject, AT))
    before = subject.ledger.usual.copy()
    begun = subject.begin(PushTerms(samples=8, version=AT))
    for place in reversed(range(len(SPECS))):
        begun.add(place, gradients(AT, 1e6)[place])
    assert [spike.name for spike in begun.spikes] == [SPECS[SPIKED].name]
    np.testing.assert_array_equal(subject.ledger.usual, before)
    undoable = begun.finish(undoable=True)
    assert (subject.ledger.usual != before).any()
    subject.ledger.forget(Compressed(before=undoable))
    np.testing.assert_array_equal(subject.ledger.usual, before)


def test_a_push_that_is_put_back_goes_out_whole_again() -> None:
    subject = compressor("1bit", [1, 1, 1, 1])
    list(steps(subject, AT))
    payloads = subject.compress(gradients(AT, 1e6), 8, version=AT)
    starts = [0, *np.cumsum(SIZES).tolist()]
    subject.ledger.put_back(Compressed(payloads, [*pairwise(starts)]))
    again = flat(subject.compress(gradients(AT + 1), 8, version=AT + 1))
    assert np.abs(again[starts[SPIKED] : starts[SPIKED + 1]]).max() > 1e3
    after = flat(subject.compress(gradients(AT + 2), 8, version=AT + 2))
    assert np.abs(after).max() < 1.0


def test_what_a_delay_holds_back_goes_out_whole_with_the_next_push() -> None:
    subject = compressor("1bit:delay=3")
    for step in range(45):
        payloads = subject.compress(gradients(step, 1e6 if step == 37 else 1.0), 8, version=step)
        largest = max((float(np.abs(decode(each)).max()) for each in payloads), default=0.0)
        assert (largest > 1e3) == (step == 38), step


def test_what_is_usual_is_saved_with_the_ledger() -> None:
    subject, other = compressor("1bit"), compressor("1bit")
    list(steps(subject, AT))
    other.ledger.restore(subject.ledger.image())
    for each in (subject, other):
        begun = each.begin(PushTerms(samples=8, version=AT))
        for place, gradient in enumerate(gradients(AT, 1e6)):
            begun.add(place, gradient)
        assert len(begun.spikes) == 1


def after(usual: Float64, *means: float) -> Float64:
    """Return what is usual for one tensor after gradients of these mean magnitudes."""
    for mean in means:
        usual = judge(usual, np.array([mean]), np.array([1.0]))[1]
    return usual


def usual_after(*means: float) -> Float64:
    return after(np.zeros((len(ROWS), 1)), *means)


def factor(usual: Float64, mean: float) -> float:
    return float(judge(usual, np.array([mean]), np.array([1.0]))[0][0])


def test_first_steps_are_no_spikes() -> None:
    """Layers that begin with zeros have gradients that grow from nothing."""
    growing = [1e-12 * 30.0**step for step in range(FIRST)]
    for count in range(FIRST):
        assert factor(usual_after(*growing[:count]), 1e9) == 0.0
    assert factor(usual_after(*[1.0] * FIRST), 2 * LIMIT) == pytest.approx(2 * LIMIT)


def test_a_change_that_stays_is_followed_and_one_spike_does_not_hide_the_next() -> None:
    usual = usual_after(*[1.0] * 50)
    assert factor(after(usual, 1e6), 1e6) > LIMIT
    assert after(usual, 1e6)[MEAN, 0] <= LARGEST
    steps = 0
    while factor(usual, 1e6) > LIMIT:
        usual, steps = after(usual, 1e6), steps + 1
    assert steps < 20


def test_rows_that_no_sample_touched_say_nothing() -> None:
    rows, all_of_them = torch.zeros(16, 32), torch.ones(16, 32)
    rows[3] = 1.0
    totals, nonzero = sampled_magnitudes([rows.reshape(-1), all_of_them.reshape(-1)])
    assert (totals / nonzero).tolist() == [1.0, 1.0]


def test_zeros_and_infinities_change_nothing_of_what_is_usual() -> None:
    usual = np.repeat(usual_after(*[1.0] * FIRST), 3, axis=1)
    factors, following = judge(usual, np.array([0.0, np.inf, np.nan]), np.array([0, 5, 5]))
    assert (factors <= 1.0).all()
    np.testing.assert_array_equal(following, usual)
    empty = np.zeros((len(ROWS), 1))
    np.testing.assert_array_equal(judge(empty, np.zeros(1), np.zeros(1))[1], empty)


@pytest.mark.parametrize("elements", [0, 1, 15, 16, 17, 2_304, 16_384, 16_385, 50_000])
def test_one_call_finds_the_magnitudes_of_each_tensor(elements: int) -> None:
    gradients = list(torch.randn(3, elements + 1, generator=torch.Generator().manual_seed(1)))
    gradients[1][::3] = 0.0
    tensors = [each[1:] for each in gradients]  # not at a multiple of a vector
    for tensor, total, nonzero in zip(tensors, *sampled_magnitudes(tensors), strict=True):
        expected = magnitudes(sample(tensor.numpy()))
        assert total == pytest.approx(expected.total, rel=1e-12)
        assert nonzero == expected.nonzero


def test_one_call_takes_no_memory_that_is_not_the_tensors() -> None:
    for wrong in (torch.zeros(4, 4), torch.zeros(4).double(), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match=r"gradient: expected contiguous torch\.float32"):
            sampled_magnitudes([wrong])


@pytest.mark.parametrize("elements", [1, 100, 16_384, 16_385, 500_000])
def test_a_sample_has_about_the_mean_of_the_whole(elements: int) -> None:
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    (total,), (nonzero,) = sampled_magnitudes([gradient])
    whole = magnitudes(gradient.numpy())
    assert total / nonzero == pytest.approx(whole.total / whole.nonzero, rel=0.2)
    assert nonzero <= max(16_384, elements / 128)


def test_an_infinity_beside_a_spike_is_still_refused() -> None:
    subject = compressor("topk:ratio=100")
    list(steps(subject, AT))
    given = gradients(AT, 1e6)
    given[SPIKED][5, 5] = float("nan")
    with pytest.raises(ValueError, match=r"'t2' has an infinity or a NaN"):
        subject.compress(given, 8, version=AT)


def test_a_warning_names_the_largest_and_counts_the_others() -> None:
    assert described([Spike("a", 200.0)]).startswith("gradient of 'a' is 200 times as large as usual; sent")
    said = described([Spike("a", 200.0), Spike("b", 1.234e6), Spike("c", 300.0)])
    assert said.startswith("gradient of 'b' is 1.23e+06 times as large as usual (and 2 more);")
