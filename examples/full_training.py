"""A complete training script in a job: a convolutional network on scikit-learn's handwritten digits.

    gc-server --script --min-workers 3 --epochs 8 --batch-size 32 --insecure
    GC_SERVER=that-machine python full_training.py --folder run       # on each of the three

It writes run/last.pt after every epoch, and run/best.pt after each best epoch. To continue a job that was
stopped, start a new gc-server and the same scripts again, each with the same run/last.pt.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any, cast

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from tqdm import tqdm

import gradwire


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training samples and the validation samples; the split is the same on every rank."""
    found = cast(Any, load_digits())
    pixels, labels = found.data, found.target
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    samples = TensorDataset(images, torch.tensor(labels))
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    return TensorDataset(*samples[order[:1408]]), TensorDataset(*samples[order[1408:]])


def network() -> nn.Module:
    """Return the untrained network, for images of shape (samples, 1, 8, 8)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups for the optimizer: matrices and kernels with weight decay, biases and BatchNorm
    without."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]


def warm_up_and_cosine(progress: float) -> float:
    """Return the factor of the learning rate when `progress`, from 0 to 1, of the job is done."""
    if progress < 0.1:
        return 0.1 + 9 * progress
    return 0.5 * (1 + math.cos(math.pi * (progress - 0.1) / 0.9))


@torch.no_grad()
def accuracy_of(model: nn.Module, samples: TensorDataset) -> float:
    """Return the fraction of `samples` that the model classifies correctly."""
    images, labels = samples.tensors
    model.eval()
    scores: Tensor = model(images)
    model.train()
    return (scores.argmax(dim=1) == labels).float().mean().item()


def save(path: Path, state: dict[str, Any]) -> None:
    """Save `state` under another name first, so that `path` is always a complete file."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def main() -> None:
    """Train as one rank of a job, from last.pt if that exists."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="folder of last.pt and best.pt")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "last.pt"

    torch.manual_seed(1)
    train, validation = digits()
    model: nn.Module = network()
    optimizer: Any = torch.optim.AdamW(parameter_groups(model), lr=3e-3)
    start, best = 0, 0.0  # best: of an earlier job

    with gradwire.connect() as job:
        model, optimizer = job.attach(model, optimizer, clip_norm=1.0)
        # The job steps the scheduler by its progress, before each batch, so it suits any number of workers.
        job.follow(LambdaLR(optimizer, lambda _: warm_up_and_cosine(job.progress)), each="progress")
        if last.exists():
            saved = torch.load(last)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            start, best = saved["epoch"] + 1, saved["best"]
        batches = job.batches(train)  # this rank's share, a different one in each epoch

        for epoch in job.epochs(start=start):
            for images, labels in tqdm(batches, desc=f"rank {job.rank}, epoch {epoch}", leave=False):
                loss = functional.cross_entropy(model(images), labels)
                job.log(loss=loss)  # the loss of this rank's samples
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            if job.evaluating:  # True on one rank; meanwhile the other ranks begin the next epoch
                accuracy = accuracy_of(model, validation)
                best = max(best, job.best.get("accuracy", 0.0))  # also that of another evaluator
                job.log(accuracy=accuracy)
                print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)
                better, best = accuracy > best, max(accuracy, best)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(last, {**state, "epoch": epoch, "best": best})
                if better:
                    save(folder / "best.pt", state)

        print(f"rank {job.rank} ends at version {job.version}", flush=True)


if __name__ == "__main__":
    main()
