"""`--aggregation`: how the gradients of a round become one. The rules that control and the command line need;
`server/shard/aggregation` computes them.

    mean      weighted by samples. A single worker can make anything of it
    median    of each coordinate by itself; of an even number the mean of the two in the middle. It lies
              within what right workers sent, as long as fewer than half are wrong
    trimmed   of each coordinate, the mean without the `wrong` lowest and the `wrong` highest. It lies within
              what right workers sent, as long as no more than `wrong` are wrong
    krum      the gradient with the least sum of squared distances to its n - wrong - 2 nearest, n being the
              number of workers; of equal ones that of the lowest rank

All but the mean take every worker alike, whatever its samples: samples are what a worker says of itself.

Sources: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML 2018)
for median and trimmed mean; Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent" (NeurIPS 2017) for Krum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...common.spec import parse_one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """fewest: contributions that it needs, here and below. by_coordinate: whether each is found by itself."""

    by_coordinate: ClassVar[bool] = True

    @property
    def fewest(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Median:
    by_coordinate: ClassVar[bool] = True

    @property
    def fewest(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Trimmed:
    """wrong: Byzantine workers that it tolerates."""

    by_coordinate: ClassVar[bool] = True

    wrong: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.wrong <= 1000:
            raise ValueError(f"wrong: expected 1 to 1000 workers, got {self.wrong}")

    @property
    def fewest(self) -> int:
        return 2 * self.wrong + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Krum(Trimmed):
    by_coordinate: ClassVar[bool] = False

    @property
    def fewest(self) -> int:
        return 2 * self.wrong + 3


Aggregation = Mean | Median | Trimmed | Krum
AGGREGATIONS: Mapping[str, type[Aggregation]] = {
    "mean": Mean,
    "median": Median,
    "trimmed": Trimmed,
    "krum": Krum,
}


def parse_aggregation(text: str) -> Aggregation:
    """Raises SpecError, which lists what is known."""
    return parse_one_of("aggregation", text, AGGREGATIONS)
