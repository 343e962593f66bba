"""gc-bench step: its layer tables, what its layers compute, and what is made of samples and traces."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.benchmarks.layers import layers, loss, shapes
from gradwire.benchmarks.star import Star
from gradwire.benchmarks.step import WARM_UP, Recorder, Sample, memory_and_cpu, summarize, traced
from gradwire.worker.tasks.task import TaskSpecError


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("vgg16", 32, 138_357_544),
        ("vgg19", 38, 143_667_240),
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
    network = layers("5x40", 0.05, str(tmp_path))
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
        found: Any = loss(network)
        found.backward()
        assert time.monotonic() - began >= 0.05
        gradients.append([weight.grad.clone() for weight in network.parameters() if weight.grad is not None])
    assert order[:5] == [f"layer{number}" for number in (4, 3, 2, 1, 0)]
    assert all(len(each) == 5 and all(torch.count_nonzero(g) == 40 for g in each) for each in gradients)
    assert not torch.equal(gradients[0][0], gradients[1][0])
    assert not torch.equal(gradients[0][0], gradients[0][1])
    ((first, second),) = traced(tmp_path)
    assert first[0] < first[1] <= second[0] < second[1]


def test_a_row_is_made_of_the_counted_steps_alone() -> None:
    """Steps of a second, of which half is computation; the server gets 1 MB, evenly after the first 0.2 s."""
    recorder = Recorder(Star(["server", "worker-0"], 16), ["server", "worker-0"])
    steps = WARM_UP + 5
    trace = [(float(step), step + 0.5) for step in range(steps)]
    trace[0] = (-20.0, -19.5)  # kernels are compiled
    for tenth in range(-1, steps * 10):
        whole, part = divmod(tenth, 10)
        came = 1_000_000 * whole + 125_000 * max(0, part - 2)
        recorder.samples.append(Sample(tenth / 10, {"server": (came, 0), "worker-0": (0, came // 2)}))
        recorder.cpu.append((tenth / 10, tenth / 100))
    recorder.peak_bytes |= {"server": 7, "worker-0": 5}
    row = summarize("4bit", ["server", "worker-0"], [trace, trace], recorder, mbit=16)
    assert (row.step_seconds, row.steps, row.busiest) == (1.0, 4, "server")
    assert (row.bytes_in, row.bytes_out) == (1_000_000, 0)
    assert row.computing_share == pytest.approx(3 / 8)
    assert row.link_seconds == pytest.approx(0.5)
    assert row.cpu_seconds == pytest.approx(0.1)
    assert (row.server_peak_bytes, row.worker_peak_bytes) == (7, 5)


def test_memory_and_cpu_of_a_process_and_of_none() -> None:
    taken = memory_and_cpu(os.getpid())
    assert taken is not None
    assert taken[0] > 10_000_000
    assert taken[1] > 0.1
    assert memory_and_cpu(2**22 + 1) is None
