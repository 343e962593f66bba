"""Processes that fetch samples: what they send, and how their failures reach the loop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from gradwire import ScriptError
from gradwire.worker.script.loading import Loading, explained

INDICES = np.arange(6)
pytestmark = pytest.mark.timeout(60)


class Samples:
    """A data set that does something of its own in one sample's process."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


@pytest.fixture
def fetch() -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    open_: list[Loading] = []

    def fetched(sample: Callable[[int], Any]) -> list[Any]:
        open_.append(Loading(Samples(sample), 2))
        return open_[-1].fetch(INDICES)

    yield fetched
    for each in open_:
        each.close()


Fetch = Callable[[Callable[[int], Any]], list[Any]]


def test_samples_arrive_as_they_are_and_their_processes_see_the_scripts_data_set(fetch: Fetch) -> None:
    base = torch.arange(12.0).reshape(6, 2)
    made: list[Callable[[int], Any]] = [
        lambda i: base[i],
        lambda i: base.T[:, i].to(torch.bfloat16),
        lambda i: base[i].clone().requires_grad_(),
        lambda i: base[i].to_sparse(),
        lambda i: torch.complex(base[i], base[i]).conj(),
        lambda i: torch.tensor(i),
    ]
    found = fetch(lambda i: {"all": [make(i) for make in made], "at": (i, f"{i}", np.float32(i))})
    for index, sample in enumerate(found):
        assert sample["at"] == (index, str(index), index)
        for tensor, make in zip(sample["all"], made, strict=True):
            assert (tensor.dtype, tensor.layout) == (make(index).dtype, make(index).layout)
            assert torch.equal(tensor.to_dense(), make(index).to_dense())
    found[0]["all"][0].add_(1)  # a script may write to its batch

    def kind(_: int) -> str:
        info: Any = get_worker_info()
        return type(info.dataset).__name__

    assert fetch(kind) == ["Samples"] * 6


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def own_error(_: int) -> None:
    class OwnError(Exception):  # cannot be pickled
        pass

    raise OwnError("no sample")


def ended(_: int) -> None:
    os._exit(3)


def local_function(index: int) -> Callable[[], int]:
    return lambda: index


def first_alone(index: int) -> int:
    return [0][index]


@pytest.mark.parametrize(
    ("sample", "error", "says"),
    [
        (local_function, ScriptError, r"num_workers=2.*pickle.*leave such a field out"),
        (own_error, RuntimeError, "OwnError: no sample"),
        (killed, RuntimeError, "DataLoader worker"),
        (ended, RuntimeError, "DataLoader worker"),
        (first_alone, IndexError, "list index out of range"),
    ],
    ids=["a field that cannot be pickled", "an exception that cannot", "killed", "ended", "an exception"],
)
def test_a_process_that_fails_fails_the_loop_within_seconds(
    fetch: Fetch, sample: Any, error: type[Exception], says: str
) -> None:
    began = time.monotonic()
    with pytest.raises(error, match=f"(?s){says}") as raised:
        fetch(sample)
    assert time.monotonic() - began < 20
    assert ("SIGKILL" in "".join(getattr(raised.value, "__notes__", ()))) == says.startswith("DataLoader")


def test_samples_do_not_pass_through_shared_memory(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small /dev/shm does not limit them."""

    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", full)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    assert [len(each) for each in fetch(lambda i: torch.zeros(i))] == list(range(6))
    with pytest.raises(RuntimeError, match="shared memory") as raised, explained():
        list(DataLoader(Samples(killed_by_memory), num_workers=1))  # type: ignore[arg-type]
    assert "mounted at /dev/shm" in raised.value.__notes__[0]


def killed_by_memory(_: int) -> None:
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device")


def test_a_data_set_that_fetches_several_samples_at_once_does_so_with_and_without_processes() -> None:
    class Together(Samples):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [("together", index) for index in indices]

    for processes in (0, 2):
        loading = Loading(Together(lambda i: i), processes)
        assert loading.fetch(INDICES) == [("together", index) for index in range(6)]
        loading.close()
