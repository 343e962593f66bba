"""The header of an update is checked before memory is taken: state beside the values, and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.common.parts import Part
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Refused
from gradwire.proto.updates import SharedSizes, update_assembly

MANIFEST = Manifest(
    (m.Tensor(name="w", shape=(6, 4), dtype="float32"), m.Tensor(name="b", shape=(4,), dtype="float32")), 8
)
SHARED = SharedSizes(coordinates={0: 5}, bases={0: 7}, memory={"exp_avg", "step"})
FLOAT = m.DenseHeader(format=m.DenseEncoding.FLOAT32)
COORDINATES = m.PayloadHeader(elements=24, kind=m.ProjectedHeader(count=5, values=FLOAT))
BASES = m.Beside(tensor=0, name="bases", payload=m.PayloadHeader(elements=7, kind=FLOAT))
MEMORY = m.Beside(tensor=0, name="exp_avg", start=4, end=24, payload=m.PayloadHeader(elements=20, kind=FLOAT))
STEPS = replace(MEMORY, name="step", payload=m.PayloadHeader(elements=1, kind=FLOAT))
MEAN = m.Beside(tensor=0, payload=COORDINATES)
OTHER = m.PayloadHeader(elements=4, kind=FLOAT, content=m.Content.VALUES)


def update(
    *beside: m.Beside, rates: tuple[float, ...] = (0.1,), first: m.PayloadHeader = COORDINATES
) -> m.Update:
    payloads = (replace(first, content=m.Content.GRADIENT), OTHER)
    return m.Update(version=3, part=0, plan=1, payloads=payloads, beside=beside, learning_rates=rates)


def taken(given: m.Update) -> int:
    """Bytes of memory that are taken for an update."""
    return update_assembly(given, Part(0, 28), MANIFEST, SHARED, worker="w").data.size


def test_all_that_a_job_has_beside_its_values_is_received() -> None:
    assert taken(update()) == 4 * (5 + 4)
    assert taken(update(BASES, MEMORY, STEPS)) == 4 * (5 + 4 + 7 + 20 + 1)
    assert taken(update(MEAN, first=replace(COORDINATES, kind=FLOAT))) == 4 * (24 + 4 + 5)


LONG = m.PayloadHeader(elements=1 << 40, kind=FLOAT)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (update(replace(BASES, tensor=1)), "tensor 1 of an update: expected one with bases"),
        (update(replace(BASES, tensor=9)), "tensor 9 of an update: expected one with bases"),
        (update(replace(BASES, payload=LONG)), "state 'bases' of tensor 'w': expected 7 float32 numbers"),
        (update(replace(BASES, payload=COORDINATES)), "expected 7 float32 numbers"),
        (update(BASES, BASES), "expected each state once"),
        (update(replace(MEMORY, end=25)), "of elements up to 24, got 'exp_avg' of 4 to 25"),
        (update(replace(MEMORY, start=30)), "of elements up to 24"),
        (update(replace(MEMORY, payload=LONG)), "expected 20 float32 numbers"),
        (update(replace(STEPS, payload=LONG)), "expected 1 float32 numbers"),
        (update(replace(MEMORY, name="exp_avg_sq")), r"expected one of \['bases', 'exp_avg', 'step'\]"),
        (update(replace(MEAN, payload=LONG)), "part from tensor 'w'"),
        (update(rates=()), "tensor 'w': expected 1 or 1 finite learning rates"),
        (update(rates=(0.1, 0.2)), "tensor 'w': expected 1 or 1 finite learning rates, got 2"),
        (update(rates=(float("inf"),)), "finite learning rates"),
        (replace(update(), clip=float("nan")), "finite learning rates"),
        (
            replace(update(), payloads=(update().payloads[0], replace(OTHER, content=m.Content.GRADIENT))),
            "tensor 'b': expected a gradient of a whole tensor with bases",
        ),
        (
            replace(update(), payloads=(replace(COORDINATES, content=m.Content.DELTA), OTHER)),
            "tensor 'w': expected coordinates of a gradient, got coordinates of DELTA",
        ),
    ],
)
def test_what_a_job_does_not_have_is_refused(given: m.Update, why: str) -> None:
    with pytest.raises(Refused, match=why):
        taken(given)
