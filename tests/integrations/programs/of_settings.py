"""Trains with one setting of a framework after another: as the only worker of a job, then without a job.

`python of_settings.py FRAMEWORK FOLDER NAME=ADDRESS...` prints for each setting whether both have the same
parameters, or the error that refuses it.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import gradwire
from gradwire.tests.integrations.programs.rows import Network, Rows

SAMPLES, EPOCHS = 8, 4  # all samples are one batch

Job = gradwire.Job | None


def halving(step: int) -> float:
    return 0.5**step


def steady(_: int) -> float:
    return 0.1


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def lightning(name: str, job: Job, folder: Path) -> nn.Module:
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks
    from lightning.pytorch.tuner.tuning import Tuner

    from gradwire.integrations.lightning import JobStrategy

    class Module(pl.LightningModule):
        """Its optimizer sets a rate of its own in the first step."""

        def __init__(self) -> None:
            super().__init__()
            self.network, self.lr = Network(), 0.1
            self.automatic_optimization = name not in ("manual", "several optimizers")

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if name == "in turn":
                self.network.first.requires_grad_(number % 2 == 0)
                self.network.last.requires_grad_(number % 2 == 1)
            given: Any = batch.get("a", batch)
            loss: torch.Tensor = self.network(**given)["loss"]
            if name == "manual":
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                scheduler: Any = self.lr_schedulers()
                scheduler.step()
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.network(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            if name == "several optimizers":
                return [sgd(self.network.first), sgd(self.network.last)]
            if name == "in turn":
                groups = [{"params": each.parameters()} for each in (self.network.first, self.network.last)]
                return torch.optim.Adam(groups, lr=0.01)
            optimizer = sgd(self)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            scheduler = {
                "scheduler": plateau
                if name == "plateau"
                else LambdaLR(optimizer, steady if name == "max_steps" else halving),
                "interval": "epoch" if name == "callbacks" else "step",
                "frequency": 2 if name == "frequency" else 1,
                "monitor": "loss",
            }
            return [optimizer], [scheduler]

    settings: dict[str, dict[str, Any]] = {
        "callbacks": {
            "precision": "bf16-mixed",
            "callbacks": [
                callbacks.EarlyStopping("loss", min_delta=100.0, patience=2),
                callbacks.EMAWeightAveraging(),
            ],
        },
        "averaging": {"callbacks": [callbacks.StochasticWeightAveraging(swa_lrs=0.1)]},
        "several": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "devices": 2},
        "reload": {"reload_dataloaders_every_n_epochs": 1},
        "sync_batchnorm": {"sync_batchnorm": True},
        "length": {"max_epochs": EPOCHS + 1},
        "max_steps": {"max_epochs": None, "max_steps": 32},  # the server has 30 epochs by default
        "endless": {"max_epochs": -1},
    }
    usual: dict[str, Any] = {"max_epochs": EPOCHS, "devices": 1, **settings.get(name, {})}
    trainer = pl.Trainer(
        accelerator="cpu", strategy="auto" if job is None else JobStrategy(job), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **usual,
    )  # fmt: skip
    module = Module()
    loader: Any = DataLoader(Rows(SAMPLES), batch_size=SAMPLES)
    if name == "finder":
        Tuner(trainer).lr_find(module, loader)
    if name == "in turn":
        twice: Any = [batch for batch in loader for _ in range(2)]
        loader = cast("Any", DataLoader(twice, batch_size=None))
        loader = loader if job is None else job.steps(loader, per_epoch=len(loader))
    if name == "resume":
        alone = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=folder)
        alone.fit(Module(), loader)
        alone.save_checkpoint(folder / "saved.ckpt")
    trainer.fit(
        module,
        {"a": loader, "b": loader} if name == "loaders" else loader,
        DataLoader(Rows(SAMPLES), batch_size=SAMPLES),
        ckpt_path=folder / "saved.ckpt" if name == "resume" else None,
    )
    if name == "twice":
        trainer.fit(module, loader)
    return module.network


def accelerate(name: str, job: Job, folder: Path) -> nn.Module:
    """Saves in the middle, and a later training continues from the files; a plateau lowers the rate."""
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True)
    model: Any = Network()
    optimizer: Any = sgd(model)
    if name == "after":
        model, optimizer = accelerator.prepare(model, optimizer)
    if job is not None:
        model, optimizer = job.attach(model, optimizer)
    loader: Any = DataLoader(Rows(SAMPLES), batch_size=SAMPLES)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if name == "continued":
        accelerator.load_state(folder / ("alone" if job is None else "of a job"))
    if job is not None:
        loader = job.batches(loader.dataset)
    for epoch in range(EPOCHS):
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if name == "saved" and epoch == 1:
            accelerator.save_state(folder / ("alone" if job is None else "of a job"))
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


def transformers(name: str, job: Job, folder: Path) -> nn.Module:
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    from gradwire.integrations.transformers import JobCallback

    settings: dict[str, dict[str, Any]] = {
        "callbacks": {
            "bf16": True, "lr_scheduler_type": "cosine", "warmup_steps": 1, "eval_on_start": True,
            "metric_for_best_model": "eval_loss", "greater_is_better": False, "torch_compile": True,
            "torch_compile_backend": "eager",
        },
        "part of an epoch": {"num_train_epochs": EPOCHS - 0.5},
        "best": {"load_best_model_at_end": True, "save_strategy": "epoch"},
        "batch size": {"auto_find_batch_size": True},
        "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau"},
        "adafactor": {"optim": "adafactor"},
        "length": {"num_train_epochs": EPOCHS + 1},
        "max_steps": {"max_steps": 32},
    }  # fmt: skip
    usual: dict[str, Any] = {"num_train_epochs": EPOCHS, "eval_strategy": "epoch", "save_strategy": "no"}
    arguments = TrainingArguments(
        str(folder / name), per_device_train_batch_size=SAMPLES, learning_rate=0.05, use_cpu=True, seed=0,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **{**usual, **settings.get(name, {})},
    )  # fmt: skip
    if name == "resume":
        saving: Any = TrainingArguments(
            str(folder / name), max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(Network(), saving, train_dataset=Rows(SAMPLES)).train()
    model = Network()
    trainer = Trainer(model, arguments, train_dataset=Rows(SAMPLES), eval_dataset=Rows(SAMPLES))
    if name == "callbacks":
        trainer.add_callback(EarlyStoppingCallback(2, 100.0))
    if name == "devices":
        any_arguments: Any = arguments
        any_arguments._n_gpu = 2
    if job is not None:
        trainer.add_callback(JobCallback(trainer, job))
    trainer.train(resume_from_checkpoint=name == "resume")
    if name == "twice":
        trainer.train()
    return model


def main() -> None:
    of_framework: Callable[[str, Job, Path], nn.Module] = {
        "lightning": lightning, "accelerate": accelerate, "transformers": transformers,
    }[sys.argv[1]]  # fmt: skip
    for each in sys.argv[3 : sys.argv.index("--http-port")]:
        name, _, address = each.partition("=")
        job = gradwire.connect(address, worker_id="w0")
        try:
            found = of_framework(name, job, Path(sys.argv[2]))
        except RuntimeError as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            job.leave()
            continue
        alone = of_framework(name, None, Path(sys.argv[2]))
        began, trained, expected = (
            torch.cat([value.detach().flatten() for value in model.parameters()])
            for model in (Network(), found, alone)
        )
        differs = float(torch.dist(trained, expected) / torch.dist(expected, began))
        print(f"{name}: {'as alone' if differs < 1e-4 else f'differs by {differs:.2g}'}", file=sys.stderr)


warnings.simplefilter("ignore")
logging.basicConfig(level="WARNING")
main()
