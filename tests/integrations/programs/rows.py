"""Samples for trainers of every framework."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random samples, as dictionaries."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return {"x": torch.randn(20, generator=drawn), "labels": torch.randn(10, generator=drawn)}
