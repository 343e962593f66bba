"""Measurements of a model's layers and of a link, as planners take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer, or neighbouring layers that travel together.

    Attributes:
        sparse_elements: number of elements from which a sparsifier chooses. 0 if all elements are sent:
            biases, normalization, and everything without a sparsifier.
        kept: number of the sparse elements that are sent, before rounding to a whole number.
        square_norm: squared norm of the sparse elements, in the sum of all workers' gradients.
    """

    sent_bytes: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    sparse_elements: int = 0
    kept: float = 0.0
    square_norm: float = 0.0

    @property
    def density(self) -> float:
        """Fraction of the sparse elements that is sent; 1 if there are no sparse elements."""
        return self.kept / self.sparse_elements if self.sparse_elements else 1.0

    @property
    def weight(self) -> float:
        """Mean square of the sparse elements, (21) of Li et al. (see `fusion`); 0 if there are none."""
        return self.square_norm / self.sparse_elements if self.sparse_elements else 0.0

    def with_(self, other: Layer) -> Layer:
        """Return this layer and `other` as one layer: all quantities are added."""
        return Layer(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
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
) -> list[Layer]:
    """Return the layers of a model, in forward order, from the quantities of each tensor (see `Layer`).

    A tensor that is sent whole, with a density of 1, has no sparse error. Its elements and norm would only
    dilute those of the tensors that it travels with, so its layer has no sparse elements.
    """
    return [
        Layer(
            sent_bytes=sent_bytes[index],
            forward_s=forward_s[index],
            backward_s=backward_s[index],
            sparse_elements=count if density < 1 else 0,
            kept=density * count if density < 1 else 0.0,
            square_norm=square_norms[index] if square_norms and density < 1 else 0.0,
        )
        for index, (count, density) in enumerate(zip(elements, densities, strict=True))
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A model of a link: a message of n bytes takes `start_s` + n * `byte_s` (alpha + beta * n)."""

    start_s: float
    byte_s: float

    def seconds(self, sent_bytes: float) -> float:
        """Return the seconds that a message of this size takes."""
        return self.start_s + self.byte_s * sent_bytes


def joined(layers: Sequence[Layer]) -> Layer:
    """Return neighbouring layers, at least one, as one layer."""
    return reduce(Layer.with_, layers)


def produced(layers: Sequence[Layer]) -> list[float]:
    """Return when backward has the gradient of each layer, in seconds since it begins with the last layer."""
    return list(accumulate(layer.backward_s for layer in reversed(layers)))[::-1]
