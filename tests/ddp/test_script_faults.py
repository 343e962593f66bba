"""Scripts that use gradwire.ddp in a way that would train something else are told. One rank is enough."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.ddp


@pytest.fixture(autouse=True)
def _group(  # pyright: ignore[reportUnusedFunction]
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    caplog.set_level(logging.WARNING)  # another test of this process may have enabled more
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(
    compressor: str = "topk:ratio=10", *, watched: bool = True, exchange: Any = "auto"
) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(20, 10, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = gradwire.ddp.state(compressor, optimizer=optimizer if watched else None, exchange=exchange)
    model.register_comm_hook(state, gradwire.ddp.hook)  # pyright: ignore[reportUnknownMemberType]
    return model, optimizer, state


def step(model: Any, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    (factor * model(torch.arange(20.0).repeat(2, 1)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_gradients_that_no_step_follows_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = made()
    for _ in range(3):
        step(model, optimizer)
    assert not caplog.messages
    for _ in range(3):
        model(torch.ones(2, 20)).sum().backward()
        optimizer.zero_grad()
        step(model, optimizer)
    (said,) = caplog.messages
    assert "exchanged twice without optimizer.step()" in said
    assert "no_sync()" in said


def test_the_remedies_for_discarded_gradients_leave_nothing_in_the_residual(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights: list[torch.Tensor] = []
    for remedy in ("plain", "no_sync", "frozen"):
        model, optimizer, _ = made()
        for _ in range(3):
            inputs = torch.ones(2, 20, requires_grad=True)
            if remedy == "no_sync":
                with model.no_sync():
                    model(inputs).sum().backward()
                optimizer.zero_grad()
            elif remedy == "frozen":
                model.module.requires_grad_(False)
                model.module(inputs).sum().backward()
                model.module.requires_grad_(True)
            step(model, optimizer)
        weights.append(model.module.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not caplog.messages


def test_a_void_step_that_is_skipped_discards_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, state = made()
    step(model, optimizer)
    (model(torch.full((2, 20), torch.inf))).sum().backward()  # a GradScaler would skip the step
    optimizer.zero_grad()
    step(model, optimizer)
    assert state.voided == 1
    assert not any("exchanged twice" in each for each in caplog.messages)


def test_a_hook_that_ddp_never_calls_is_named_at_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning and Accelerate take the hook on a CPU, and do not register it."""
    model = DistributedDataParallel(nn.Linear(20, 10, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = gradwire.ddp.state("4bit", optimizer=optimizer)
    for _ in range(2):
        step(model, optimizer)
    (said,) = caplog.messages
    assert "DDP has not called gradwire.ddp.hook" in said
    assert "model.register_comm_hook(state, gradwire.ddp.hook)" in said
    assert state.bytes_sent == 0


class Wrapper(torch.optim.Optimizer):
    """A wrapper like Accelerate's, without the hooks of its base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults


def test_the_optimizer_in_a_frameworks_wrapper_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Linear(20, 10, bias=False)
    inner = torch.optim.SGD(network.parameters(), lr=1.0)
    gradwire.ddp.state("4bit", optimizer=Wrapper(inner))
    step(network, inner)
    assert "DDP has not called gradwire.ddp.hook" in caplog.text


def test_the_state_of_another_rank_begins_anew_with_the_same_counters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer, state = made("dgc:ratio=10")
    for _ in range(3):
        step(model, optimizer)
    saved = state.state_dict()
    assert saved["rank"] == 0
    for rank, kept in ((0, True), (1, False)):
        caplog.clear()
        model, optimizer, state = made("dgc:ratio=10")
        state.load_state_dict({**saved, "rank": rank})
        assert state.state_dict()["rank"] == rank  # nothing has happened to it yet
        step(model, optimizer, factor=0.0)
        assert state.steps == 4
        assert bool(state.state_dict()["residuals"]["parameter 0"].any()) == kept
        assert state.state_dict()["rank"] == 0
        assert any("is that of rank 1" in each for each in caplog.messages) != kept


@pytest.mark.parametrize(("ranks", "kept"), [(1, True), (2, False)])
def test_residuals_of_means_begin_anew_among_other_ranks(
    caplog: pytest.LogCaptureFixture, ranks: int, kept: bool
) -> None:
    model, optimizer, state = made("4bit", exchange="owners")
    for _ in range(3):
        step(model, optimizer)
    saved = state.state_dict()
    assert saved["owned"]["ranks"] == 1
    assert saved["owned"]["residuals"]["parameter 0"].any()
    model, optimizer, state = made("4bit", exchange="owners")
    state.load_state_dict({**saved, "owned": {**saved["owned"], "ranks": ranks}})
    step(model, optimizer, factor=0.0)
    after = state.state_dict()
    assert torch.equal(after["residuals"]["parameter 0"], saved["residuals"]["parameter 0"])
    assert bool(after["owned"]["residuals"]["parameter 0"].any()) == kept
    assert ("is of 2 ranks, and now there are 1" in caplog.text) != kept


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_state_is_neither_copied_nor_pickled(copying: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"neither copied nor pickled.*save state\.state_dict\(\)"):
        copying(gradwire.ddp.state("4bit"))
