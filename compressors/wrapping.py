"""The options that every lossy compressor takes besides its own, and in which order they act.

    clip -> delay -> momentum -> residual (decay) -> the compressor, with its warm-up -> masking

The first two are the whole model's (`step`), the others each tensor's (`feedback`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapping:
    """What goes around a compressor.

    feedback: keep what was not sent, for the next step.
    decay: what a residual is multiplied with at each step; 1 keeps all of it.
    momentum: of the correction at the worker; the server's optimizer then has to be plain SGD. 0 for none.
    clip: largest Euclidean norm of the whole model's gradient after aggregation; each of N workers clips its
        own to clip / sqrt(N), as DGC does. 0 for none.
    delay: push at every so many versions; what is computed in between is summed up in the residual.
    """

    feedback: bool = True
    decay: float = 1.0
    momentum: float = 0.0
    clip: float = 0.0
    delay: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay: expected above 0 and at most 1, got {self.decay:g}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: expected at least 0 and below 1, got {self.momentum:g}")
        if not 0 <= self.clip < float("inf"):
            raise ValueError(f"clip: expected a finite norm of at least 0, got {self.clip:g}")
        if not 1 <= self.delay <= 1000:
            raise ValueError(f"delay: expected 1 to 1000 versions, got {self.delay}")
        if not self.feedback:
            for name, neutral in (("decay", 1.0), ("momentum", 0.0), ("delay", 1)):
                if getattr(self, name) != neutral:
                    raise ValueError(f"{name}: needs the residual that is kept with feedback=on")

    @property
    def plain(self) -> bool:
        """Whether the residual, as it is, is added to each gradient."""
        return self.feedback and self.decay == 1.0 and not self.momentum


WRAPPING_KEYS = tuple(field.name for field in fields(Wrapping))
