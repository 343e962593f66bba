"""Samples and a model for trainers of every framework."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

checkpoint: Any = torch.utils.checkpoint.checkpoint  # pyright: ignore[reportUnknownVariableType]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random samples, as dictionaries."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return {"x": torch.randn(20, generator=drawn), "labels": torch.randn(10, generator=drawn)}


class Network(nn.Module):
    """Layers with their loss, as Transformers calls them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden: Any = checkpoint(self.first, x, use_reentrant=False)
        return {"loss": functional.mse_loss(self.last(hidden.relu()), labels)}
