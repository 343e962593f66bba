"""The options that every lossy compressor has besides its own, and the order in which they act.

    clip -> delay -> momentum -> residual (decay) -> the compressor, with its warm-up -> masking

The first two act on the whole model (`budget`, `step`), the others on each tensor (`feedback`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapping:
    """The options that every lossy compressor has besides its own.

    Attributes:
        feedback: True to keep the unsent rest as a residual for the next step.
        decay: factor of the residual at each step; 1 keeps all of it.
        momentum: momentum of the correction at the worker; 0 for none. The server's optimizer then has to be
            plain SGD.
        masking: True to set the velocity to 0 at the elements that were sent; False to keep all of it, as the
            thesis's equation 4-13 does.
        clip: largest Euclidean norm of the whole model's gradient after aggregation; 0 for none. Each of N
            workers clips its own gradient to clip / sqrt(N), as DGC does.
        delay: number of versions between two pushes; gradients in between are summed in the residual.
    """

    feedback: bool = True
    decay: float = 1.0
    momentum: float = 0.0
    masking: bool = True
    clip: float = 0.0
    delay: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay: expected above 0 and at most 1, got {self.decay:g}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: expected at least 0 and below 1, got {self.momentum:g}")
        if not self.masking and not self.momentum:
            raise ValueError("masking: off needs a velocity to keep; set momentum, such as momentum=0.9")
        if not 0 <= self.clip < float("inf"):
            raise ValueError(f"clip: expected a finite norm of at least 0, got {self.clip:g}")
        if not 1 <= self.delay <= 1000:
            raise ValueError(f"delay: expected 1 to 1000 versions, got {self.delay}")
        if not self.feedback:
            for name, neutral in (("decay", 1.0), ("momentum", 0.0), ("delay", 1)):
                if getattr(self, name) != neutral:
                    raise ValueError(f"{name}: needs a residual; use feedback=on")

    @property
    def plain(self) -> bool:
        """True if feedback adds the residual to each gradient without decay or momentum."""
        return self.feedback and self.decay == 1.0 and not self.momentum


WRAPPING_KEYS = tuple(field.name for field in fields(Wrapping))
