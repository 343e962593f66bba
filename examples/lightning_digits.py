"""Digits in Lightning, with two processes on this machine.

    python examples/lightning_digits.py                     # DDP with compressed gradients
    python examples/lightning_digits.py --form plain        # Lightning's own DDP

    gc-run --script "python examples/lightning_digits.py --form job" --workers 2 --epochs 10 --batch-size 32

Gradwire adds the lines that end in `# +`, or `# + job`. docs/how-to/frameworks.md has the page.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gradwire  # + job
from gradwire.integrations.lightning import (
    DDPStrategy,  # +
    JobStrategy,  # + job
)


class Digits(pl.LightningModule):
    """A small network for images of 8 × 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: Any, _: int) -> None:
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train, and print the accuracy on samples that were not trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=["plain", "ddp", "job"], default="ddp")
    parser.add_argument("--compressor", default="4bit")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()

    pl.seed_everything(given.seed)
    digits = cast(Any, load_digits())
    images, labels = digits.data, digits.target
    samples = TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
    shuffled = torch.Generator().manual_seed(0)
    train, valid = torch.utils.data.random_split(samples, [1437, 360], generator=shuffled)
    strategy: Any = "ddp"
    if given.form == "ddp":
        strategy = DDPStrategy(given.compressor)  # +
    elif given.form == "job":
        strategy = JobStrategy(gradwire.connect())  # + job
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if given.form == "job" else 2, strategy=strategy,
        max_epochs=given.epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(valid, batch_size=180))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
