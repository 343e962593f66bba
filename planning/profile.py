"""What is known of a model's layers and of a link, for planners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer, or neighbours that travel together.

    Attributes:
        sent_bytes: bytes on the link.
        forward_s, backward_s: seconds of computation.
        group: number of the parameter group.
        sparse_elements: elements from which a sparsifier chooses. 0 if all are sent: biases, normalization,
            and everything without a sparsifier.
        kept: how many of these it sends, before rounding to a whole number.
        square_norm: of these, in the sum of all workers' gradients.
    """

    sent_bytes: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    group: int = 0
    sparse_elements: int = 0
    kept: float = 0.0
    square_norm: float = 0.0

    @property
    def density(self) -> float:
        """Share of the sparse elements that is sent; 1 if there are none."""
        return self.kept / self.sparse_elements if self.sparse_elements else 1.0

    @property
    def weight(self) -> float:
        """Mean square of a sparse element: (21)."""
        return self.square_norm / self.sparse_elements if self.sparse_elements else 0.0

    def with_(self, other: Layer) -> Layer:
        """Both as one: everything adds up."""
        return Layer(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            group=self.group,
            sparse_elements=self.sparse_elements + other.sparse_elements,
            kept=self.kept + other.kept,
            square_norm=self.square_norm + other.square_norm,
        )


def layers_of(
    elements: Sequence[int],
    densities: Sequence[float],
    *,
    sent_bytes: Sequence[float],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    square_norms: Sequence[float] = (),
    groups: Sequence[int] = (),
) -> list[Layer]:
    """Return the layers of a model, one for each tensor, in forward order.

    A tensor of which everything is sent has no sparse error. Its elements and norm would only dilute those of
    the tensors that it travels with, so the layer leaves them out.

    Args:
        elements: number of elements of each tensor.
        densities: share of its elements that is sent, 0 to 1.
        sent_bytes, forward_s, backward_s: see `Layer`.
        square_norms: squared Euclidean norm of each gradient, summed over the workers; empty if not known.
        groups: parameter group of each tensor; empty if all are of one.
    """
    return [
        Layer(
            sent_bytes=sent_bytes[place],
            forward_s=forward_s[place],
            backward_s=backward_s[place],
            group=groups[place] if groups else 0,
            sparse_elements=count if density < 1 else 0,
            kept=density * count if density < 1 else 0.0,
            square_norm=square_norms[place] if square_norms and density < 1 else 0.0,
        )
        for place, (count, density) in enumerate(zip(elements, densities, strict=True))
    ]


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
