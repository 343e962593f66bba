"""Which tensors are worth compressing.

Quantization pays on the weights of convolution and linear layers, which hold nearly every parameter. Biases
and norms are few, and sensitive: they travel dense, as bfloat16 with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..spec import Spec, parse_spec
from .base import TensorSpec
from .registry import find, wrapping_of
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

    def choose(self, spec: TensorSpec, chosen: str) -> str:
        """The compressor spec for this tensor, if `chosen` is the job's.

        A dense compressor (none, bf16, fp16) is used for every tensor. What goes around the chosen one goes
        around that of the small tensors too: feedback that is switched off is off for both, so that a
        comparison without feedback is one, and momentum is corrected for both or for neither.
        """
        if find(parse_spec("compressor", chosen).name).dense or self.compresses(spec):
            return chosen
        wrapping, neutral = wrapping_of(chosen), Wrapping()
        assert wrapping is not None  # only what is lossless has none, and that is dense
        options = {
            key: _text(getattr(wrapping, key))
            for key in ("feedback", "decay", "momentum")
            if getattr(wrapping, key) != getattr(neutral, key)
        }
        return str(Spec(kind="compressor", name=SMALL, options=options))


def _text(value: bool | float) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else repr(value)
