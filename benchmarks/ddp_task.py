"""A peer of `reach`: a task under torch's DistributedDataParallel over gloo with AdamW, as a program.

    python -m gradwire.benchmarks.ddp_task FOLDER STEPS SETUP RANK WORLD ADDRESS HOOK

SETUP is a `Setup` as JSON, and HOOK as for `ddp`. Rank 0 writes `Trained` as JSON to FOLDER/trained.json. The
ranks take their samples in turn from one shuffled order. The gradients' mean is clipped to norm 1. AdamW
decays parameters of two and more dimensions.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..optim.optimizer import parse_optimizer
from ..optim.steps import AdamW
from ..server.job.schedule import Passed, parse_schedule
from ..worker.tasks import load
from .ddp import distributed

RESULT = "trained.json"
WARM_UP = 10  # steps that the median does not count
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The training of a peer.

    Attributes:
        task: spec of a task that reports a loss.
        batch_size: samples of each rank in a step.
        optimizer: spec of AdamW.
        learning_rate: AdamW's rate, before the schedule.
        schedule: spec of the schedule, over `all_steps`.
        all_steps: number of steps of a whole training. A run may take fewer.
        seed: seed of the initial parameters and of the order of the samples.
    """

    task: str
    batch_size: int
    optimizer: str
    learning_rate: float
    schedule: str
    all_steps: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run.

    Attributes:
        step_seconds: median seconds of a step, without the first ten.
        loss: validation loss after the last step.
    """

    step_seconds: float
    loss: float


def main(arguments: list[str]) -> int:
    """Train for a number of steps; return the exit code.

    Args:
        arguments: the program's arguments, which the head of this file lists.
    """
    folder, steps, text, rank, world, address, hook = arguments
    setup = Setup(**json.loads(text))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=int(world))
    torch.manual_seed(setup.seed)
    task = load(setup.task)
    network = task.model()
    module = distributed(network, hook)
    matrices = [each for each in network.parameters() if each.dim() > 1]
    vectors = [each for each in network.parameters() if each.dim() < 2]
    groups: list[Any] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adamw = parse_optimizer(setup.optimizer)
    assert isinstance(adamw, AdamW)
    optimizer = torch.optim.AdamW(
        groups, setup.learning_rate, (adamw.beta1, adamw.beta2), adamw.eps, adamw.weight_decay
    )
    schedule = parse_schedule(setup.schedule)
    generator = np.random.default_rng(setup.seed)
    together = setup.batch_size * int(world)
    order = np.empty(0, np.int64)
    begun: list[float] = []
    for step in range(int(steps)):
        begun.append(time.perf_counter())
        if len(order) < together:
            order = generator.permutation(task.train_samples)
        taken, order = order[:together], order[together:]
        passed = Passed(epochs=0.0, steps=step + 0.5, of_job=(step + 0.5) / setup.all_steps)
        for group in optimizer.param_groups:
            group["lr"] = setup.learning_rate * schedule.factor(passed)
        optimizer.zero_grad()
        loss: Any = task.loss(module, task.batch(taken[int(rank) :: int(world)]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP_NORM)
        optimizer.step()
    begun.append(time.perf_counter())
    dist.barrier()
    if int(rank) == 0:
        with torch.no_grad():
            found = task.evaluate(network)["loss"]
        seconds = statistics.median(np.diff(begun[WARM_UP:]).tolist())
        (Path(folder) / RESULT).write_text(
            json.dumps(asdict(Trained(step_seconds=seconds, loss=found))), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # an orderly end is at times an abort in a thread of gloo
