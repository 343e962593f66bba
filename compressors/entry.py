"""The declaration of a compressor: one `CompressorEntry` says all that others ask of it.

It is read without torch, so that `gc-plan` answers at once; `build` alone makes the compressor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..planning.compression import TensorCoding
from .wrapping import Wrapping

if TYPE_CHECKING:
    from .base import Compressor

WITH_FEEDBACK = Wrapping()
WITHOUT_FEEDBACK = Wrapping(feedback=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """Options of a compressor with nothing to choose."""


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
        model_wide: whether it divides what may be sent among all tensors (`base.ModelWide`): it takes the
            whole gradient first, and wants to know the FLOPs of each layer.
        sends: the bytes of a tensor at full compression, after any warm-up; or why they cannot be told, for
            the message of `gc-plan`.
        nanoseconds: of one core that a worker takes to compress an element, measured by `gc-bench
            compressors`.
        downlink: why with these options it does not suit updates of parameters, "" if it does: without
            thresholds that are meant for gradients, and with an error that is surely smaller than the update.
        adam_loss: the validation loss as a multiple of the uncompressed one that `gc-bench adam` measured
            with these options, where the server's optimizer is Adam; 1 if training did not lose, or was not
            measured.
    """

    options: type[Any]
    build: Callable[[Any], Compressor]
    wrapping: Wrapping | None = WITH_FEEDBACK
    dense: bool = False
    model_wide: bool = False
    sends: Callable[[Any], TensorCoding | str] = lambda options: (
        "its CompressorEntry does not declare `sends`"
    )
    nanoseconds: Callable[[Any], float] = lambda options: 1.0
    downlink: Callable[[Any], str] = lambda options: ""
    adam_loss: Callable[[Any], float] = lambda options: 1.0
