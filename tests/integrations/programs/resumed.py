"""Trains in a framework, saves, and continues from the files.

It accumulates, clips, computes in bfloat16 and recomputes activations, as the framework has it.

`python resumed.py FRAMEWORK FOLDER` on each of two ranks says whether this rank's residuals came back.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from gradwire.tests.integrations.programs.rows import Rows

COMPRESSOR = "topk:ratio=10"
checkpoint: Any = torch.utils.checkpoint.checkpoint  # pyright: ignore[reportUnknownVariableType]
SAMPLES, BATCH, ACCUMULATED = 32, 4, 2
STEPS = SAMPLES // (2 * BATCH * ACCUMULATED)  # in an epoch


class Network(nn.Module):
    """A layer with its loss, as Transformers calls it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs: Any = checkpoint(self.layer, x, use_reentrant=False)
        return {"loss": functional.mse_loss(outputs, labels)}


def same(saved: dict[str, Any], loaded: dict[str, Any], steps: int) -> None:
    """Say it if both states have these steps and the same residuals, which are not zero."""
    assert saved["rank"] == loaded["rank"]
    assert [saved["steps"], loaded["steps"]] == [steps, steps]
    residuals, found = saved["residuals"], loaded["residuals"]
    assert residuals.keys() == found.keys()
    assert all(torch.equal(residuals[name], found[name]) for name in residuals)
    assert any(each.any() for each in residuals.values())
    print(f"rank {saved['rank']} continues at step {steps}", file=sys.stderr)


def lightning(folder: Path) -> None:
    """Lightning, whose optimizer runs the backward pass in a closure of `step`."""
    import lightning.pytorch as pl

    from gradwire.integrations.lightning import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    states: list[dict[str, Any]] = []
    for path in (None, str(folder / "saved.ckpt")):
        strategy = DDPStrategy(COMPRESSOR, seed=5)
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, precision="bf16-mixed",
            accumulate_grad_batches=ACCUMULATED, gradient_clip_val=1.0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(Rows(SAMPLES), batch_size=BATCH), ckpt_path=path)
        assert strategy.hook_state is not None
        states.append(strategy.hook_state.state_dict())
        if path is None:
            trainer.save_checkpoint(folder / "saved.ckpt")
    same(states[0], states[1], STEPS)


def accelerate(folder: Path) -> None:
    """Accelerate, whose `load_state` restores a model that has been trained further."""
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import prepare

    accelerator: Any = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATED)
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loader = DataLoader(Rows(SAMPLES), batch_size=BATCH)
    model, optimizer, loader = prepare(accelerator, network, optimizer, loader, compressor=COMPRESSOR)

    def train() -> Any:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.hook_state.state_dict()

    saved = train()
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    train()
    accelerator.load_state(str(folder))
    same(saved, accelerator.hook_state.state_dict(), STEPS)
    accelerator.end_training()


def transformers(folder: Path) -> None:
    """Transformers' Trainer, which resumes from a checkpoint of its folder."""
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import DDPCallback

    class Noting(DDPCallback):
        """Notes the state with which training begins."""

        began: dict[str, Any]

        def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
            super().on_train_begin(*arguments, **kwargs)
            assert self.hook_state is not None
            self.began = self.hook_state.state_dict()

    made: list[Noting] = []
    for epochs in (1, 2):
        arguments = TrainingArguments(
            str(folder), num_train_epochs=epochs, per_device_train_batch_size=BATCH, optim="sgd", bf16=True,
            gradient_accumulation_steps=ACCUMULATED, save_strategy="epoch", use_cpu=True, ddp_backend="gloo",
            report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(Network(), arguments, train_dataset=Rows(SAMPLES))
        made.append(Noting(trainer, COMPRESSOR))
        trainer.add_callback(made[-1])
        trainer.train(resume_from_checkpoint=epochs == 2)
    state = made[0].hook_state
    assert state is not None
    same(state.state_dict(), made[1].began, STEPS)
    assert made[1].hook_state is not None
    assert made[1].hook_state.steps == 2 * STEPS


logging.basicConfig(level="WARNING")
{"lightning": lightning, "accelerate": accelerate, "transformers": transformers}[sys.argv[1]](
    Path(sys.argv[2])
)
