"""Splits of a classification task's samples among workers that are not identically distributed.

    classes:K         A worker has K shards of the samples in the order of their classes, so about K classes.
                      McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
                      Data" (AISTATS 2017), section 3.
    dirichlet:ALPHA   A worker has a proportion of each class, drawn from a symmetric Dirichlet distribution.
                      A small ALPHA makes shares unlike each other. Hsu et al., "Measuring the Effects of
                      Non-Identical Data Distribution for Federated Visual Classification" (2019).

Each sample is in one share. A share is a function of labels, number of workers and position alone, so every
worker finds its own. The server knows nothing of splits: it assigns ranges of an epoch, and the worker takes
samples of its own share instead, the same number (`sharding.Shards`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

SEED = 0  # of shards and proportions: every job has the same shares


@dataclass(frozen=True, slots=True, eq=False)
class SampleSplit:
    """How the samples of a task are divided among workers.

    Attributes:
        labels: the class of each training sample, from 0: int64, shape (samples,).
        shards: number of shards of each worker; 0 for a Dirichlet split.
        alpha: concentration of the Dirichlet distribution; 0 for a split by classes.
    """

    labels: Indices
    shards: int = 0
    alpha: float = 0.0

    def share(self, position: int, world: int) -> Indices:
        """Return the indices of the samples of one worker, ascending: int64. Never empty: a worker whose
        proportions leave nothing for it has one sample of another share. position: the worker's position
        among those that were assigned work together, 0 to world - 1.
        """
        draw = np.random.default_rng([SEED, world])
        by_class = np.argsort(self.labels, kind="stable")
        if self.shards:
            shards: list[Indices] = np.array_split(by_class, world * self.shards)
            dealt: list[int] = draw.permutation(len(shards)).tolist()
            begin, end = position * self.shards, (position + 1) * self.shards
            own: Indices = np.concatenate([shards[number] for number in dealt[begin:end]])
        else:
            pieces: list[Indices] = []
            classes: list[Indices] = np.split(by_class, np.flatnonzero(np.diff(self.labels[by_class])) + 1)
            for samples in classes:
                bounds = np.cumsum(draw.dirichlet(np.full(world, self.alpha)))[:-1] * len(samples)
                pieces.append(np.split(draw.permutation(samples), bounds.round().astype(np.int64))[position])
            own = np.concatenate(pieces)
        return np.sort(own) if len(own) else np.array([position % len(self.labels)], np.int64)


def parse_split(text: str, labels: Indices) -> SampleSplit | None:
    """Read the option `split` of a task.

    Args:
        text: `classes:K`, `dirichlet:ALPHA`, or empty for samples that are distributed alike.

    Returns:
        The split; None for an empty text.

    Raises:
        ValueError: any other text, or a number out of range.

    Example:
        >>> gradwire.parse_split("classes:2", numpy.array([0, 0, 1, 1])).shards
        2
    """
    if not text:
        return None
    kind, _, number = text.partition(":")
    try:
        if kind == "classes" and 1 <= int(number) <= 1000:
            return SampleSplit(labels, shards=int(number))
        if kind == "dirichlet" and 1e-3 <= float(number) <= 1e6:
            return SampleSplit(labels, alpha=float(number))
    except ValueError:
        pass
    raise ValueError(
        "split: expected classes:K with 1 to 1000 shards or dirichlet:ALPHA with 0.001 to 1000000, "
        f"got {text!r}"
    )
