"""Table 1 of the paper on accuracy-aware sparse fusion: seconds of an iteration, five methods, four models.

The paper: four nodes with a GPU each, Horovod over Ethernet at 10 Gbit/s, CIFAR-10, batches of 128, 64 for
ResNet-20; mean of 1000 iterations. It gives neither the size of MGS's messages nor the share of communication
in an iteration.

All four sparse methods choose equally many elements. Their densities, from 0.001 to 0.02, rise with the norms
of the initial weights. Rand-K over the whole model after backward is here one unit of all tensors, which is
complete when backward is. MGS closes a message once it has about an eighth of the bytes that a step sends.
The server makes plans by measurement after the first steps and after 50. Where steps are short, the
measurement begins after the second plan.

Deviations: `randk` draws one element in each of k equal ranges where the paper draws any k, and keeps the
rest as a residual, of which the paper says nothing. Biases and normalizations, tensors of one dimension, are
sent whole, so that they have no density by their norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...planning.models import tensors
from ...server.plans.planner import FULL
from ..shaped import WARM_UP, Setup
from .emulated import Method, MethodRow, computation, exchange_seconds, measure, speedups

TABLE_1: Mapping[str, Mapping[str, float]] = {
    "vgg16-cifar": {"P-SGD": 0.525, "Rand K": 0.301, "LAGS": 0.402, "MGS": 0.375, "SEAMGS": 0.276},
    "resnet20": {"P-SGD": 0.084, "Rand K": 0.070, "LAGS": 0.075, "MGS": 0.069, "SEAMGS": 0.060},
    "resnet56": {"P-SGD": 0.199, "Rand K": 0.158, "LAGS": 0.179, "MGS": 0.173, "SEAMGS": 0.131},
    "resnet110": {"P-SGD": 0.344, "Rand K": 0.264, "LAGS": 0.299, "MGS": 0.268, "SEAMGS": 0.210},
}
SHARES = [0.5]
SPARSE = "randk:density=norm"
RATIO = 95  # elements for each that is sent, about, at the middle of the densities
VALUE_BYTES = 2
MESSAGES = 8  # number of messages in a step of MGS
WHOLE = 1 << 40  # bytes of a message that no model exceeds
SHORT_S = 1.0  # a step of fewer seconds is short


def methods(model: str, elements: int) -> list[Method]:
    """Return the methods, with the paper's speed-ups if the paper has the model.

    Args:
        model: name of the model.
        elements: number of its elements, for the size of MGS's messages.
    """
    paper = speedups(TABLE_1[model]) if model in TABLE_1 else {}
    message = max(1, elements // RATIO * VALUE_BYTES // MESSAGES)

    def method(name: str, compressor: str, fusion: str) -> Method:
        theirs = (paper[name],) if paper else ()
        return Method(name=name, paper=theirs, compressor=compressor, overlap="backward", fusion=fusion)

    return [
        method("P-SGD", "none", "none"),
        method("Rand K", SPARSE, f"mgs={WHOLE}"),
        method("LAGS", SPARSE, "none"),
        method("MGS", SPARSE, f"mgs={message}"),
        method("SEAMGS", SPARSE, "seamgs"),
    ]


def part_bytes(sizes: Sequence[int]) -> int:
    """Return the size of a part that cuts no tensor: the bytes of the largest tensor as float32.

    The first parts then also measure the link.

    Args:
        sizes: number of elements of each tensor.
    """
    return 4 * max(sizes)


def measured(setup: Setup, shares: Sequence[float]) -> Iterator[tuple[list[MethodRow], list[Method]]]:
    """Measure all methods on one model, and yield rows and methods for each share.

    Args:
        setup: model, links and number of steps.
        shares: communication as a fraction of the uncompressed step, 0 to 1.
    """
    sizes = [tensor.elements for tensor in tensors(setup.model)]
    found = methods(setup.model, sum(sizes))
    setup = replace(setup, part_bytes=part_bytes(sizes))
    exchange = exchange_seconds(setup, found[0])
    for share in shares:
        step_seconds = exchange + computation(exchange, share)
        warm_up = WARM_UP + FULL if step_seconds < SHORT_S else WARM_UP
        fitted = replace(setup, warm_up=warm_up, seconds=computation(exchange, share))
        yield measure(fitted, share, found), found
