"""Frameworks with the hook of gradwire.ddp, over gloo, and as workers of a job; two processes each."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forkserver
import pytest
import torch
import torch.distributed as dist
from daemons import Daemon, Daemons
from torch import nn
from torch._C._distributed_c10d import TCPStore  # as `torch.distributed` has it
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import gradwire.ddp
from gradwire import ScriptError
from gradwire.ddp import HookState
from gradwire.integrations import hooks, jobs
from gradwire.worker.script.length import Batches
from gradwire.worker.script.terms import check_alone

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
        **offline(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return logs(
        [
            daemons.plain(
                program, *arguments, environ={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(RANKS)
        ]
    )


def offline(folder: Path) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROGRAMS), os.environ.get("PYTHONPATH")])),
    }


def logs(processes: list[Daemon], *, killed: int = 0) -> str:
    codes = sorted(each.wait() for each in processes)
    said = "\n".join(each.log for each in processes)
    assert codes == [-signal.SIGKILL] * killed + [0] * (len(processes) - killed), said
    return said


def of_job(
    daemons: Daemons,
    folder: Path,
    program: str,
    *arguments: str,
    server: str,
    workers: int = RANKS,
    killed: int = 0,
) -> tuple[str, Daemon]:
    """The lines of the workers, which have to end without an error unless they are killed; and the server."""
    of = daemons.server("--script", "--min-workers", str(workers), *server.split())
    started = [
        daemons.plain(
            *(program, *arguments),
            environ={**offline(folder), "GC_SERVER": of.address, "GC_WORKER_ID": f"w{number}"},
        )
        for number in range(workers)
    ]
    return logs(started, killed=killed), of


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


SERVERS = {
    "lightning": "--epochs 2 --batch-size 32",
    "accelerate": "--epochs 2 --batch-size 32",
    "transformers": "--epochs 2 --batch-size 16",
}


@pytest.mark.xdist_group("frameworks")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_example_trains_in_a_job_with_at_most_four_lines_more(
    daemons: Daemons, tmp_path: Path, framework: str
) -> None:
    path = EXAMPLES / f"{framework}_digits.py"
    assert 0 < len(re.findall(r"# \+ job$", path.read_text(), re.M)) <= 4
    more = ("--folder", str(tmp_path)) if framework == "transformers" else ()
    arguments = str(path), "--form", "job", "--epochs", "2", *more
    said, _ = of_job(daemons, tmp_path, "example", *arguments, server=SERVERS[framework])
    accuracies = {float(each) for each in re.findall(r"^accuracy ([\d.]+)$", said, re.M)}
    assert len(accuracies) == 1, "the same model on both workers"
    assert accuracies.pop() > 0.2  # by chance 0.1


@pytest.mark.xdist_group("frameworks")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_worker_in_a_framework_trains_as_the_framework_alone(
    daemons: Daemons, tmp_path: Path, framework: str
) -> None:
    """With accumulation, clipping, a schedule and recomputed activations, in Accelerate with bfloat16."""
    epochs = 9 if framework == "transformers" else 5  # its Trainer ends after 5
    options = f"--epochs {epochs} --batch-size 4 --compressor none --clip-norm 0.5"
    said, server = of_job(daemons, tmp_path, "in_job", framework, str(tmp_path), server=options)
    found = re.findall(r"^changed ([\d.]+), differs (\S+)$", said, re.M)
    assert len(found) == RANKS
    for changed, differs in found:
        assert float(changed) > 0.5
        assert float(differs) < (0.02 if framework == "accelerate" else 1e-4), said
    assert "leave after the backward pass" not in said, (
        "the framework has clipped, or several passes were sent"
    )
    if framework != "accelerate":
        assert sorted(re.findall(r"^rank \d writes: \w+$", said, re.M)) == [
            "rank 0 writes: True",
            "rank 1 writes: False",
        ]
        metric = "valid_loss" if framework == "lightning" else "eval_loss"
        server.wait_for(rf"5( epochs)?, version 5: .*{metric} 0\.")


@pytest.mark.xdist_group("frameworks")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_others_train_to_the_end_when_a_worker_is_killed(
    daemons: Daemons, tmp_path: Path, framework: str
) -> None:
    """Also without rank 0, which writes checkpoints."""
    options = "--epochs 5 --batch-size 4 --compressor none --lease-seconds 3"
    arguments = "in_job", framework, str(tmp_path), "0"
    said, server = of_job(daemons, tmp_path, *arguments, server=options, workers=3, killed=1)
    found = dict(re.findall(r"^rank (\d) has (\S+)$", said, re.M))
    assert found.keys() == {"1", "2"}
    assert len({*found.values()}) == 1, "the same model on both"
    server.wait_for("rank 0 .* is lost")
    server.wait_for("the job is finished")


# Each setting with the end of its training, or what the refusal says.
SETTINGS: dict[str, dict[str, str]] = {
    "lightning": {
        "callbacks": "as alone",
        "endless": "ScriptError: .*max_epochs=-1 without max_steps.*set max_epochs",
        "manual": "as alone",
        "in turn": "as alone",
        "averaging": "ScriptError: .*StochasticWeightAveraging.*WeightAveraging callback",
        "several": "ScriptError: .*devices=2, .*one device; set both to 1.*algorithm='value'.*choose 'norm'",
        "finder": "ScriptError: .*LearningRateFinder.*in a trainer without JobStrategy",
        "frequency": "ScriptError: .*frequency of a scheduler.*use 1",
        "length": r"ScriptError: job.epochs\(5\): the job has 4",
        "max_steps": "as alone",
        "loaders": "ScriptError: .*several training loaders.*StackDataset",
        "plateau": "ScriptError: .*ReduceLROnPlateau",
        "reload": "ScriptError: .*reload_dataloaders_every_n_epochs.*leave it out",
        "resume": "ScriptError: .*ckpt_path.*--state",
        "several optimizers": "ScriptError: .*expected one optimizer, got 2.*in turn",
        "sync_batchnorm": "ScriptError: .*sync_batchnorm.*leave it out",
        "twice": "ScriptError: .*trained in its job before",
    },
    "accelerate": {
        "saved": "as alone",
        "continued": "as alone",
        "after": r"ScriptError: .*AcceleratedOptimizer wraps SGD.*attach the SGD \(.optimizer\) itself",
    },
    "transformers": {
        "callbacks": "as alone",
        "part of an epoch": "as alone",
        "adafactor": "ScriptError: .*Adafactor.*steps='local'",
        "batch size": "ScriptError: .*auto_find_batch_size",
        "best": "ScriptError: .*load_best_model_at_end.*--keep",
        "devices": "ScriptError: .*several GPUs in a process.*CUDA_VISIBLE_DEVICES",
        "length": r"ScriptError: job.epochs\(5\): the job has 4",
        "max_steps": "as alone",
        "plateau": "ScriptError: .*ReduceLROnPlateau",
        "resume": "ScriptError: .*resume_from_checkpoint.*--state",
        "twice": "ScriptError: .*trained in its job before",
    },
}


@pytest.mark.xdist_group("frameworks")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_setting_trains_as_in_the_framework_alone_or_is_refused_by_name(
    daemons: Daemons, tmp_path: Path, framework: str
) -> None:
    settings = SETTINGS[framework]

    def server(name: str) -> str:
        epochs = () if name == "max_steps" else ("--epochs", "4")
        return daemons.server("--script", *epochs, "--batch-size", "8", "--compressor", "none").address

    refusing = server("")  # no job of it begins, unless a trainer trains twice
    addresses = {
        name: refusing if ends.startswith("ScriptError") and name != "twice" else server(name)
        for name, ends in settings.items()
    }
    each = [f"{name}={address}" for name, address in addresses.items()]
    said = logs([daemons.plain("of_settings", framework, str(tmp_path), *each, environ=offline(tmp_path))])
    for name, ends in settings.items():
        assert re.search(rf"^{name}: {ends}", said, re.M), said


@pytest.mark.xdist_group("frameworks")
def test_two_optimizers_step_on_each_batch_as_the_refusal_says(daemons: Daemons, tmp_path: Path) -> None:
    said = outputs(daemons, tmp_path, "two_optimizers")
    assert said.count("the same as Lightning's DDP: True") == RANKS
    assert len(re.findall(r"refused: .*got 2.*gradwire\.ddp\.register\(model, compressor\)", said)) == RANKS


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


class FakeJob:
    """Two epochs of three batches, of a server that wants metrics of each."""

    mode = "sync"
    evaluating = True

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.options: dict[str, Any] = {}

    def epochs(self, _: int | None) -> Iterator[int]:
        for epoch in range(2):
            yield epoch
            self.calls.append("turned over")

    def batches(self, dataset: Any, **options: Any) -> Batches:
        self.options = options
        return Batches(lambda: (each for each in range(3)), lambda: 3, SimpleNamespace(dataset=dataset))

    def attach(self, model: nn.Module, optimizer: Any, *, clip_norm: float, steps: str) -> tuple[Any, Any]:
        self.calls.append((clip_norm, steps))
        return model, optimizer

    def __getattr__(self, name: str) -> Any:
        def called(*given: Any, **named: Any) -> None:
            self.calls.append((name, *given, *named.items()))

        return called


ROWS = TensorDataset(torch.zeros(6, 1))


def test_a_trainers_epochs_end_with_those_of_the_job() -> None:
    job: Any = FakeJob()
    rows = DataLoader(ROWS, batch_size=2, shuffle=True)
    loader = jobs.JobLoader(job, rows, epochs=2, accumulate=3, over=job.over)
    assert {"batch_size": 2, "accumulate": 3}.items() <= job.options.items()
    assert loader.batches.dataset is ROWS
    assert [*loader.batches] == [0, 1, 2]
    assert not job.calls, "the last step comes before the end of the epoch"
    loader.end_epoch()
    loader.evaluated({"loss": 0.5})
    assert [*loader.batches] == [0, 1, 2]
    assert job.calls == [("log", ("valid_loss", 0.5)), "turned over"]
    loader.finish()
    assert not [*loader.batches]
    assert job.calls[2:] == ["turned over", ("leave",), ("over",)]


def test_the_end_of_a_trainer_is_the_end_of_the_job() -> None:
    job: Any = FakeJob()
    loader = jobs.JobLoader(job, job.batches(ROWS), epochs=None, accumulate=1)
    assert next(iter(loader.batches)) == 0
    loader.finish()
    assert job.calls == [("stop", "the trainer has ended"), ("leave",)]


@pytest.mark.parametrize(
    ("mode", "steps", "clips"),
    [("sync", "server", True), ("sync", "local", False), ("local:steps=4", "server", False)],
)
def test_the_job_clips_where_the_server_steps(mode: str, steps: Any, clips: bool) -> None:
    job: Any = FakeJob()
    job.mode = mode
    layer = nn.Linear(1, 1)
    given: dict[str, Any] = {"clip_norm": 0.5, "steps": steps, "scaler": None}
    assert jobs.attach(job, layer, optimizer := sgd(layer), **given) == (optimizer, clips)
    assert job.calls == [(0.5 if clips else 0.0, steps)]


def test_what_a_job_cannot_do_in_a_framework_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job: Any = FakeJob()
    layer = nn.Linear(1, 1)
    optimizer = sgd(layer)
    weighted = DataLoader(ROWS, batch_size=2, sampler=WeightedRandomSampler([1.0] * 6, 6))
    with pytest.raises(ScriptError, match=r"WeightedRandomSampler decides.*job\.steps"):
        jobs.JobLoader(job, weighted, epochs=2, accumulate=1)
    with pytest.raises(ScriptError, match=r"got 2.*in groups"):
        jobs.single([optimizer, optimizer])
    with pytest.raises(ScriptError, match="ReduceLROnPlateau"):
        jobs.follow(job, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    given: dict[str, Any] = {"clip_norm": 0.0, "steps": "server"}
    with pytest.raises(ScriptError, match=r"float16.*use bfloat16"):
        jobs.attach(job, layer, optimizer, scaler=object(), **given)
    job.mode = "async"
    with pytest.raises(ScriptError, match=r"mode async.*--mode sync or local"):
        jobs.attach(job, layer, optimizer, scaler=None, **given)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", layer)
    with pytest.raises(ScriptError, match=r"wrapped in DistributedDataParallel.*without torchrun"):
        check_alone()
