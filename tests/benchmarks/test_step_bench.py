"""gc-bench step: its layer tables, what its layers compute, and what is made of samples and traces."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.benchmarks import ddp
from gradwire.benchmarks.arguments import BenchError
from gradwire.benchmarks.cli import main
from gradwire.benchmarks.layers import shapes, task
from gradwire.benchmarks.recorder import LinkRecorder, ProcessUsage, Sample, memory_and_cpu
from gradwire.benchmarks.shaped import WARM_UP, Recorded
from gradwire.benchmarks.star import Star
from gradwire.benchmarks.step import HEADINGS, cells, summarize
from gradwire.benchmarks.traces import ComputedStep, read
from gradwire.common.exits import Exit
from gradwire.worker.tasks.task import TaskSpecError


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("vgg16", 32, 138_357_544),
        ("vgg19", 38, 143_667_240),
        ("vgg16-cifar", 54, 14_728_266),
        ("vgg19-cifar", 66, 20_086_692),
        ("inception-cifar", 78, 1_652_826),
        ("resnet50", 161, 25_557_032),
        ("resnet20", 59, 269_722),
        ("resnet56", 167, 853_018),
        ("resnet110", 329, 1_727_962),
        ("200x4096", 200, 200 * 4096),
        ("3x7", 3, 21),
    ],
)
def test_the_layer_tables_have_the_sizes_of_their_papers(model: str, tensors: int, parameters: int) -> None:
    found = shapes(model)
    assert (len(found), sum(map(math.prod, found))) == (tensors, parameters)


@pytest.mark.parametrize("model", ["alexnet", "0x5", "5x", "x", "-1x5"])
def test_a_model_that_is_not_known_is_refused(model: str) -> None:
    with pytest.raises(TaskSpecError, match=r"expected one of vgg16, .* or NxSIZE"):
        shapes(model)


def test_layers_take_their_time_and_yield_gradients_from_the_last_to_the_first(tmp_path: Path) -> None:
    work = task("5x40", 0.05, trace=str(tmp_path))
    network = work.model()
    order: list[str] = []

    def noted(name: str, weight: torch.Tensor) -> None:
        order.append(name)

    for name, weight in network.named_parameters():
        hooked: Any = weight
        hooked.register_post_accumulate_grad_hook(partial(noted, name))
    gradients: list[list[torch.Tensor]] = []
    for _ in range(2):
        network.zero_grad()
        began = time.monotonic()
        found: Any = work.loss(network, work.batch(np.arange(1)))
        found.backward()
        assert time.monotonic() - began >= 0.05
        gradients.append([weight.grad.clone() for weight in network.parameters() if weight.grad is not None])
    assert order[:5] == [f"layer{number}" for number in (4, 3, 2, 1, 0)]
    assert all(len(each) == 5 and all(torch.count_nonzero(g) == 40 for g in each) for each in gradients)
    assert not torch.equal(gradients[0][0], gradients[1][0])
    assert not torch.equal(gradients[0][0], gradients[0][1])
    ((first, second),) = read(tmp_path)
    assert first.began < first.ended <= second.began < second.ended
    assert list(first.produced) == sorted(first.produced, reverse=True)
    assert first.produced[-2] - first.produced[-1] >= 0.05 * 2 / 3 / 5


def test_the_computation_runs_by_itself(tmp_path: Path) -> None:
    assert ddp.main(["5x40", "0.01", str(tmp_path), "3"]) == 0
    ((*steps,),) = read(tmp_path)
    assert [step.seconds >= 0.01 for step in steps] == [True] * 3


def test_a_row_is_made_of_the_counted_steps_alone() -> None:
    """Steps of a second, of which half is computation; the server gets 1 MB, evenly after the first 0.2 s."""
    nodes = ["server", "worker-0"]
    recorder = LinkRecorder(Star(nodes, 16), nodes)
    steps = WARM_UP + 5
    trace = [ComputedStep(float(step), (step + 0.5, step + 0.3)) for step in range(steps)]
    trace[0] = ComputedStep(-20.0, (-19.5, -19.7))  # kernels are compiled
    for tenth in range(-1, steps * 10):
        whole, part = divmod(tenth, 10)
        came = 1_000_000 * whole + 125_000 * max(0, part - 2)
        recorder.samples.append(Sample(tenth / 10, {"server": (came, 0), "worker-0": (0, came // 2)}))
        late = 90 if tenth > (steps - 1) * 10 else 0  # when the job ends
        recorder.usages.append(
            ProcessUsage(tenth / 10, tenth / 100, {"server": 7 + late, "worker-0": 5 + late})
        )
    row = summarize("4bit", "off", Recorded(nodes, recorder, [trace, trace]), mbit=16)
    assert (row.first_seconds, row.step_seconds, row.steps, row.busiest) == (21.0, 1.0, 4, "server")
    assert (row.bytes_in, row.bytes_out) == (1_000_000, 0)
    assert row.computing_share == pytest.approx(3 / 8)
    assert row.link_seconds == pytest.approx(0.5)
    assert row.cpu_seconds == pytest.approx(0.1)
    assert (row.server_peak_bytes, row.worker_peak_bytes) == (7, 5)
    assert len(cells(row, None)) == len(HEADINGS)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(BenchError, match="only 4 steps were taken"):
        Recorded(["server"], LinkRecorder(Star([], 1), []), [[ComputedStep(0.0, (1.0,))] * 4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "auto"], "expected one --runs"),
        (["--model", "alexnet"], "--model: expected one of"),
        (["--overlap", "off,on"], "expected one or more of off,backward,both"),
        (["--hooks", "5bit"], "unknown compressor '5bit'"),
        (["--hooks", "4bit/owner"], "--hooks: exchange: expected auto, gather, owners, got 'owner'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["step", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == Exit.USAGE
    assert message in capsys.readouterr().err


def test_memory_and_cpu_of_a_process_and_of_none() -> None:
    taken = memory_and_cpu(os.getpid())
    assert taken is not None
    assert taken[0] > 10_000_000
    assert taken[1] > 0.1
    assert memory_and_cpu(2**22 + 1) is None
