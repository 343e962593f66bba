"""What is known of a model's layers and of a link, for planners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer, or neighbours that travel together.

    elements: of its gradient. kept: those that are sent. sent_bytes: what they take on the link. forward_s,
    backward_s: seconds of computation. square_norm: of the sum of all workers' gradients. group: number
    of the parameter group.
    """

    elements: int
    kept: int
    sent_bytes: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    square_norm: float = 0.0
    group: int = 0

    @property
    def density(self) -> float:
        return self.kept / self.elements if self.elements else 1.0

    @property
    def weight(self) -> float:
        """Mean square of an element: (21)."""
        return self.square_norm / self.elements if self.elements else 0.0

    def with_(self, other: Layer) -> Layer:
        """Both as one: everything adds up."""
        return Layer(
            elements=self.elements + other.elements,
            kept=self.kept + other.kept,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            square_norm=self.square_norm + other.square_norm,
            group=self.group,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """start_s: what a message takes however short it is, alpha. byte_s: what each byte adds, beta."""

    start_s: float
    byte_s: float

    def seconds(self, sent_bytes: float) -> float:
        return self.start_s + self.byte_s * sent_bytes


def joined(layers: Sequence[Layer]) -> Layer:
    """Neighbours, at least one, as one layer."""
    first, *others = layers
    for other in others:
        first = first.with_(other)
    return first


def produced(layers: Sequence[Layer]) -> list[float]:
    """When backward has the gradient of each layer, in seconds from where it begins with the last."""
    return list(accumulate(layer.backward_s for layer in reversed(layers)))[::-1]
