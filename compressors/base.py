"""The contract that every compressor keeps.

A compressor is a pair of functions over explicit state, in the manner of an optax transformation:

    state = compressor.init(spec)
    payload, state = compressor.compress(gradient, state, context)

It never touches the network, protobuf, threads or the clock. The gradient is a flat, contiguous float32
tensor and is never written to. A state is a value:
the returned state replaces the one passed in. It need not know about error feedback and momentum correction,
which are a wrapper (`feedback.ErrorFeedback`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from .kernels import Magnitudes
from .payload import Float32, Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A parameter tensor as the compressor knows it.

    flops: of its layer's forward pass, per sample; 0 where nobody has measured them.
    """

    name: str
    shape: tuple[int, ...]
    flops: float = 0.0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Random:
    """Random numbers that follow from a key of numbers of at least 0. They are made when they are asked for:
    most compressors never do, and it takes longer than to compress a small tensor."""

    key: tuple[int, ...]

    @cached_property
    def generator(self) -> np.random.Generator:
        return np.random.default_rng(self.key)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What a compressor may know about the step.

    samples: how many samples the mean gradient was taken over, at least 1.
    version: of the parameters that the gradient was computed at, from 0; the same for all workers of a round.
    epoch: passes over the training samples so far, fractional; infinite where nothing is to be warmed up.
    random: numbers of this tensor, rank and version, so that a run can be repeated bit for bit.
    shared: the same on every worker.
    magnitudes: of the gradient at hand, before any residual is added, where the caller knows them already;
        a compressor that needs them otherwise spends a read pass of its own.
    density: of the elements that are to be sent, where each tensor has its own (`Choosing`); None otherwise.
    keep: how many elements are to be sent, by a plan for the whole model (`ModelWide`) or of several tensors
        that are merged (`Choosing`); None where the compressor itself says.
    """

    samples: int
    version: int
    epoch: float = 0.0
    random: Random
    shared: Random = field(default_factory=lambda: Random((0,)))
    magnitudes: Magnitudes | None = None
    density: float | None = None
    keep: int | None = None

    @property
    def rng(self) -> np.random.Generator:
        """Of this rank."""
        return self.random.generator

    @property
    def shared_seed(self) -> int:
        """Below 2**64, the same on every worker."""
        return int(np.random.SeedSequence(self.shared.key).generate_state(1, np.uint64)[0])


class Compressor(Protocol):
    """Tensors in, payloads out. What it can do besides, its `CompressorEntry` declares."""

    def init(self, spec: TensorSpec) -> Any:
        """State for one tensor, before its first gradient."""
        ...

    def compress(self, gradient: torch.Tensor, state: Any, context: StepContext) -> tuple[Payload, Any]:
        """Compress `gradient` (float32, shape (elements,)); return the payload and the next state."""
        ...


class FusedFeedback(Protocol):
    """A compressor that adds the residual, compresses, and leaves what was not sent, in one pass."""

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor, state: Any, context: StepContext
    ) -> tuple[Payload, Any]:
        """As `compress` of `gradient + residual`; afterwards `residual` (float32, in place) holds
        `gradient + residual - decode(payload)`. Bit for bit what the unfused path leaves."""
        ...


class OutOfPlace(Protocol):
    """A fused compressor that can leave what was not sent elsewhere, and finds a gradient that is not finite
    on the way."""

    @property
    def out_of_place(self) -> bool:
        """Whether it does, with these options."""
        ...

    def compress_with_residual(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor,
        state: Any,
        context: StepContext,
        left: torch.Tensor | None = None,
    ) -> tuple[Payload, Any]:
        """As of `FusedFeedback`, but `left` takes the place of `residual`, which stays as it is.

        Raises FloatingPointError for a gradient on the host that is not finite; then `left` holds anything.
        """
        ...


class InBlocks(Protocol):
    """A quantizer that compresses consecutive tensors with feedback in one pass over memory."""

    def compress_blocks(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor,
        left: torch.Tensor,
        states: Sequence[Any],
        samples: int,
    ) -> tuple[Payload, list[Any], npt.NDArray[np.float64]]:
        """As `compress_with_residual` of each tensor, to the same bits.

        gradients: float32, contiguous, of one dimension. residual, left: of all tensors, end to end; what is
        not sent goes to `left`. samples: behind the mean gradients.

        Returns the payload, with a block for each tensor, the next states, and the sums of |g|. The caller
        has to check these: one that is not finite is of a gradient that is not, and then nothing else here
        counts.
        """
        ...


class NonFiniteGradient(ValueError):
    """A gradient with an infinity or a NaN. `name` says of which tensor. No state was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"gradient of {name!r} has an infinity or a NaN")
        self.name = name


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Consecutive tensors that are compressed together, at least one, each by its own statistics.

    sizes: int64, shape (tensors,), elements of each. context: of each, by its place among them.
    """

    sizes: npt.NDArray[np.int64]
    context: Callable[[int], StepContext]

    def part(self, first: int, last: int) -> Neighbours:
        """Those from `first` up to, but not including, `last`."""
        return Neighbours(self.sizes[first:last], lambda place: self.context(first + place))

    def bounds(self) -> list[tuple[int, int]]:
        """Where each begins and ends."""
        return [*pairwise(accumulate(self.sizes.tolist(), initial=0))]


class Spanning(Protocol):
    """A compressor without state that compresses consecutive tensors in a few calls."""

    def spanning(self, tensors: Neighbours) -> Compressor:
        """A compressor of these tensors laid end to end, whose payload decodes to the bits that those of the
        tensors would."""
        ...


class Choosing(Protocol):
    """A sparsifier that may be given several tensors as one; see `merging`.

    seeded: whether the receiver draws the indices.
    """

    @property
    def seeded(self) -> bool: ...

    def keep(self, elements: int, context: StepContext) -> int:
        """How many elements of a tensor it sends. As `context.keep` it is told how many of several."""
        ...


class Stateless:
    """A compressor that remembers nothing."""

    __slots__ = ()

    def init(self, spec: TensorSpec) -> None:
        return None


class Fused:
    """A compressor with one pass for both: without a residual it drops what is left."""

    __slots__ = ()

    def compress(self, gradient: torch.Tensor, state: Any, context: StepContext) -> tuple[Any, Any]:
        fused: Any = self  # a subclass has it; here it would make every one look fused to a type checker
        compressed: tuple[Any, Any] = fused.compress_with_residual(gradient, None, state, context)
        return compressed


def as_array(residual: torch.Tensor | None) -> Float32 | None:
    """As kernels take a residual."""
    return None if residual is None else residual.numpy()


def is_fused(compressor: Compressor) -> TypeGuard[FusedFeedback]:
    # Not by `isinstance`, which takes 40 µs with a protocol: this is asked of every tensor in every step.
    return hasattr(compressor, "compress_with_residual")


def is_out_of_place(compressor: Compressor) -> TypeGuard[OutOfPlace]:
    return bool(getattr(compressor, "out_of_place", False))


class ModelWide(Protocol):
    """A compressor that divides what may be sent among the tensors of the model, before any is compressed."""

    def plan(
        self, totals: Sequence[torch.Tensor], specs: Sequence[TensorSpec], context: StepContext
    ) -> list[int]:
        """How many elements each tensor may keep; it finds its number in `context.keep`. Tensors that have no
        gradient in a step are not among them.

        totals: what is there to be sent of each tensor, residual included: float32, shape (elements,).
        """
        ...
