"""The file that a server writes is the whole model, and the one that was evaluated (findings F5 and U2)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from daemons import TASKS, Daemons, Server, asked, poll
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from test_training import finished

sys.path.append(str(TASKS))
import script_loops
from small_tasks import Stateful

from gradwire.worker.tasks import load

EXAMPLES = Path(__file__).parents[2] / "examples"

STATEFUL = "small_tasks:stateful"


def evaluated(daemons: Daemons, task: str, path: Path) -> Mapping[str, float]:
    """Return the metrics that a process measures with nothing but the file."""
    process = daemons.plain("evaluate_file", task, str(path), environ={"PYTHONPATH": python_path()})
    found: dict[str, float] = json.loads(process.wait_for("^metrics (.*)")[1])
    return found


def python_path() -> str:
    return f"{TASKS}:{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}"


def job(daemons: Daemons, output: Path, *arguments: str, task: str = STATEFUL, workers: int = 3) -> Server:
    return daemons.server(
        *("--task", task, "--min-workers", str(workers), "--epochs", "2", "--batch-size", "4"),
        *("--learning-rate", "0.02", "--output", str(output), *arguments),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mode", "sync", "--downlink", "4bit"),
        ("--mode", "sync", "--overlap", "both", "--buffers", "rank0"),
        ("--mode", "stale:bound=1", "--buffers", "local", "--downlink", "4bit"),
        ("--mode", "async"),
        ("--mode", "local:steps=2", "--downlink", "4bit"),
        ("--mode", "coded:redundancy=2"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_the_file_is_the_whole_model_that_was_evaluated(
    daemons: Daemons, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    output = tmp_path / "model.safetensors"
    server = job(daemons, output, *arguments)
    compressor = "none" if "coded" in arguments[1] else "4bit"
    workers = daemons.workers(server, 3, "--compressor", compressor)
    assert [worker.wait() for worker in workers] == [0] * 3, [worker.log for worker in workers]
    reply = finished(server)
    assert evaluated(daemons, STATEFUL, output) == reply.evaluations[-1].metrics
    torch.manual_seed(1)
    at_first, written = Stateful().state_dict(), load_file(output)
    for name in ("frozen.weight", "frozen.bias", "narrow", "flag"):
        assert torch.equal(written[name], at_first[name]), name
    for name in ("void", "frozen_void", "empty"):  # have no elements
        assert (written[name].shape, written[name].dtype) == (at_first[name].shape, at_first[name].dtype)
    assert torch.equal(written["again.weight"], written["inner.weight"])
    assert not torch.equal(written["norm.running_mean"], at_first["norm.running_mean"])
    assert written["norm.num_batches_tracked"] > 0


@pytest.mark.parametrize(
    "mode", ["sync", "sync:redundancy=3", "local:steps=2", "async", "coded:redundancy=2"]
)
def test_batchnorm_trains_where_an_epoch_has_a_remainder_of_one_sample(
    daemons: Daemons, tmp_path: Path, mode: str
) -> None:
    task = f"{STATEFUL}:samples=73"
    server = job(daemons, tmp_path / "model.safetensors", "--mode", mode, task=task)
    workers = daemons.workers(server, 3, "--compressor", "none")
    assert [worker.wait() for worker in workers] == [0] * 3, [worker.log for worker in workers]
    reply = finished(server)
    assert reply.epoch == 2
    assert reply.repeated_samples == 0


@pytest.mark.parametrize("buffers", ["mean", "local"])
def test_a_script_logs_what_the_saved_model_measures(daemons: Daemons, tmp_path: Path, buffers: str) -> None:
    output = tmp_path / "model.safetensors"
    server = daemons.server(
        *("--script", "--min-workers", "3", "--epochs", "2", "--batch-size", "8", "--seed", "3"),
        *("--output", str(output), "--downlink", "4bit", "--buffers", buffers),
    )
    programs = daemons.programs("script_loops", "evaluated", server.address, count=3)
    assert [program.wait() for program in programs] == [0] * 3, [program.log for program in programs]
    reply = finished(server)
    model = script_loops.normed()
    model.load_state_dict(load_file(output), strict=True)
    torch.set_num_threads(1)
    assert reply.evaluations[-1].metrics["error"] == script_loops.error_of(model)


def test_a_worker_that_comes_back_has_the_buffers_of_the_others(daemons: Daemons, tmp_path: Path) -> None:
    """Its own statistics would be of one step: an evaluation with them would be far off (finding U2)."""
    output = tmp_path / "model.safetensors"
    task = f"{STATEFUL}:slow=0.02,samples=480"
    server = job(daemons, output, "--downlink", "4bit", "--lease-seconds", "2", task=task, workers=2)
    first, second = daemons.workers(server, 2)
    first.wait_for("ready for work")
    poll(lambda: asked(server).version > 5, "no progress")
    first.process.kill()
    again = daemons.worker(server.address, "--worker-id", "w0")
    reply = finished(server)
    assert [again.wait(), second.wait()] == [0, 0], again.log
    assert evaluated(daemons, task, output) == reply.evaluations[-1].metrics
    written = load_file(output)
    mean = torch.nn.functional.linear(shifted(480), written["frozen.weight"], written["frozen.bias"]).mean(0)
    assert (written["norm.running_mean"] - mean).abs().max() < 0.5 * mean.abs().max()


def shifted(samples: int) -> torch.Tensor:
    """The inputs of the task."""
    import numpy as np

    inputs: torch.Tensor = load(f"{STATEFUL}:samples={samples}").batch(np.arange(samples))[0]
    return inputs


@pytest.mark.parametrize(
    "task",
    [
        "digits",
        "digits:model=cnn",
        "characters:characters=9000,context=16,layers=1,width=32",
        "spirals:task:points=300",
    ],
)
def test_every_task_loads_what_is_written(
    daemons: Daemons, tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    output = tmp_path / "model.safetensors"
    server = daemons.server(
        *("--task", task, "--epochs", "1", "--batch-size", "128", "--output", str(output))
    )
    worker = daemons.worker(server.address, "--task", task, environ={"PYTHONPATH": python_path()})
    assert worker.wait() == 0, worker.log
    reply = finished(server)
    assert evaluated(daemons, task, output) == reply.evaluations[-1].metrics


def test_the_best_version_is_kept_as_it_was_evaluated(daemons: Daemons, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    server = job(daemons, output, "--downlink", "4bit", "--keep", "best:spread:max", "--epochs", "5")
    workers = daemons.workers(server, 3)
    assert [worker.wait() for worker in workers] == [0] * 3, [worker.log for worker in workers]
    reply = finished(server)
    best = max(reply.evaluations, key=lambda each: each.metrics["spread"])
    kept = tmp_path / "model.best.safetensors"
    assert {*tmp_path.iterdir()} == {output, kept}
    assert evaluated(daemons, STATEFUL, kept) == best.metrics
    assert evaluated(daemons, STATEFUL, output) == reply.evaluations[-1].metrics
