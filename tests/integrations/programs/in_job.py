"""Trains in a framework as a worker of a job, then in the framework alone with all samples in each step.

`python in_job.py FRAMEWORK FOLDER` says whether both have the same parameters. Both accumulate, clip, follow
a schedule and recompute activations, as the framework has it. `python in_job.py FRAMEWORK FOLDER RANK` kills
the worker of that rank in the middle; the others say the sum of their parameters.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import gradwire
from gradwire.tests.integrations.programs.rows import Network, Rows

SAMPLES, BATCH, ACCUMULATED, WORKERS = 16, 4, 2, 2
STEPS = 5  # one in each epoch
CLIP = 0.5
PASSES = 3  # forward passes of a worker before it is killed


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)


def halving(step: int) -> float:
    return 0.5**step


def lightning(job: gradwire.Job | None, folder: Path, batch: int) -> nn.Module:
    """The closure of `optimizer.step` runs the backward pass."""
    import lightning.pytorch as pl

    from gradwire.integrations.lightning import JobStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(**batch)["loss"]
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
            self.log("loss", self.network(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self)
            return [optimizer], [{"scheduler": LambdaLR(optimizer, halving), "interval": "step"}]

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="auto" if job is None else JobStrategy(job), max_epochs=STEPS,
        accumulate_grad_batches=ACCUMULATED, gradient_clip_val=CLIP, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=job is not None,
    )  # fmt: skip
    model = Module()
    trainer.fit(
        model, DataLoader(Rows(SAMPLES), batch_size=batch), DataLoader(Rows(SAMPLES), batch_size=SAMPLES)
    )
    if job is not None and trainer.checkpoint_callback is not None:
        said = Path(getattr(trainer.checkpoint_callback, "best_model_path", "")).exists()
        print(f"rank {job.rank} writes: {said and trainer.is_global_zero}", file=sys.stderr)
    return model.network


def accelerate(job: gradwire.Job | None, folder: Path, batch: int) -> nn.Module:
    """No class of ours: the loop is the script's."""
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, mixed_precision="bf16")
    model: Any = Network()
    optimizer: Any = optimizer_of(model)
    scheduler: Any = LambdaLR(optimizer, halving)
    rows = Rows(SAMPLES)
    if job is not None:
        model, optimizer = job.attach(model, optimizer, clip_norm=CLIP)
        job.follow(scheduler)
    parts = model, optimizer, scheduler, DataLoader(rows, batch_size=batch)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts)
    if job is not None:
        loader = job.batches(rows)
    for _ in range(STEPS):
        for each in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**each)["loss"])
                if accelerator.sync_gradients and job is None:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


def transformers(job: gradwire.Job | None, folder: Path, batch: int) -> nn.Module:
    """The Trainer ends before the job, which it stops."""
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import JobCallback

    arguments = TrainingArguments(
        str(folder / "hf"), max_steps=STEPS, per_device_train_batch_size=batch,
        learning_rate=0.1, weight_decay=0.1, warmup_steps=2, gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=CLIP, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        eval_strategy="epoch", seed=0,
        save_strategy="no" if job is None else "epoch",
    )  # fmt: skip
    model = Network()
    trainer = Trainer(model, arguments, train_dataset=Rows(SAMPLES), eval_dataset=Rows(SAMPLES))
    if job is not None:
        trainer.add_callback(JobCallback(trainer, job))
    trainer.train()
    if job is not None:
        print(f"rank {job.rank} writes: {arguments.should_save}", file=sys.stderr)
    return model


def dying(passes: int) -> Callable[..., None]:
    """A forward hook of all modules that kills this process after some passes of the network."""
    left = iter(range(passes))

    def hook(module: nn.Module, *_: object) -> None:
        if isinstance(module, Network) and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def main() -> None:
    framework: Callable[..., nn.Module] = {
        "lightning": lightning, "accelerate": accelerate, "transformers": transformers,
    }[sys.argv[1]]  # fmt: skip
    folder = Path(sys.argv[2])
    job = gradwire.connect()
    if sys.argv[3:4] == [str(job.rank)]:
        torch.nn.modules.module.register_module_forward_hook(dying(PASSES))
    found = framework(job, folder, BATCH)
    if sys.argv[3].isdecimal():
        total = sum(float(each.double().sum()) for each in found.parameters())
        print(f"rank {job.rank} has {total!r}", file=sys.stderr)
        return
    alone = framework(None, folder / "alone", WORKERS * BATCH)
    began, trained, expected = (
        torch.cat([each.detach().flatten() for each in model.parameters()])
        for model in (Network(), found, alone)
    )
    changed, differs = float(torch.dist(expected, began)), float(torch.dist(trained, expected))
    print(f"changed {changed:.3g}, differs {differs / changed:.3g}", file=sys.stderr)


logging.basicConfig(level="WARNING")
main()
