"""Notices members that train on the same batches.

With `job.steps` each script has a loader of its own. Where all ranks seed alike, their loaders shuffle alike:
the members compute the same gradients, and the job trains on the samples of one. Workers report a checksum of
each of their first batches. Two members must have several different checksums in common: where each batch is
the whole data set, all workers have the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

EQUAL = 3  # different batches that two members must have in common
KEPT = 16  # checksums by member


class SameBatches:
    """The first checksums of each present member. It is not saved with the job: a restarted server does not
    compare the batches from before."""

    def __init__(self) -> None:
        self._seen: dict[str, set[int]] = {}  # by worker
        self._found = False

    def other(self, worker: str, batch: int, present: Iterable[str]) -> str:
        """Note a batch of a worker, and return the worker that has the same batches; "" if none has.

        It is found once in a job.

        Args:
            present: ids of the present members; others are forgotten.
        """
        self._seen = {each: self._seen[each] for each in present if each in self._seen}
        own = self._seen.setdefault(worker, set())
        if self._found or len(own) >= KEPT:
            return ""
        own.add(batch)
        for each, batches in self._seen.items():
            if each != worker and len(own & batches) >= EQUAL:
                self._found = True
                return each
        return ""
