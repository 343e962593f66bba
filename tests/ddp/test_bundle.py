"""Tensors of a bundle: other tensors of the bundle do not affect their bits, and their states move along."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gradwire.compressors import (
    AbsentPayload,
    LayerRule,
    LinearPayload,
    NonFiniteGradient,
    Payload,
    ProjectedPayload,
    decode,
    dense_payload,
    parse_compressor,
)
from gradwire.compressors.payload import DenseFormat
from gradwire.compressors.registry import BUILT_IN
from gradwire.ddp.bundle import Bundle, Parameter, SavedState, TensorState, Terms, mean, plain_fields
from gradwire.ddp.exchange import Frame, RanksDisagree, checksum, to_bytes
from gradwire.proto.refusal import Refused

SHAPES = [(64, 64), (7,), (3, 11), (129, 2)]
PARAMETERS = [
    Parameter(name=f"tensor {place}", number=place, shape=shape) for place, shape in enumerate(SHAPES)
]
# krngc divides what is sent among all of the model: it always sees all of it.
BY_TENSOR = sorted({*BUILT_IN} - {"krngc", "lowrank"})


def terms(compressor: str) -> Terms:
    return Terms(compressor=parse_compressor(compressor), rule=LayerRule(), seed=1)


def bundle(compressor: str, places: Sequence[int], states: dict[str, TensorState] | None = None) -> Bundle:
    return Bundle(terms(compressor), [PARAMETERS[place] for place in places], states or {}, rank=1)


def gradients(places: Sequence[int], step: int) -> torch.Tensor:
    def of(place: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + place)
        return torch.randn(SHAPES[place], generator=generator).flatten()

    return torch.cat([of(place) for place in places])


def compressed(made: Bundle, places: Sequence[int], step: int) -> dict[int, list[float]]:
    """Return the decoded payloads of a step, by tensor."""
    payloads = made.compress(gradients(places, step), 1, step, float("inf"), ranks=2)
    made.finish()
    flat = np.concatenate([decode(payload) for payload in payloads])
    sizes = np.cumsum([int(np.prod(SHAPES[place])) for place in places])
    return {place: piece.tolist() for place, piece in zip(places, np.split(flat, sizes[:-1]), strict=True)}


@pytest.mark.parametrize("compressor", BY_TENSOR)
def test_tensors_are_compressed_alike_in_whichever_bundle(compressor: str) -> None:
    alone, together = [bundle(compressor, [place]) for place in range(4)], bundle(compressor, [3, 0, 2, 1])
    for step in range(3):
        expected = {
            place: values
            for each in range(4)
            for place, values in compressed(alone[each], [each], step).items()
        }
        assert compressed(together, [3, 0, 2, 1], step) == expected


@pytest.mark.parametrize("compressor", BY_TENSOR)
def test_what_is_owed_moves_to_other_bundles(compressor: str) -> None:
    stays = bundle(compressor, [0, 1, 2, 3])
    first = [bundle(compressor, [0, 1]), bundle(compressor, [2, 3])]
    expected = [compressed(stays, [0, 1, 2, 3], step) for step in range(3)]
    for step in range(2):
        assert compressed(first[0], [0, 1], step) | compressed(first[1], [2, 3], step) == expected[step]
    moved = first[0].tensor_states() | first[1].tensor_states()
    then = [bundle(compressor, [3, 1], moved), bundle(compressor, [0, 2], moved)]
    assert compressed(then[0], [3, 1], 2) | compressed(then[1], [0, 2], 2) == expected[2]


def test_what_is_not_used_is_absent_and_keeps_its_residual() -> None:
    made = bundle("topk:ratio=10", [0, 2])
    compressed(made, [0, 2], 0)
    before = made.tensor_states()["tensor 0"].residual
    given = gradients([0, 2], 1)
    given[: 64 * 64] = 0.0
    payloads = made.compress(given, 1, 1, 0.0, ranks=2)
    made.finish()
    assert isinstance(payloads[0], AbsentPayload)
    assert payloads[0].elements == 64 * 64
    after = made.tensor_states()["tensor 0"].residual
    assert before is not None
    assert after is not None
    assert before.any()
    assert torch.equal(before, after)


def test_a_tensor_with_anything_late_in_it_is_used() -> None:
    made = bundle("none", [0])
    given = torch.zeros(64 * 64)
    given[-1] = 1.0
    (payload,) = made.compress(given, 1, 0, 0.0, ranks=2)
    assert decode(payload)[-1] == 1.0


def test_a_step_that_is_abandoned_has_changed_nothing() -> None:
    made = bundle("dgc:ratio=10", [0, 1])
    compressed(made, [0, 1], 0)
    before = made.tensor_states()
    made.compress(gradients([0, 1], 1), 1, 1, 0.0, ranks=2)
    made.abandon()
    with pytest.raises(NonFiniteGradient, match="'tensor 1'"):
        made.compress(torch.cat([gradients([0], 1), torch.full((7,), torch.nan)]), 1, 1, 0.0, ranks=2)
    made.abandon()
    for name, after in made.tensor_states().items():
        for one, other in ((before[name].residual, after.residual), (before[name].velocity, after.velocity)):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_a_saved_state_goes_on_as_plain_values() -> None:
    made = bundle("4bit", [0, 2])
    compressed(made, [0, 2], 0)
    states = made.tensor_states()
    saved = {
        n: TensorState(residual=each.residual, state=SavedState(plain_fields(each.state)))
        for n, each in states.items()
    }
    again = bundle("4bit", [2, 0], saved)
    expected = compressed(made, [0, 2], 1)
    assert compressed(again, [2, 0], 1) == expected


def test_what_does_not_fit_a_tensor_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"residual of 'tensor 1': expected shape \(7,\), got shape \(8,\)"):
        bundle("4bit", [0, 1], {"tensor 1": TensorState(residual=torch.zeros(8))})


def test_a_state_that_needs_pickle_is_not_saved() -> None:
    with pytest.raises(TypeError, match="expected a dataclass of numbers, texts and tensors"):
        plain_fields(object())


def float32(values: list[float]) -> Payload:
    return dense_payload(DenseFormat.FLOAT32, np.array(values, np.float32))


def test_ranks_may_send_other_payloads_of_the_same_elements() -> None:
    out = np.full(5, 9.0, np.float32)
    mean([[float32([2, 4, 6, 8, 10])], [float32([2, 2]), AbsentPayload(elements=3)]], out)
    assert out.tolist() == [2, 3, 3, 4, 5]


def test_cuts_within_buckets_of_linear_codes_find_an_end() -> None:
    def linear(elements: int) -> Payload:
        scale = np.ones(-(-elements // 32), np.float32).view(np.uint8)
        codes = np.full(-(-elements // 4) * 4, 1, np.uint8)
        codes[elements:] = 0
        return LinearPayload(elements=elements, bits=8, bucket=32, data=np.concatenate([scale, codes]))

    out = np.empty(100, np.float32)
    mean([[linear(100)], [linear(7), AbsentPayload(elements=50), linear(43)]], out)
    assert out.tolist() == [1.0] * 7 + [0.5] * 50 + [1.0] * 43


def test_the_mean_is_added_in_rank_order() -> None:
    out = np.empty(1, np.float32)
    one, large = float32([1.0]), float32([1e8])
    minus = float32([-1e8])
    mean([[large], [minus], [one], [one]], out)
    assert out[0] == 0.5
    mean([[one], [large], [minus], [one]], out)
    assert out[0] == 0.25


MATRICES = [
    Parameter(name=f"matrix {number}", number=number, shape=shape)
    for number, shape in enumerate([(64, 64), (32, 96), (7,), (40, 50), (64, 64), (64, 64)])
]


def means_in_bases(groups: Sequence[Sequence[Parameter]], ranks: int) -> list[float]:
    """Return the means of two steps, of frames that have travelled; rank 1 does not use matrix 4."""
    found: list[float] = []
    made = [[Bundle(terms("lowrank"), group, {}, rank) for rank in range(ranks)] for group in groups]
    for step in range(2):
        for group, each in zip(groups, made, strict=True):
            pushes: list[Sequence[Payload]] = []
            for rank, of_rank in enumerate(each):
                given = np.concatenate(
                    [
                        np.random.default_rng((step, rank, parameter.number))
                        .standard_normal(parameter.shape)
                        .ravel()
                        * ((rank, parameter.number) != (1, 4))
                        for parameter in group
                    ]
                )
                payloads = of_rank.compress(torch.from_numpy(given).float(), 1, step, 0.0, ranks)
                pushes.append(each[0].reader.parse(to_bytes(Frame(payloads), 7), 7, rank=rank).payloads)
            out = np.empty(each[0].elements, np.float32)
            for of_rank in each:
                of_rank.mean(pushes, out)
                of_rank.finish()
            found += out.tolist()
    return found


@pytest.mark.parametrize("ranks", [1, 3, 5, 16])
def test_neighbours_have_no_say_in_means_in_bases(ranks: int) -> None:
    size = sum(int(np.prod(each.shape)) for each in MATRICES)
    together, alone = means_in_bases([MATRICES], ranks), means_in_bases([[each] for each in MATRICES], ranks)
    assert len(together) == 2 * size
    assert together == alone


def test_ranks_may_send_coordinates_in_other_buckets() -> None:
    made = Bundle(terms("lowrank"), MATRICES[-2:], {}, 0)
    given = torch.randn(made.elements, generator=torch.Generator().manual_seed(1))
    own, zeros = made.compress(given, 1, 0, 0.0, ranks=2), list[Payload]()
    for each in own:
        assert isinstance(each, ProjectedPayload)
        values = LinearPayload(elements=each.count, bits=8, bucket=1 << 20, data=np.empty(0, np.uint8))
        data = np.zeros(4 + each.count, np.uint8)
        zeros.append(ProjectedPayload(elements=each.elements, values=values, data=data))
    same, half = (np.empty(made.elements, np.float32) for _ in range(2))
    made.mean([own, own], same)
    made.mean([own, zeros], half)
    np.testing.assert_allclose(half, same / 2, atol=1e-6)


def test_a_damaged_frame_names_the_tensor_behind_a_header_that_is_known() -> None:
    made = Bundle(terms("lowrank"), MATRICES, {}, 0)
    given = torch.randn(made.elements, generator=torch.Generator().manual_seed(1))
    data = to_bytes(Frame(made.compress(given, 1, 0, 0.0, ranks=3)), 7)
    made.reader.parse(data, 7, rank=1)
    data[-1] = 0x88  # two codes that no rank sends
    with pytest.raises(
        Refused, match=r"worker 'rank 2', tensor 'matrix 5' data: expected codes that have an"
    ):
        made.reader.parse(data, 7, rank=2)


@pytest.mark.parametrize("compressor", [*BY_TENSOR, "krngc"])
def test_a_frame_says_what_its_payloads_are(compressor: str) -> None:
    made = bundle(compressor, [0, 1, 2, 3])
    payloads = made.compress(gradients([0, 1, 2, 3], 0), 1, 0, float("inf"), ranks=2)
    data = to_bytes(Frame(payloads), 7)
    again = made.reader.parse(data, 7, rank=1)
    for one, other in zip(payloads, again.payloads, strict=True):
        assert np.array_equal(decode(one), decode(other))
    damaged = data[:-1]
    with pytest.raises(Refused, match=r"worker 'rank 1', payloads: expected .* bytes, got"):
        made.reader.parse(damaged, 7, rank=1)


def test_a_packed_frame_holds_the_same_payloads() -> None:
    made = bundle("4bit", [0, 1])
    payloads = made.compress(gradients([0, 1], 0) * torch.arange(64 * 64 + 7) ** 2, 1, 0, 0.0, ranks=2)
    data, packed = to_bytes(Frame(payloads), 7), to_bytes(Frame(payloads), 7, packs=True)
    assert packed.size < data.size
    found = made.reader.parse(packed, 7, rank=1)
    for one, other in zip(payloads, found.payloads, strict=True):
        assert np.array_equal(decode(one), decode(other))
    with pytest.raises(Refused, match=r"worker 'rank 1', payloads packed data: expected"):
        made.reader.parse(packed[:-1], 7, rank=1)


def test_ranks_with_other_bases_disagree() -> None:
    made = bundle("4bit", [0, 1])
    one, other = (
        checksum(terms("4bit"), made.reader.manifest, 4, [np.full(3, value, np.float32)]) for value in (1, 2)
    )
    assert one != other


def test_a_frame_of_other_terms_is_refused_with_the_rank() -> None:
    made = bundle("4bit", [0, 1])
    agreed = checksum(terms("4bit"), made.reader.manifest, 4)
    others = {
        checksum(terms("2bit"), made.reader.manifest, 4),
        checksum(terms("4bit"), made.reader.manifest, 5),
        checksum(terms("4bit"), bundle("4bit", [1, 0]).reader.manifest, 4),
    }
    assert agreed not in others
    for other in others:
        with pytest.raises(RanksDisagree, match="rank 3: expected the same compressor, seed"):
            made.reader.parse(to_bytes(Frame(()), other), agreed, rank=3)


def test_a_frame_names_a_tensor_that_is_not_finite() -> None:
    made = bundle("4bit", [0, 1])
    found = made.reader.parse(to_bytes(Frame((), 1), 7), 7, rank=0)
    assert found.not_finite == 1
