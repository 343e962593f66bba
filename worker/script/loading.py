"""Fetches samples of a script's data set, in the script's process or in processes of their own.

The samples of the next batch are known once the server has assigned them. Therefore the processes share the
samples of one batch, while those of a DataLoader each prepare a later batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.multiprocessing
from torch.utils.data import DataLoader

from ..training.sharding import Indices


class Loading:
    """Fetches samples of one data set. Its processes are forked at the first `fetch`.

    Attributes:
        dataset: data set with `[]`.
        processes: number of processes; 0 to fetch samples in this one.
    """

    def __init__(self, dataset: Any, processes: int) -> None:
        """
        Args:
            dataset: data set with `[]`.
            processes: number of processes; 0 to fetch samples in this one.
        """
        self.dataset = dataset
        self.processes = processes
        self._pieces = _Pieces()
        self._loader: DataLoader[Any] | None = None

    def fetch(self, indices: Indices) -> list[Any]:
        """Return the samples with these indices, in this order. Exceptions of the data set pass through."""
        if not self.processes:
            return [self.dataset[index] for index in indices.tolist()]
        if self._loader is None:
            generator = torch.Generator()  # so that the DataLoader does not draw from the script's generator
            generator.manual_seed(torch.initial_seed())
            self._loader = DataLoader(
                self.dataset,
                batch_sampler=self._pieces,
                num_workers=self.processes,
                collate_fn=list[Any],
                worker_init_fn=_begin,
                generator=generator,
                persistent_workers=True,
            )
        pieces = np.array_split(indices, self.processes)
        self._pieces.given = [piece.tolist() for piece in pieces if piece.size]
        return [sample for fetched in self._loader for sample in fetched]

    def close(self) -> None:
        """Release the loader's processes that fetch samples; they end then."""
        self._loader = None


class _Pieces:
    """The batch sampler of the processes.

    Attributes:
        given: indices of one batch, as one list for each process that takes part.
    """

    given: Sequence[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


def _begin(_: int) -> None:
    """Share tensors by file names in a new process: one descriptor per sample would soon exceed the limit."""
    torch.multiprocessing.set_sharing_strategy("file_system")
