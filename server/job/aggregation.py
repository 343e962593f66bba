"""`--aggregation`: how the gradients of a round become one. This file has the options and the rules that
control and the command line need; `server/shard/aggregation` computes the result.

    mean    | weighted by samples. A single faulty worker can change it without limit.
    median  | of each coordinate by itself; of an even number, the mean of the two in the middle. It lies
            | within the values of correct workers, as long as fewer than half are faulty.
    trimmed | of each coordinate, the mean without the `wrong` lowest and the `wrong` highest values. It lies
            | within the values of correct workers, as long as no more than `wrong` are faulty.
    krum    | the gradient with the least sum of squared distances to its n - wrong - 2 nearest, n being the
            | number of workers; of equal ones that of the lowest rank.

All but the mean weight every worker equally, regardless of its number of samples: a faulty worker could
report any number.

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
    """The aggregation `mean`: the mean gradient, weighted by samples.

    Attributes:
        by_coordinate: True if each coordinate of the result depends only on that coordinate of the gradients.
    """

    by_coordinate: ClassVar[bool] = True

    @property
    def fewest(self) -> int:
        """Smallest number of contributions that the aggregation needs."""
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Median:
    """The aggregation `median`: the median of each coordinate."""

    by_coordinate: ClassVar[bool] = True  # True, because each coordinate is computed by itself

    @property
    def fewest(self) -> int:
        """Smallest number of contributions that the aggregation needs."""
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Trimmed:
    """The aggregation `trimmed`: the mean of each coordinate without its lowest and highest values."""

    by_coordinate: ClassVar[bool] = True  # True, because each coordinate is computed by itself

    wrong: int = 1  # number of faulty workers that it tolerates, 1 to 1000

    def __post_init__(self) -> None:
        if not 1 <= self.wrong <= 1000:
            raise ValueError(f"wrong: expected 1 to 1000 workers, got {self.wrong}")

    @property
    def fewest(self) -> int:
        """Smallest number of contributions that the aggregation needs."""
        return 2 * self.wrong + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Krum(Trimmed):
    """The aggregation `krum`: the one gradient with the smallest distances to its nearest neighbours.

    Attributes:
        wrong: number of faulty workers that it tolerates, 1 to 1000.
    """

    by_coordinate: ClassVar[bool] = False  # False, because distances depend on all coordinates

    @property
    def fewest(self) -> int:
        """Smallest number of contributions that the aggregation needs."""
        return 2 * self.wrong + 3


Aggregation = Mean | Median | Trimmed | Krum
AGGREGATIONS: Mapping[str, type[Aggregation]] = {
    "mean": Mean,
    "median": Median,
    "trimmed": Trimmed,
    "krum": Krum,
}


def parse_aggregation(text: str) -> Aggregation:
    """Parse the text of `--aggregation`.

    Raises:
        SpecError: the aggregation is unknown (the message lists those that exist), or an option is out of
            range.
    """
    return parse_one_of("aggregation", text, AGGREGATIONS)
