"""Fetches samples of a script's data set, in the script's process or in processes of their own.

The samples of the next batch are known once the server has assigned them. Therefore the processes share the
samples of one batch, while those of a DataLoader each prepare a later batch.

A process sends its samples as bytes, and not in shared memory: neither the size of /dev/shm nor the number of
open files limits a batch. It pickles them where it fetches them. A DataLoader leaves that to a thread of its
queue, whose errors never reach the loop, so that the loop waits for ever.
"""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..training.sharding import Indices
from .terms import ScriptError


class Loading:
    """Fetches samples of one data set, in this process if there are 0 others. These start at the first
    `fetch`."""

    def __init__(self, dataset: Any, processes: int) -> None:
        self.dataset = dataset
        self.processes = processes
        self._pieces = _Pieces()
        self._loader: DataLoader[Any] | None = None

    def fetch(self, indices: Indices) -> list[Any]:
        """Return the samples with these indices, in this order.

        Raises:
            ScriptError: samples cannot be sent from a process.
            Any exception of the data set; RuntimeError if a process has ended.
        """
        if not self.processes:
            return samples_of(self.dataset, indices.tolist())
        if self._loader is None:
            generator = torch.Generator()  # so that the DataLoader does not draw from the script's generator
            generator.manual_seed(torch.initial_seed())
            self._loader = DataLoader(
                _Sent(self.dataset),
                batch_sampler=self._pieces,
                num_workers=self.processes,
                collate_fn=_unchanged,
                worker_init_fn=_begin,
                generator=generator,
                persistent_workers=True,
            )
        pieces = np.array_split(indices, self.processes)
        self._pieces.given = [piece.tolist() for piece in pieces if piece.size]
        found: list[Any] = []
        with explained():
            for sent in self._loader:
                piece = _unpickled(sent)
                if isinstance(piece, _Unsendable):
                    raise ScriptError(
                        f"job.batches(num_workers={self.processes}): a sample cannot be sent from "
                        f"the process that fetches it ({piece.why}). collate_fn runs in the script's "
                        "process: leave such a field out in the data set, or use num_workers=0"
                    )
                found += piece
        return found

    def close(self) -> None:
        """Release the loader's processes that fetch samples; they end then."""
        self._loader = None


class _Pieces:
    """The batch sampler of the processes: one list of indices for each that takes part in a batch."""

    given: Sequence[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


def samples_of(dataset: Any, indices: list[int]) -> list[Any]:
    """Return samples of a data set, by its method `__getitems__` if it has one, as a DataLoader does."""
    together: Any = getattr(dataset, "__getitems__", None)
    return list(together(indices)) if together else [dataset[index] for index in indices]


# ---- in the processes


class _Unsendable:
    """Stands for samples that cannot be pickled, with the error of the attempt."""

    def __init__(self, why: str) -> None:
        self.why = why


class _Sent(Dataset[Any]):
    """The data set of the processes: samples as bytes. An exception of the data set has a type that can be
    pickled."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> bytes:
        try:
            samples = samples_of(self.dataset, indices)
        except Exception as error:
            try:
                _pickled(type(error))
            except Exception:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise
        try:
            return _pickled(samples)
        except Exception as error:
            return _pickled(_Unsendable(f"{type(error).__name__}: {error}"))


class _Pickler(ForkingPickler):
    """Pickles as the queues between this process and its children do, but tensors by their values."""

    def reducer_override(self, value: Any, /) -> Any:
        if type(value) is torch.Tensor:
            # As an array: torch's own way, a small archive for each tensor, takes several times as long.
            try:
                return torch.from_numpy, (value.numpy(),)  # pyright: ignore[reportUnknownMemberType]
            except (RuntimeError, TypeError):  # sparse, bfloat16, requires a gradient, ...
                pass
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            any_value: Any = value
            return any_value.__reduce_ex__(4)
        return NotImplemented


_unpickled: Callable[[bytes], Any] = getattr(ForkingPickler, "loads")  # noqa: B009  # its stub lacks a type


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


def _unchanged(value: Any) -> Any:
    return value


def _begin(_: int) -> None:
    """Show the data set of the script in `get_worker_info()`, as in a DataLoader's process."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # its attributes are read-only


# ---- errors of any loader's processes


@contextmanager
def explained() -> Generator[None]:
    """Add the usual cause and the remedy to an error of a DataLoader whose process has ended, or has not
    found memory to share."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        text = str(error)
        not_started = isinstance(error, ConnectionError | EOFError)  # its pipe is closed
        if "shared memory" in text or "shm" in text or "Bus error" in text:
            error.add_note(
                "A DataLoader's processes hand over batches in /dev/shm, which is full: start a container "
                "with more of it (the option shm-size of docker run; on Kubernetes an emptyDir with medium: "
                "Memory, mounted at /dev/shm), or use a smaller num_workers or prefetch_factor"
            )
        elif text.startswith("DataLoader worker") or not_started:
            error.add_note(
                "A process of the loader has ended. The kernel kills one (SIGKILL) if the machine or the "
                "container has run out of memory: use a smaller num_workers"
            )
            if multiprocessing.get_start_method() != "fork":
                error.add_note(
                    "Each process imports the script (start method spawn or forkserver): put all that the "
                    "script runs under if __name__ == '__main__':"
                )
        raise
