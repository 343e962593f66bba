"""Samples of a script's data set, fetched where the script runs or by processes of their own.

Which samples make the next batch is known once the server has given them out. So the processes share the
samples of one batch, where those of a DataLoader are ahead by whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.multiprocessing
from torch.utils.data import DataLoader

from ..training.sharding import Indices


class Loading:
    """Fetches samples of one data set. Processes are forked at the first `fetch`."""

    def __init__(self, dataset: Any, processes: int) -> None:
        """processes: 0 to fetch samples in this one."""
        self.dataset = dataset
        self.processes = processes
        self._pieces = _Pieces()
        self._loader: DataLoader[Any] | None = None

    def fetch(self, indices: Indices) -> list[Any]:
        """The samples in this order. Raises whatever the data set does."""
        if not self.processes:
            return [self.dataset[index] for index in indices.tolist()]
        if self._loader is None:
            generator = torch.Generator()  # the script's own random numbers are left alone
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
        """Let go of the processes, which end."""
        self._loader = None


class _Pieces:
    """given: the indices of one batch, a list for each process that takes part."""

    given: Sequence[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


def _begin(_: int) -> None:
    """Tensors go by the names of files: a descriptor for each sample would soon be too many."""
    torch.multiprocessing.set_sharing_strategy("file_system")
