"""Shares: which rank owns which elements of a bundle in a two-stage exchange, and when that pays.

A tensor is cut into a piece for each rank, or fewer if it is small, at multiples of `ALIGNMENT`. The owner of
a piece follows from the tensor's number and size and from the number of ranks. It does not follow from the
bundle, so the owners' residuals stay where they are when DDP rearranges its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

import numpy as np

from ..common.parts import ALIGNMENT, Part
from ..common.spec import Spec, parse_spec
from ..compressors import CompressorSpec, Payload, TensorSpec, Wrapping, join, parse_compressor
from ..compressors.payload import Float32
from ..compressors.sizes import PACKING_BYTES_PER_S, PACKING_SHARE, exchange_of
from ..compressors.wrapping import WRAPPING_KEYS
from .bundle import Parameter, Terms, cut_payloads, manifest_of, mean
from .exchange import Reader

Exchange = Literal["auto", "gather", "owners"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
SPREAD = 2654435769  # 2**32 / golden ratio: of any few consecutive tensors, each rank owns about as many
DIRECT = 1 << 15  # elements from which a piece is worth a call of its own

Entropy = Literal["auto", "on", "off"]
ENTROPY: tuple[Entropy, ...] = get_args(Entropy)


class Shares:
    """The pieces of a bundle's tensors, by owner.

    A rank's share is its pieces end to end, in the order of the bundle.

    Attributes:
        owned: for each rank, its pieces, described as tensors. A piece has its tensor's name and number.
        readers: for each rank, the reader of frames of its share.
    """

    def __init__(self, parameters: Sequence[Parameter], ranks: int) -> None:
        self.owned: list[list[Parameter]] = [[] for _ in range(ranks)]
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self._borders, self._owners = [0], list[int]()
        at = 0
        for parameter in parameters:
            for owner, start, end in pieces(parameter, ranks):
                shape = (1, end - start) if len(parameter.shape) > 1 else (end - start,)
                self.owned[owner].append(replace(parameter, shape=shape))
                self._ranges[owner].append((at + start, at + end))
                if self._owners and self._owners[-1] == owner:
                    self._borders[-1] = at + end
                else:
                    self._owners.append(owner)
                    self._borders.append(at + end)
            at += TensorSpec(name=parameter.name, shape=parameter.shape).elements
        manifests = [manifest_of(each) for each in self.owned]
        self.readers = [Reader(Part(0, manifest.elements), manifest) for manifest in manifests]

    def cut(self, payloads: Sequence[Payload]) -> list[list[Payload]]:
        """Return the payloads of each rank's share, given those of the bundle."""
        shares: list[list[Payload]] = [[] for _ in self.owned]
        for owner, cuts in zip(self._owners, cut_payloads(payloads, self._borders), strict=True):
            shares[owner] += cuts
        return [join(each) for each in shares]

    def decode(self, shares: Sequence[Sequence[Payload]], out: Float32) -> None:
        """Write the values of the bundle to `out`, given the payloads of each rank's share."""
        for ranges, payloads in zip(self._ranges, shares, strict=True):
            borders = [0, *accumulate(end - start for start, end in ranges)]
            if borders[-1] >= DIRECT * len(ranges):
                for (start, end), cuts in zip(ranges, cut_payloads(payloads, borders), strict=True):
                    mean([cuts], out[start:end])
                continue
            values = np.empty(borders[-1], np.float32)
            mean([payloads], values)
            for (start, end), (first, last) in zip(ranges, pairwise(borders), strict=True):
                out[start:end] = values[first:last]


def pieces(parameter: Parameter, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield owner, first element and end of each piece of a tensor."""
    elements = TensorSpec(name=parameter.name, shape=parameter.shape).elements
    blocks, count = -(-elements // ALIGNMENT), max(1, min(ranks, elements // ALIGNMENT))
    first = (parameter.number * SPREAD % (1 << 32)) * ranks >> 32
    borders = [min(elements, blocks * index // count * ALIGNMENT) for index in range(count + 1)]
    for index, (start, end) in enumerate(pairwise(borders)):
        if start < end:
            yield (first + index) % ranks, start, end


def for_owners(compressor: CompressorSpec) -> CompressorSpec:
    """Return the compressor of owners: with the feedback of the ranks' compressor, and without its momentum
    and its clipping, which the gradients have behind them."""
    wrapping = compressor.wrapping
    if wrapping is None:
        return compressor
    parsed = parse_spec("compressor", compressor.text)
    kept = Wrapping(feedback=wrapping.feedback, decay=wrapping.decay)
    own = {key: value for key, value in parsed.options.items() if key not in WRAPPING_KEYS}
    around = {key: _text(getattr(kept, key)) for key in WRAPPING_KEYS if kept.feedback or key == "feedback"}
    options = own | around
    return parse_compressor(str(Spec(kind="compressor", name=parsed.name, options=options)))


def _text(value: bool | float) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else repr(value)


def decide(terms: Terms, specs: Sequence[TensorSpec], ranks: int) -> tuple[bool, str]:
    """Return True if means go through owners by counted bytes, and the reason, for the log."""
    if reason := terms.compressor.not_for_means:
        return False, f"{terms.compressor}: {reason}"
    sent = sum(_bytes(terms.rule.choose(spec, terms.compressor), spec) for spec in specs)
    owners, gathered, owned = exchange_of(sent, ranks, len(specs))
    return owners, f"{gathered / 1e6:.3f} MB per rank and step by a gather, {owned / 1e6:.3f} MB by owners"


def decide_packing(terms: Terms, link_rate: float) -> tuple[bool, str]:
    """Return True if frames are packed, and the reason, for the log.

    link_rate: bytes per second of the link, the same on all ranks.
    """
    if terms.entropy != "auto":
        return terms.entropy == "on", "it was asked for"
    if terms.compressor.entry.dense:
        return False, f"the values of {terms.compressor} hardly shrink"
    return link_rate < PACKING_BYTES_PER_S * PACKING_SHARE, f"the link carries {8e-6 * link_rate:.0f} Mbit/s"


def _bytes(compressor: CompressorSpec, spec: TensorSpec) -> float:
    coding = compressor.entry.sends(compressor.options)
    assert not isinstance(coding, str)
    return replace(coding, dense=True).sent_bytes(spec.shape)
