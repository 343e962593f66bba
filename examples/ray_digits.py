"""Digits in Ray Train: a TorchTrainer with two workers.

    pip install "ray[train]"
    python examples/ray_digits.py
    python examples/ray_digits.py --form plain        # torch's own DDP

    gc-server --script --min-workers 2 --epochs 10 --batch-size 32
    python examples/ray_digits.py --form job --server 127.0.0.1:50051

Gradwire adds the lines that end in `# +`, or `# + job`. docs/how-to/frameworks.md has the page.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import ray
import torch
from ray import train
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import gradwire  # + job
import gradwire.ddp  # +


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker, and report the accuracy on samples that were not trained on."""
    torch.manual_seed(config["seed"])
    digits = cast(Any, load_digits())
    images, labels = digits.data, digits.target
    samples = TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
    shuffled = torch.Generator().manual_seed(0)
    data, valid = torch.utils.data.random_split(samples, [1437, 360], generator=shuffled)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = DataLoader(data, batch_size=32, shuffle=True)
    if config["form"] == "job":
        job = gradwire.connect(config["server"])  # + job
        model, optimizer = job.attach(model, optimizer)  # + job
        loader = job.batches(data)  # + job
    else:
        model, loader = prepare_model(model), prepare_data_loader(loader)
    if config["form"] == "ddp":
        gradwire.ddp.register(model, config["compressor"], optimizer=optimizer)  # +

    for _ in range(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    with torch.no_grad():
        x, y = valid[:]
        accuracy = float((model(x).argmax(1) == y).float().mean())
    if train.get_context().get_world_rank() == 0:
        print(f"accuracy {accuracy:.3f}", flush=True)
    train.report({"accuracy": accuracy})


def main() -> None:
    """Start the trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=["plain", "ddp", "job"], default="ddp")
    parser.add_argument("--compressor", default="4bit")
    parser.add_argument("--server", default="127.0.0.1:50051")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()

    ray.init(num_cpus=2, object_store_memory=80_000_000, include_dashboard=False)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=vars(given),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        torch_config=TorchConfig(backend="gloo"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
