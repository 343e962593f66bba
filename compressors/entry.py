"""The declaration of a compressor: one `CompressorEntry` states everything that other rooms need to know of
it.

Reading it does not import torch, which keeps `gc-plan` fast; only `build` makes the compressor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .sizes import TensorCoding
from .wrapping import Wrapping

if TYPE_CHECKING:
    from .base import Compressor

WITH_FEEDBACK = Wrapping()
WITHOUT_FEEDBACK = Wrapping(feedback=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """The options of a compressor that has none."""


How = Literal["elements", "blocks", "neighbours", "merged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """How one call compresses several neighbouring tensors to one payload (see `joining`). The payload
    decodes to the same bits as if each tensor had a call of its own.

    Attributes:
        how: "elements" if each element is compressed independently of all others; "blocks" for
            `compress_blocks` (`base.InBlocks`); "neighbours" for `spanning` (`base.Spanning`). An entry never
            declares "merged": that is for units that a plan has merged.
        full: each tensor of the call but the last needs a multiple of this number of elements, such as the
            length of a block, so that no block reaches into the next tensor.
        most: largest number of elements that a tensor of the call may have; None for no limit.
    """

    how: How
    full: int = 1
    most: int | None = None

    def fits(self, before: int, after: int) -> bool:
        """Return True if a tensor of `after` elements may follow one of `before` in the same call."""
        return before % self.full == 0 and (self.most is None or max(before, after) <= self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorEntry:
    """A compressor's declaration. Each function takes the options, an instance of `options`.

    Attributes:
        options: a frozen dataclass whose fields, all with defaults, are the keys of the spec; its
            `__post_init__` checks their bounds.
        build: function that makes the compressor. It may import torch; importing the entry must not.
        wrapping: defaults of the options that every lossy compressor has; None for a lossless one.
        dense: True if the layer rule uses it for small tensors, too.
        on_gpu: True if it also takes gradients and residuals on a CUDA device; with feedback it needs
            `compress_with_residual` for that.
        joins: how one call serves neighbouring tensors; None if each takes a call of its own.
        merges: True if it can choose from several tensors as from one (`base.Choosing`).
        model_wide: True if it divides a budget among all tensors (`base.ModelWide`). It then gets all
            gradients at once, and the FLOPs of each layer.
        sends: size of a tensor at full compression, after any warm-up; or, as text for a message of
            `gc-plan`, the reason why the size is unknown.
        nanoseconds: time in which one core compresses an element, measured by `gc-bench compressors`.
        downlink: "" if it suits updates of parameters, otherwise the reason why not: thresholds meant for
            gradients, or an error that may exceed the update.
        coordinates: for a compressor with bases (`base.Shared`), a function that returns the number of
            coordinates of a tensor of a shape, or 0 for a tensor that travels as bfloat16; None for all other
            compressors. A tensor with coordinates is never cut into parts.
        adam_loss: loss with Adam at the server as a multiple of the uncompressed one, measured by `gc-bench
            accuracy adam`; None where it was not measured.
        adam_loss_otherwise: the same where a spec's feedback differs from the default of `wrapping`.
        sgd_accuracy: difference from the accuracy of uncompressed training with SGD, the least of the tasks
            of `gc-bench accuracy compressors`; None where it was not measured.
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
    coordinates: Callable[[Any], Callable[[Sequence[int]], int] | None] = lambda options: None
    downlink: Callable[[Any], str] = lambda options: ""
    adam_loss: Callable[[Any], float | None] = lambda options: None
    adam_loss_otherwise: float | None = None
    sgd_accuracy: Callable[[Any], float | None] = lambda options: None
