"""One node's side of a coded exchange: encode the packets that it sends, and sum the gradients in those it
receives.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .fixed_point import Words
from .plan import ExchangePlan


class Exchange:
    """One node's state in one exchange: the sum of all blocks' gradients as far as packets have arrived.

    A worker of coded mode makes one per step. Packets can be encoded and taken in any order; the sum is the
    same to the bit.

    Attributes:
        missing: indices of the packets that this node has not received yet.
    """

    def __init__(self, plan: ExchangePlan, node: int, blocks: Mapping[int, Words], elements: int) -> None:
        """Args:
        plan: the exchange that all nodes follow.
        node: number of this node, from 0.
        blocks: gradient in fixed point of each block that this node has computed, shape (elements,), by
            block. Blocks that the plan has this node receive from another node are ignored.
        elements: number of elements of a gradient.
        """
        self._plan = plan
        self._node = node
        self._blocks = {block: words for block, words in blocks.items() if node in plan.holders[block]}
        self._width = packet_elements(elements, plan.slices)
        self.missing = set(plan.sent_to(node))
        self._sum = np.zeros(elements, np.int64)
        for words in self._blocks.values():
            self._sum += words.view(np.int32)

    @property
    def complete(self) -> bool:
        """True once every packet for this node has arrived, and `sums` may be read."""
        return not self.missing

    def encoded(self, index: int) -> Words:
        """Return the data of a packet that this node sends: a sum of slices, shape (packet_elements,)."""
        packet = self._plan.packets[index]
        assert packet.sender == self._node
        data = np.zeros(self._width, np.uint32)
        for block, part in packet.terms:
            piece = self._blocks[block][self._slice(part)]
            data[: piece.size] += piece
        return data

    def take(self, index: int, data: Words) -> None:
        """Decode a received packet: add the one slice that this node lacks to the sum.

        Ignore a repeated packet.

        Args:
            data: the packet's elements, shape (packet_elements,). Not changed.

        Raises:
            ValueError: if `data` has another shape, or the packet is not for this node.
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
                assert lacking is None  # in a plan, each target holds all blocks of a packet but one
                lacking = block, part
        assert lacking is not None
        into = self._sum[self._slice(lacking[1])]
        into += rest[: into.size].view(np.int32)
        self.missing.discard(index)

    def sums(self) -> npt.NDArray[np.int64]:
        """Return the exact sum of all blocks' gradients as fixed-point integers, shape (elements,).

        Call it only when the exchange is complete.
        """
        assert self.complete
        return self._sum

    def _slice(self, part: int) -> slice:
        return slice(part * self._width, (part + 1) * self._width)


def packet_elements(elements: int, slices: int) -> int:
    """Return the number of elements in a packet: those of the largest slice.

    Shorter slices are padded with zeros.

    Args:
        slices: number of slices that each block's gradient is cut into.
    """
    return -(-elements // slices)
