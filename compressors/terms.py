"""The facts of a push when it begins, as one value that each layer hands on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PushTerms:
    """The terms on which a step of a `ModelCompressor` begins.

    Attributes:
        samples: number of samples over which the mean gradients are taken, at least 1.
        version: version of the parameters at which they are computed. It seeds random numbers.
        step: number of the step, from 0, by which `delay` counts; None for the version.
        epoch: passes over the training samples so far, fractional.
        workers: number of workers in the round, at least 1, by which `clip` is scaled.
        rank: number that seeds random numbers besides the job's seed and `version`, equal for workers that
            compute the same gradient; None for the compressor's own rank.
        wanted: numbers of the parts to send; None for all. The ledger's contents for other parts stay as they
            are.
        flush: True for a worker's last push: send everything in the ledger too, of all parts, as float32.
        measured: True if the server measures norms at this version: where the indices are drawn, send the
            gradient without the residual.
    """

    samples: int
    version: int = 0
    step: int | None = None
    epoch: float = 0.0
    workers: int = 1
    rank: int | None = None
    wanted: frozenset[int] | None = None
    flush: bool = False
    measured: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples: expected at least 1, got {self.samples}")
