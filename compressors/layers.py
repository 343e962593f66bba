"""The layer rule: which tensors are compressed.

Quantization pays on the weights of convolution and linear layers, which hold nearly every parameter. Biases
and normalization are few and sensitive: they travel dense, as bfloat16 with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from ..common.spec import Spec
from .base import TensorSpec
from .registry import CompressorSpec, parse_compressor
from .wrapping import Wrapping

# Compressor of the tensors that the rule does not select.
SMALL = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """The rule that selects the tensors to compress: those of two or more dimensions, unless patterns say
    otherwise. All others travel dense.

    Attributes:
        dense: shell patterns of names of tensors that travel dense, case-sensitive. They win where both
            match.
        compressed: shell patterns of names of tensors that are compressed.
    """

    dense: tuple[str, ...] = ()
    compressed: tuple[str, ...] = ()

    def compresses(self, spec: TensorSpec) -> bool:
        """Return True if the job's compressor applies to this tensor, False if it travels dense."""
        if any(fnmatchcase(spec.name, pattern) for pattern in self.dense):
            return False
        if any(fnmatchcase(spec.name, pattern) for pattern in self.compressed):
            return True
        return len(spec.shape) >= 2

    def choose(self, spec: TensorSpec, chosen: CompressorSpec) -> CompressorSpec:
        """Return the compressor of this tensor. chosen: the job's compressor.

        A dense compressor (none, bf16, fp16) is used for every tensor. One with bases is used where its
        coordinates are fewer than the elements.
        """
        if chosen.entry.dense:
            return chosen
        pays = not chosen.shared or chosen.coordinates(spec.shape) > 0
        return chosen if pays and self.compresses(spec) else _small(chosen)


@cache  # called for each tensor
def _small(chosen: CompressorSpec) -> CompressorSpec:
    """Return the compressor of the small tensors, with the feedback, decay and momentum of the chosen one.

    Feedback that is off is then off for both, which makes a comparison without feedback consistent. Momentum
    is corrected for both or for neither.
    """
    wrapping, neutral = chosen.wrapping, Wrapping()
    assert wrapping is not None  # only lossless compressors have none, and these are dense
    options = {
        key: _text(getattr(wrapping, key))
        for key in ("feedback", "decay", "momentum")
        if getattr(wrapping, key) != getattr(neutral, key)
    }
    return parse_compressor(str(Spec(kind="compressor", name=SMALL, options=options)))


def _text(value: bool | float) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else repr(value)
