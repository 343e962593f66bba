"""One node's part in an exchange: the packets that it sends, and what those that it gets add up to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .fixed_point import Words
from .plan import ExchangePlan


class Exchange:
    """Packets can be encoded in any order and taken in any order, each once; the result is the same."""

    def __init__(self, plan: ExchangePlan, node: int, blocks: Mapping[int, Words], elements: int) -> None:
        """blocks: the gradient of each block that this node has computed, in fixed point, shape (elements,).
        Those that the plan has come from another node are not used."""
        self._plan = plan
        self._node = node
        self._blocks = {block: words for block, words in blocks.items() if node in plan.holders[block]}
        self._width = packet_elements(elements, plan.slices)
        self.missing = set(plan.sent_to(node))  # indices of the packets that have not come
        self._sum = np.zeros(elements, np.int64)
        for words in self._blocks.values():
            self._sum += words.view(np.int32)

    @property
    def complete(self) -> bool:
        return not self.missing

    def encoded(self, index: int) -> Words:
        """The packet of that index, which this node sends: shape (packet_elements,)."""
        packet = self._plan.packets[index]
        assert packet.sender == self._node
        data = np.zeros(self._width, np.uint32)
        for block, part in packet.terms:
            piece = self._blocks[block][self._slice(part)]
            data[: piece.size] += piece
        return data

    def take(self, index: int, data: Words) -> None:
        """Take in a packet for this node. One that has come before is passed over.

        data: shape (packet_elements,). Raises ValueError for another shape or a packet for others.
        """
        packet = self._plan.packets[index]
        if self._node not in packet.targets or data.shape != (self._width,):
            got = f"packet {index} of shape {data.shape}"
            raise ValueError(f"expected a packet for node {self._node} of {self._width} elements, got {got}")
        if index not in self.missing:
            return
        rest = data.copy()
        lacking: tuple[int, int] | None = None
        for block, part in packet.terms:
            if block in self._blocks:
                piece = self._blocks[block][self._slice(part)]
                rest[: piece.size] -= piece
            else:
                assert lacking is None  # that is what a plan sees to
                lacking = block, part
        assert lacking is not None
        into = self._sum[self._slice(lacking[1])]
        into += rest[: into.size].view(np.int32)
        self.missing.discard(index)

    def sums(self) -> npt.NDArray[np.int64]:
        """The exact sum of all blocks' gradients, in steps of fixed point: shape (elements,)."""
        assert self.complete
        return self._sum

    def _slice(self, part: int) -> slice:
        return slice(part * self._width, (part + 1) * self._width)


def packet_elements(elements: int, slices: int) -> int:
    """Of a packet: as many as the largest slice has; a shorter one is padded with zeros."""
    return -(-elements // slices)
