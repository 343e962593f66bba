"""Payload kinds: what a compressor hands over and what a server can reduce.

A payload describes itself. Whoever reduces one looks at its kind and never at the name of the
algorithm that made it, so a new compressor needs no change on the server. The kinds are few:

* `DensePayload`: every element, as float32, bfloat16 or float16.
* `QuantizedPayload`: a fixed number of bits per element that index a small table of levels.

Byte order is little-endian throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class PayloadError(ValueError):
    """A payload that breaks its own rules. `field`, `limit` and `value` say which, for a refusal."""

    def __init__(self, field: str, limit: str, value: str) -> None:
        super().__init__(f"{field}: expected {limit}, got {value}")
        self.field = field
        self.limit = limit
        self.value = value


class DenseFormat(Enum):
    """Element format of a dense payload; the value is its name in messages and logs."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def element_bytes(self) -> int:
        return 4 if self is DenseFormat.FLOAT32 else 2


class CodeScheme(Enum):
    """How a code of a quantized payload names a level.

    SIGNED_4BIT: 0 is zero, 1…7 are -levels[0…6], 9…15 are +levels[0…6]; 8 is never sent.
    Eight codes fill a 32-bit word, the even index in the low nibble of its byte.

    SIGNED_2BIT: 00 is zero, 10 is -levels[0], 11 is +levels[0]; 01 is never sent.
    Sixteen codes fill a 32-bit word, the lowest index in the lowest bits.

    The last word is padded with code 0.
    """

    SIGNED_4BIT = "signed-4bit"
    SIGNED_2BIT = "signed-2bit"

    @property
    def bits(self) -> int:
        return 4 if self is CodeScheme.SIGNED_4BIT else 2

    @property
    def level_count(self) -> int:
        return 7 if self is CodeScheme.SIGNED_4BIT else 1

    @property
    def forbidden_code(self) -> int:
        return 8 if self is CodeScheme.SIGNED_4BIT else 1

    def code_bytes(self, elements: int) -> int:
        """Bytes of the packed codes of `elements` values, whole 32-bit words."""
        per_word = 32 // self.bits
        return -(-elements // per_word) * 4

    def table(self, levels: Float32) -> Float32:
        """What each code is worth: float32, shape (2**bits,). The forbidden code gets a 0."""
        table = np.zeros(2**self.bits, np.float32)
        if self is CodeScheme.SIGNED_4BIT:
            table[1:8] = -levels
            table[9:16] = levels
        else:
            table[2] = -levels[0]
            table[3] = levels[0]
        return table


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DensePayload:
    """Every element of a tensor.

    data: uint8, `elements * format.element_bytes` long.
    """

    format: DenseFormat
    elements: int
    data: Bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedPayload:
    """Packed codes and the table of magnitudes that they index.

    levels: float32, `scheme.level_count` positive finite magnitudes, ascending. They are what a
        code decodes to: any scale (such as the division by the batch size) is already in them.
    data: uint8, `scheme.code_bytes(elements)` long.
    """

    scheme: CodeScheme
    elements: int
    levels: Float32
    data: Bytes


Payload = DensePayload | QuantizedPayload


def payload_bytes(payload: Payload) -> int:
    """Bytes of `payload.data` that a payload of this kind and size must have."""
    match payload:
        case DensePayload():
            return payload.elements * payload.format.element_bytes
        case QuantizedPayload():
            return payload.scheme.code_bytes(payload.elements)
