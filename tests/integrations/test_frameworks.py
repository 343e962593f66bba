"""The hook of gradwire.ddp in frameworks, with two processes over gloo."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import forkserver
import pytest
import torch
import torch.distributed as dist
from daemons import Daemon, Daemons
from torch import nn
from torch._C._distributed_c10d import TCPStore  # as `torch.distributed` has it
from torch.nn.parallel import DistributedDataParallel

import gradwire.ddp
from gradwire import ScriptError
from gradwire.ddp import HookState
from gradwire.integrations import hooks

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = Path(__file__).parent / "programs"
FRAMEWORKS = ["lightning", "accelerate", "transformers"]
# Imported once, before processes are forked.
IMPORTED = tuple(f"gradwire.integrations.{name}" for name in FRAMEWORKS)
RANKS = 2


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemons]:
    started = Daemons(functools.partial(forkserver.Forked, also=(*IMPORTED, "sklearn.datasets")))
    try:
        yield started
    finally:
        started.end()
        forkserver.end()


def outputs(daemons: Daemons, folder: Path, program: str, *arguments: str) -> str:
    """The lines that two ranks print, which have to end without an error.

    They meet at a store of the test's own, as at that of torchrun's agent, so that its port is free.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROGRAMS), os.environ.get("PYTHONPATH")])),
    }
    ranks: list[Daemon] = [
        daemons.plain(program, *arguments, environ={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    codes = [rank.wait() for rank in ranks]
    said = "\n".join(rank.log for rank in ranks)
    assert codes == [0] * RANKS, said
    return said


@pytest.mark.xdist_group("frameworks")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_example_trains_with_at_most_four_lines_more(
    daemons: Daemons, tmp_path: Path, framework: str
) -> None:
    path = EXAMPLES / f"{framework}_digits.py"
    assert 0 < len(re.findall(r"# \+$", path.read_text(), re.M)) <= 4
    more = ("--folder", str(tmp_path)) if framework == "transformers" else ()
    said = outputs(daemons, tmp_path, "example", str(path), "--epochs", "4", *more)
    (accuracy,) = re.findall(r"^accuracy ([\d.]+)$", said, re.M)
    assert float(accuracy) > 0.4  # by chance 0.1
    assert "without an exchange" not in said


@pytest.mark.xdist_group("frameworks")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_rank_continues_from_its_own_residuals(daemons: Daemons, tmp_path: Path, framework: str) -> None:
    """With accumulation, clipping and bfloat16 as the framework has them."""
    said = outputs(daemons, tmp_path, "resumed", framework, str(tmp_path))
    assert sorted(re.findall(r"^rank (\d) continues at step (\d)$", said, re.M)) == [("0", "2"), ("1", "2")]
    assert "residuals" not in said  # of another rank, or without a file
    assert "exchanged twice" not in said


@pytest.fixture
def model(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(3, 2))
    dist.destroy_process_group()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_register_names_tensors_as_the_wrapped_module_does(model: DistributedDataParallel) -> None:
    state = gradwire.ddp.register(model, "topk:ratio=2", optimizer=sgd(model), seed=3)
    model(torch.ones(1, 3)).sum().backward()
    assert state.state_dict()["residuals"].keys() == {"weight", "bias"}
    with pytest.raises(RuntimeError, match="once"):
        gradwire.ddp.register(model)


def test_register_refuses_a_model_that_is_not_wrapped() -> None:
    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got Linear; start at least two"):
        gradwire.ddp.register(nn.Linear(3, 2))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_what_the_hook_cannot_do_in_a_framework_is_refused(
    model: DistributedDataParallel, caplog: pytest.LogCaptureFixture
) -> None:
    one = sgd(model)
    with pytest.raises(ScriptError, match=r"expected one optimizer, got 2.*gradwire\.ddp\.register"):
        hooks.registered(model, [one, one], "4bit", ranks=2, scaler=None)
    with pytest.raises(ScriptError, match=r"GradScaler.*use bfloat16"):
        hooks.registered(model, [one], "4bit", ranks=2, scaler=object())
    assert hooks.registered(model, [one], "4bit", ranks=1, scaler=None) is None
    assert "one process" in caplog.text


@pytest.mark.parametrize("name", ["gradwire-{}.pt", "last.ckpt.gradwire-{}"])
def test_a_rank_without_a_file_is_named_and_shares_the_others_counters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    other, own = HookState("4bit"), HookState("4bit")
    other.steps = 7
    hooks.read(own, tmp_path / name.format(1))
    assert own.steps == 0, "no rank has a file"
    hooks.write(other, tmp_path / name.format(0))
    hooks.read(own, tmp_path / name.format(1))
    assert own.steps == 7
    assert f"{name.format(1)}: no such file, so this rank's residuals begin anew" in caplog.text
