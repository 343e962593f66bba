# pyright: reportUnnecessaryTypeIgnoreComment=true
"""A user's calls as mypy and pyright see them in `make check`; nothing runs this file.

Each line that ignores an error is a mistake that both have to report: both report an ignore without an error.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset
from transformers import Trainer

import gradwire
from gradwire.integrations.accelerate import prepare
from gradwire.integrations.lightning import DDPStrategy, JobStrategy
from gradwire.integrations.transformers import DDPCallback, JobCallback


def script(layer: nn.Linear, own: torch.optim.SGD, data: TensorDataset) -> None:
    """A loop of the user's."""
    job = gradwire.connect("host:50051", compressor="4bit", worker_id="w0", threads=2)
    gradwire.connect("host:50051", compresor="4bit")  # type: ignore[call-arg]
    gradwire.connect(threads="two")  # type: ignore[arg-type]

    model, optimizer = job.attach(layer, own, clip_norm=1.0, overlap="off", frozen="local")
    assert_type(model, nn.Linear)
    job.attach(layer, own, clipnorm=1.0)  # type: ignore[call-arg]
    job.attach(layer, own, steps="remote")  # type: ignore[arg-type]

    assert_type(job.follow(StepLR(own, 3), each="epoch"), StepLR)
    job.follow(StepLR(own, 3), each="batch")  # type: ignore[arg-type]

    for epoch in job.epochs(3, start=1):
        assert_type(epoch, int)
        for (x,) in job.batches(data, batch_size=8, accumulate=2):
            loss: torch.Tensor = model(x).sum()
            loss.backward()
            optimizer.step()
            job.log(loss=loss, rate=0.1)
    job.batches(data, batchsize=8)  # type: ignore[call-arg]
    job.steps([data], per_epoch="all")  # type: ignore[arg-type]
    job.log(loss="low")  # type: ignore[arg-type]
    assert_type(job.metrics, dict[str, float])
    print(job.world)  # type: ignore[attr-defined]


def frameworks(job: gradwire.Job, trainer: Trainer, accelerator: Accelerator, parts: Any) -> None:
    """The classes for each framework."""
    DDPStrategy("4bit", seed=3, exchange="gather", find_unused_parameters=True)
    DDPStrategy("4bit", sede=3)  # type: ignore[call-arg]
    JobStrategy(job, steps="local", device="cuda:0", checkpoint_io=None)
    JobStrategy(job, step="local")  # type: ignore[call-arg]
    JobStrategy("host:50051")  # type: ignore[arg-type]
    DDPCallback(trainer, "topk:ratio=10", seed=3)
    DDPCallback(trainer, compresor="4bit")  # type: ignore[call-arg]
    JobCallback(trainer, job, steps="local")
    JobCallback(trainer, steps="local")  # type: ignore[call-arg]
    prepare(accelerator, *parts, compressor="4bit", seed=3)
    prepare(accelerator, *parts, compresor="4bit")  # type: ignore[call-arg]
