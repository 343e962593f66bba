"""The update of one part, before it is encoded as messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...compressors import DenseFormat, DensePayload, Payload
from ...proto.messages import Content


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """State of one tensor beside its values: `Beside` of the wire, before it is encoded."""

    tensor: int
    payload: Payload
    name: str = ""
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PartUpdate:
    """The update of one part, before it is encoded as messages.

    Attributes:
        payloads: payloads of the part, end to end.
        contents: for each payload, whether a replica adds it, takes it as values or steps by it.
        beside: state of the job beside the part's elements.
    """

    part: int
    payloads: Sequence[Payload]
    contents: Sequence[Content]
    beside: Sequence[State] = ()


def update_of(part: int, done: Sequence[tuple[Payload, Content]]) -> PartUpdate:
    """Return the update of a part from pairs of payload and content."""
    return PartUpdate(part, [payload for payload, _ in done], [content for _, content in done])


def values_of(values: torch.Tensor) -> Payload:
    """Return values as a dense float32 payload that shares their memory."""
    array = values.numpy()
    return DensePayload(format=DenseFormat.FLOAT32, elements=array.size, data=array.view(np.uint8))
