"""An optimizer's state travels in torch's form, and an impossible state is refused."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.moments import Moments, MomentValues, encode_moments
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.wire import decode_envelope

MANIFEST = Manifest(
    (
        m.Tensor(name="a", shape=(2, 3), dtype="float32", group=0),
        m.Tensor(name="b", shape=(4,), dtype="float32", group=1),
    ),
    10,
    (m.Group(optimizer="adam"), m.Group(optimizer="sgd:momentum=0.9")),
)
A, B = np.arange(6, dtype=np.float32), np.arange(4, dtype=np.float32)
COUNT = np.array([7], np.float32)
GOOD: Moments = {0: {"step": COUNT, "exp_avg": -A, "exp_avg_sq": A}, 1: {"momentum_buffer": -B}}


def there_and_back(moments: Moments) -> Moments:
    listed, chunks = encode_moments(moments)
    values = MomentValues(listed, MANIFEST, worker="w")
    for chunk in chunks:
        message = decode_envelope(chunk, "OptimizerMessage")
        assert isinstance(message, m.Chunk)
        values.add(message)
    return values.finish()


@pytest.mark.parametrize("moments", [GOOD, {1: GOOD[1]}, {}])
def test_moments_arrive_as_they_were(moments: Moments) -> None:
    found = there_and_back(moments)
    assert found.keys() == moments.keys()
    for tensor, of_tensor in moments.items():
        assert found[tensor].keys() == of_tensor.keys()
        for name, values in of_tensor.items():
            assert found[tensor][name].tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("moments", "reason", "words"),
    [
        ({2: GOOD[1]}, Reason.TENSOR, "expected parameters below 2, the number of parameters, got 2"),
        ({1: GOOD[0]}, Reason.TENSOR, "expected momentum_buffer of 'b', which sgd steps, got step"),
        ({0: {"exp_avg": A}}, Reason.TENSOR, "expected exp_avg, exp_avg_sq, step of 'a', which adam steps"),
        ({0: {**GOOD[0], "step": -COUNT}}, Reason.TENSOR, "step of 'a': expected values of 0 or more"),
        (
            {0: {**GOOD[0], "exp_avg_sq": -A}},
            Reason.TENSOR,
            "exp_avg_sq of 'a': expected values of 0 or more",
        ),
        ({1: {"momentum_buffer": B + np.inf}}, Reason.NON_FINITE, "of 'b': expected finite values"),
    ],
)
def test_what_the_optimizer_cannot_have_remembered_is_refused(
    moments: Moments, reason: Reason, words: str
) -> None:
    with pytest.raises(Refused, match=words) as caught:
        there_and_back(moments)
    assert caught.value.refusal.reason is reason
    assert caught.value.refusal.worker == "w"


def test_a_job_without_groups_has_no_moments_to_take() -> None:
    listed, _ = encode_moments({0: GOOD[0]})
    with pytest.raises(Refused, match="a job of scripts, whose parameter groups name an optimizer"):
        MomentValues(listed, Manifest(MANIFEST.tensors, 10), worker="w")


def test_a_moment_that_is_listed_twice_is_refused() -> None:
    listed, _ = encode_moments(GOOD)
    with pytest.raises(Refused, match=r"got step, exp_avg, exp_avg_sq, exp_avg"):
        MomentValues((*listed, listed[1]), MANIFEST, worker="w")
