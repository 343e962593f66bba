"""The declaration of a compressor: one `CompressorEntry` says all that others ask of it.

It is read without torch, so that `gc-plan` answers at once; `build` alone makes the compressor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..planning.compression import TensorCoding
from .wrapping import Wrapping

if TYPE_CHECKING:
    from .base import Compressor

WITH_FEEDBACK = Wrapping()
WITHOUT_FEEDBACK = Wrapping(feedback=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """Options of a compressor with nothing to choose."""


How = Literal["elements", "blocks", "neighbours", "merged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """How one call compresses neighbouring tensors to one payload, which decodes to the bits that a call for
    each would give; see `runs`.

    Attributes:
        how: "elements" where what becomes of an element depends on nothing but it; "blocks" with
            `compress_blocks` (`base.InBlocks`); "neighbours" with `spanning` (`base.Spanning`). An entry
            never says "merged": plans do.
        full: the elements of each tensor but the last are a multiple of this.
        most: elements of the largest tensor that is joined; None for no limit.
    """

    how: How
    full: int = 1
    most: int | None = None

    def fits(self, before: int, after: int) -> bool:
        """Return whether a tensor of `after` elements may follow one of `before`."""
        return before % self.full == 0 and (self.most is None or max(before, after) <= self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorEntry:
    """A compressor, declared. Each function takes the options, an instance of `options`.

    Attributes:
        options: a frozen dataclass whose fields, all with defaults, are the keys of the spec; its
            `__post_init__` holds them within their bounds.
        build: makes the compressor. It may import torch; nothing else here may have to.
        wrapping: what goes around the compressor unless the spec says otherwise; None for a lossless
            compressor, around which nothing can go.
        dense: whether it is cheap and exact enough for small tensors too, so that the layer rule sends these
            the same way.
        on_gpu: whether it also takes gradients and residuals that lie on a CUDA device; for any other they
            are copied to the host first. With feedback it needs `compress_with_residual` for that.
        joins: how one call serves neighbouring tensors; None if each takes a call of its own.
        merges: whether it may be given several tensors as one, to choose from as a whole (`base.Choosing`).
        model_wide: whether it divides what may be sent among all tensors (`base.ModelWide`): it takes the
            whole gradient first, and wants to know the FLOPs of each layer.
        sends: the bytes of a tensor at full compression, after any warm-up; or why they cannot be told, for
            the message of `gc-plan`.
        nanoseconds: of one core that a worker takes to compress an element, measured by `gc-bench
            compressors`.
        downlink: why with these options it does not suit updates of parameters, "" if it does: without
            thresholds that are meant for gradients, and with an error that is surely smaller than the update.
        adam_loss: the validation loss as a multiple of the uncompressed one that `gc-bench accuracy adam`
            measured with these options, where the server's optimizer is Adam; 1 if training did not lose, or
            was not measured.
    """

    options: type[Any]
    build: Callable[[Any], Compressor]
    wrapping: Wrapping | None = WITH_FEEDBACK
    dense: bool = False
    on_gpu: bool = False
    joins: Callable[[Any], Joined | None] = lambda options: None
    merges: bool = False
    model_wide: bool = False
    sends: Callable[[Any], TensorCoding | str] = lambda options: (
        "its CompressorEntry does not declare `sends`"
    )
    nanoseconds: Callable[[Any], float] = lambda options: 1.0
    downlink: Callable[[Any], str] = lambda options: ""
    adam_loss: Callable[[Any], float] = lambda options: 1.0
