"""gc-bench lowrank: its rows, and means in which a worker has sent a spike as float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from gradwire.benchmarks import cli
from gradwire.benchmarks.low_rank import mean_of
from gradwire.compressors import (
    DenseFormat,
    LayerRule,
    ModelCompressor,
    ProjectedPayload,
    TensorSpec,
    dense_payload,
)


def test_the_rows_are_trained_by_equal_steps(tmp_path: Path) -> None:
    path, specs = tmp_path / "rows.json", ["none", "powersgd:2", "lowrank:rank=2"]
    options = ["--seeds", "1", "--steps", "2", "--workers", "2", "--json", str(path)]
    assert cli.main(["lowrank", *options, "--compressors", *specs]) == 0
    rows = json.loads(path.read_text())
    assert [row["compressor"] for row in rows] == specs
    sizes = [row["bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert len({row["losses"][0] for row in rows}) == 3


def test_a_mean_has_coordinates_and_a_spike_of_the_same_tensor() -> None:
    specs = [TensorSpec(name="w", shape=(40, 40)), TensorSpec(name="b", shape=(3,))]
    worker = ModelCompressor(specs, "lowrank:rank=2", LayerRule(), seed=1, rank=0)
    sent = worker.compress([torch.ones(40, 40), torch.ones(3)], samples=1)
    whole = dense_payload(DenseFormat.FLOAT32, np.full(1603, 2.0, np.float32))
    mean, following = mean_of(worker.bases, [sent, [whole]])
    assert isinstance(sent[0], ProjectedPayload)
    assert np.allclose(mean[:1600], worker.bases.decode(0, sent[0]) / 2 + 1, atol=1e-6)
    assert (mean[1600:] == 1.5).all()
    assert following.values[0].tobytes() != worker.bases.values[0].tobytes()
