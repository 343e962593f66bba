"""Example of your own task: tell three interleaved spirals apart.

    gc-run --task spirals:task --epochs 40                          # in this directory
    gc-run --task spirals:task:points=6000,noise=0.1 --compressor 2bit

docs/how-to/tasks.md walks through this file and lists the rules for tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire import Task

ARMS = 3
VALIDATION_POINTS = 600


def task(points: int = 2400, noise: float = 0.05, width: int = 64) -> Task:
    """Return the task that a spec such as `spirals:task:points=6000` names.

    Its parameters are the task's options: the spec's texts are converted to the annotated types.

    Args:
        points: number of training samples.
        noise: standard deviation of the noise added to each coordinate.
        width: width of the network's hidden layers.
    """
    # Every worker makes the same data, because the seed is a constant.
    train_points, train_arms = spirals(points, noise, seed=0)
    validation_points, validation_arms = spirals(VALIDATION_POINTS, noise, seed=1)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, ARMS)
        )

    def batch(indices: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices)
        return {"points": train_points[rows], "arms": train_arms[rows]}

    def loss(network: nn.Module, samples: Any) -> Tensor:
        return functional.cross_entropy(network(samples["points"]), samples["arms"])

    def evaluate(network: nn.Module) -> Mapping[str, float]:
        device = next(network.parameters()).device
        arms = validation_arms.to(device)
        scores: Tensor = network(validation_points.to(device))
        return {
            "loss": functional.cross_entropy(scores, arms).item(),
            "accuracy": (scores.argmax(dim=1) == arms).float().mean().item(),
        }

    return Task(
        name=f"spirals, {points} points",
        train_samples=points,
        model=model,
        batch=batch,
        loss=loss,
        evaluate=evaluate,
    )


def spirals(points: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return random points, float32 of shape (points, 2), and the arm of each, int64 of shape (points,)."""
    rng = np.random.default_rng(seed)
    arms = rng.integers(ARMS, size=points)
    radius = rng.uniform(0.1, 1.0, size=points)
    angle = 2 * np.pi * (arms / ARMS + radius)
    positions = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    positions += rng.normal(0, noise, positions.shape)
    return torch.as_tensor(positions, dtype=torch.float32), torch.as_tensor(arms)
