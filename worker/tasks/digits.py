"""Handwritten digits: 1797 real 8 x 8 images that are part of scikit-learn, so nothing is downloaded.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
1998; the subset that `sklearn.datasets.load_digits` bundles.

1408 images train and 389 validate, the same ones in every job, independent of its seed. 1408 is 11 x 128:
with one, two or four workers of 32 samples every round is complete. A small last round would weigh as much as
the others, and its noise would dominate the differences in accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..training.splits import parse_split
from .task import Task, TaskError, TaskSpecError

VALIDATION_SAMPLES = 389
SPLIT_SEED = 0  # seed of the split into training and validation images; independent of the job's seed
LARGEST_PIXEL = 16.0


def digits(model: Literal["mlp", "cnn"] = "mlp", split: str = "") -> Task:
    """Make the task of classifying handwritten digits.

    Args:
        model: `mlp`, 64-256-128-10 with ReLU; `cnn`, two convolutions and two linear layers.
        split: how samples are divided among workers; see `splits.parse_split`.

    Raises:
        TaskSpecError: a split that there is not.
        TaskError: scikit-learn is not installed.
    """
    train_images, validation_images, train_labels, validation_labels = _load()
    try:
        shares = parse_split(split, train_labels.numpy())
    except ValueError as error:
        raise TaskSpecError(f"task 'digits': option {error}") from None

    def batch(indices: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        return train_images[rows], train_labels[rows]

    def loss(network: nn.Module, samples: Any) -> Tensor:
        images, labels = samples
        return functional.cross_entropy(network(images), labels)

    def evaluate(network: nn.Module) -> Mapping[str, float]:
        device = next(network.parameters()).device
        labels = validation_labels.to(device)
        scores: Tensor = network(validation_images.to(device))
        return {
            "loss": functional.cross_entropy(scores, labels).item(),
            "accuracy": (scores.argmax(dim=1) == labels).float().mean().item(),
        }

    return Task(
        name=f"digits ({model})",
        train_samples=len(train_labels),
        model=_mlp if model == "mlp" else _cnn,
        batch=batch,
        loss=loss,
        evaluate=evaluate,
        split=shares,
    )


def _load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images that train and that validate (float32, (n, 64), 0 to 1), and their labels (int64)."""
    rows = np.loadtxt(_data_file(), delimiter=",")
    images = torch.as_tensor(rows[:, :-1] / LARGEST_PIXEL, dtype=torch.float32)
    labels = torch.as_tensor(rows[:, -1], dtype=torch.int64)
    # RandomState's stream never changes, so every version of numpy makes the same split.
    order = torch.as_tensor(np.random.RandomState(SPLIT_SEED).permutation(len(labels)))
    train, validation = order[VALIDATION_SAMPLES:], order[:VALIDATION_SAMPLES]
    return images[train], images[validation], labels[train], labels[validation]


def _data_file() -> Path:
    """Find a CSV file with a row for each image: 64 pixels from 0 to 16, and the digit.

    scikit-learn is not imported, which takes more than a second of CPU at the start of every worker.
    """
    found = find_spec("sklearn")
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return path
    raise TaskError(
        "task 'digits' needs scikit-learn, which is not installed or incomplete; run pip install '.[run]' in "
        "a checkout of Gradwire"
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )
