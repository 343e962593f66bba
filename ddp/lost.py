"""Ranks that do not answer, by name: a backend says that some connection has closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

# Ranks answer as soon as their own collective has failed, which a long backward pass may delay.
ANSWERS_S = 30.0
LAST_ANSWER_S = 1.0  # once a single rank has not answered
INTERVAL_S = 0.05
KEY = "gradwire.ddp/alive/{}"

torch_distributed: Any = dist  # annotates only in part


class RankLost(RuntimeError):
    """Raised when a collective fails, because a rank has ended, hangs or cannot be reached. The job cannot
    continue.

    Example:
        >>> def step(model, x):
        ...     try:
        ...         model(x).sum().backward()
        ...     except gradwire.RankLost as error:
        ...         print(error)  # names the ranks that do not answer
    """


def lost(error: RuntimeError, group: dist.ProcessGroup | None) -> RankLost:
    """Return the error that names the ranks of a group that do not answer.

    Every rank whose collective fails says so in the store in which the ranks have found each other.

    Args:
        error: error of the backend.
    """
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    own = dist.get_rank()
    others = [rank for rank in members if rank != own]
    answers: list[list[int]] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(_silent(own, others))

    # A call to the store never returns if the process that keeps it is stopped.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWERS_S + LAST_ANSWER_S)
    silent = answers[0] if answers else [0] if own else others  # without torchrun, rank 0 keeps the store
    text = str(error).splitlines()[0]
    if not silent:
        return RankLost(f"rank {own}: all ranks answer, but a connection between two has failed: {text}")
    names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
    remedy = "see its log, and start all ranks again from their last saved states"
    return RankLost(f"{names}: no answer: {remedy} ({text})")


def _silent(own: int, others: Sequence[int]) -> list[int]:
    """Return which of the other ranks have not said that their collective has failed."""
    silent = list(others)
    store = torch_distributed.distributed_c10d._get_default_store()  # there is no other
    store.set(KEY.format(own), "")
    ends = time.monotonic() + (ANSWERS_S if len(silent) > 1 else LAST_ANSWER_S)
    while silent and time.monotonic() < ends:
        found = [rank for rank in silent if not store.check([KEY.format(rank)])]
        if len(found) == 1 and len(silent) > 1:
            ends = min(ends, time.monotonic() + LAST_ANSWER_S)
        silent = found
        time.sleep(INTERVAL_S)
    return silent
