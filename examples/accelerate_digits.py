"""Digits in Accelerate.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py
    torchrun --nproc-per-node 2 examples/accelerate_digits.py --form plain

    gc-run --script "python examples/accelerate_digits.py --form job" --workers 2 --epochs 10 --batch-size 32

Gradwire adds the lines that end in `# +`, or `# + job`. docs/how-to/frameworks.md has the page.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gradwire  # + job
from gradwire.integrations.accelerate import prepare  # +


def main() -> None:
    """Train, and print the accuracy on samples that were not trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=["plain", "ddp", "job"], default="ddp")
    parser.add_argument("--compressor", default="4bit")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()

    accelerator: Any = Accelerator(cpu=True)
    set_seed(given.seed)
    digits = cast(Any, load_digits())
    images, labels = digits.data, digits.target
    samples = TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
    shuffled = torch.Generator().manual_seed(0)
    train, valid = torch.utils.data.random_split(samples, [1437, 360], generator=shuffled)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = DataLoader(train, batch_size=32, shuffle=True)
    job: Any = None
    if given.form == "job":
        job = gradwire.connect()  # + job
        model, optimizer = job.attach(model, optimizer, clip_norm=1.0)  # + job
    parts = model, optimizer, loader
    if given.form == "ddp":
        model, optimizer, loader = prepare(accelerator, *parts, compressor=given.compressor)  # +
    else:
        model, optimizer, loader = accelerator.prepare(*parts)
    epochs: Any = range(given.epochs)
    if given.form == "job":
        loader, epochs = job.batches(train), job.epochs(given.epochs)  # + job

    for _ in epochs:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(x), y))
                if given.form != "job":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    with torch.no_grad():
        x, y = valid[:]
        accuracy = (accelerator.unwrap_model(model)(x).argmax(1) == y).float().mean()
    accelerator.print(f"accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
