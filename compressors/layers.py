"""Which tensors are worth compressing.

Quantization pays on the weights of convolution and linear layers, which hold nearly every parameter. Biases
and norms are few, and sensitive: they travel dense, as bfloat16 with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from ..common.spec import Spec
from .base import TensorSpec
from .registry import CompressorSpec, parse_compressor
from .wrapping import Wrapping

# What the tensors outside the rule travel as.
SMALL = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """Tensors of two or more dimensions are compressed, others travel dense; patterns overrule that by name.

    dense, compressed: shell patterns on the tensor's name, case-sensitive. `dense` wins where both match.
    """

    dense: tuple[str, ...] = ()
    compressed: tuple[str, ...] = ()

    def compresses(self, spec: TensorSpec) -> bool:
        """Whether the chosen compressor applies to this tensor."""
        if any(fnmatchcase(spec.name, pattern) for pattern in self.dense):
            return False
        if any(fnmatchcase(spec.name, pattern) for pattern in self.compressed):
            return True
        return len(spec.shape) >= 2

    def choose(self, spec: TensorSpec, chosen: CompressorSpec) -> CompressorSpec:
        """Return the compressor of this tensor, if `chosen` is the job's.

        A dense compressor (none, bf16, fp16) is used for every tensor.
        """
        return chosen if chosen.entry.dense or self.compresses(spec) else _small(chosen)


@cache  # it is asked for tensor by tensor
def _small(chosen: CompressorSpec) -> CompressorSpec:
    """Return the compressor of the small tensors.

    What goes around the chosen one goes around this one too: feedback that is switched off is off for both,
    so that a comparison without feedback is one, and momentum is corrected for both or for neither.
    """
    wrapping, neutral = chosen.wrapping, Wrapping()
    assert wrapping is not None  # only what is lossless has none, and that is dense
    options = {
        key: _text(getattr(wrapping, key))
        for key in ("feedback", "decay", "momentum")
        if getattr(wrapping, key) != getattr(neutral, key)
    }
    return parse_compressor(str(Spec(kind="compressor", name=SMALL, options=options)))


def _text(value: bool | float) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else repr(value)
