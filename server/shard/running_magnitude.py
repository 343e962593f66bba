"""Encodes updates as `4bit` with levels that follow from previous versions, which lets each piece of a tensor
be coded by itself.

A version's own contribution to the running magnitudes is measured piece by piece, in fixed blocks, and counts
from the next version on. Neither the division into pieces nor their order therefore affects the bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...compressors import CodeFormat, Payload, QuantizedPayload
from ...compressors.four_bit import RUNNING_SHARE, RunningMagnitude, levels_of
from ...compressors.kernels import Magnitudes, cpu
from ...compressors.kernels.checks import in_order
from ...compressors.payload import code_words

Float32 = npt.NDArray[np.float32]
NO_RESIDUAL = np.empty(0, np.float32)  # the errors are in the difference of the next version
_Sums = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]


class RunningCoder:
    """Encodes the tensors of a model as `4bit` codes, with a running magnitude for each tensor. The downlink
    owns it; only one thread may use it."""

    def __init__(self, tensors: int) -> None:
        self._states = [RunningMagnitude()] * tensors
        self._version = 0
        # Magnitudes found at this version: of whole tensors; and of pieces, by tensor and first element.
        self._whole: dict[int, Magnitudes] = {}
        self._found: dict[int, dict[int, _Sums]] = {}

    def image(self) -> dict[str, Any]:
        """Return the complete state, as plain values and arrays that are never written to again."""
        found = {tensor: dict(pieces) for tensor, pieces in self._found.items()}
        states, whole = list(self._states), dict(self._whole)
        return {"states": states, "version": self._version, "whole": whole, "found": found}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the state by one that `image` returned."""
        self._states, self._version = list(image["states"]), image["version"]
        self._whole, self._found = dict(image["whole"]), dict(image["found"])

    def knows(self, tensor: int, version: int) -> bool:
        """Return True when a running magnitude of the tensor exists at this version. Without one, the tensor
        has to be coded whole, not in pieces."""
        self._begin(version)
        return self._states[tensor].elements > 0

    def code(self, tensor: int, begin: int, values: Float32, version: int) -> Payload:
        """Return the `4bit` payload of a piece of one tensor, and record the magnitudes of its values.

        Args:
            tensor: index of the tensor in the manifest.
            begin: first element of the piece within the tensor; a multiple of the block size of the sums.
            values: elements to encode: float32, one axis.
        """
        self._begin(version)
        sums = cpu.block_magnitudes(values)
        self._found.setdefault(tensor, {})[begin] = sums
        state = self._states[tensor]
        if not state.elements:
            state = state.updated(_magnitudes([sums]))
        levels = levels_of([state.mean])[0]
        format = CodeFormat.SIGNED_4BIT
        data = np.empty(format.code_bytes(values.size), np.uint8)
        cpu.quantize(format, values, None, levels, data, share=RUNNING_SHARE)
        return QuantizedPayload(format=format, elements=values.size, levels=levels, data=data)

    def code_together(self, first: int, tensors: Sequence[Float32], version: int) -> Payload:
        """Return one `4bit` payload of consecutive whole tensors, and record their magnitudes. first: index
        of the first tensor in the manifest."""
        self._begin(version)
        states = self._states[first : first + len(tensors)]
        for index, (state, values) in enumerate(zip(states, tensors, strict=True)):
            if not state.elements:
                states[index] = state.updated(cpu.magnitudes(values))
        levels = levels_of([state.mean for state in states]).reshape(-1)
        sizes = np.array([values.size for values in tensors], np.int64)
        elements = int(sizes.sum())
        format = CodeFormat.SIGNED_4BIT
        data = np.empty(4 * int(code_words(format.bits, sizes).sum()), np.uint8)
        arguments = tensors, NO_RESIDUAL, NO_RESIDUAL, levels, data
        totals, nonzero = cpu.quantize_blocks(format, *arguments, share=RUNNING_SHARE)
        found = map(Magnitudes, totals.tolist(), nonzero.tolist())
        self._whole.update(zip(range(first, first + len(tensors)), found, strict=True))
        return QuantizedPayload(format=format, elements=elements, levels=levels, sizes=sizes, data=data)

    def _begin(self, version: int) -> None:
        """At the first call with a new version, add the magnitudes that were found at the previous version to
        the running ones."""
        if version == self._version:
            return
        self._version = version
        for tensor, pieces in self._found.items():
            self._whole[tensor] = _magnitudes([pieces[begin] for begin in sorted(pieces)])
        for tensor, found in self._whole.items():
            self._states[tensor] = self._states[tensor].updated(found)
        self._found.clear()
        self._whole.clear()


def _magnitudes(pieces: Sequence[_Sums]) -> Magnitudes:
    sums = np.concatenate([sums for sums, _ in pieces])
    return Magnitudes(in_order(sums), sum(int(counts.sum()) for _, counts in pieces))
