"""The tasks that we ship and the one that we show keep the protocol, and can be learned."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradwire.worker.tasks import Task, load

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SPECS = [
    "digits",
    "digits:model=cnn",
    "characters:characters=20000,context=16,layers=1,width=32",
    "spirals:task",
    "spirals:task:points=500,noise=0.1,width=16",
]


@pytest.fixture(autouse=True)
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path])


def tensors(nest: Any) -> list[Tensor]:
    if isinstance(nest, Tensor):
        return [nest]
    if isinstance(nest, dict):
        nest = cast("dict[str, Any]", nest).values()
    return [tensor for member in nest for tensor in tensors(member)]


def seeded(task: Task, seed: int) -> nn.Module:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    return task.model()


def train(task: Task, *, epochs: int, batch: int, rate: float, seed: int) -> float:
    """Plain SGD on one process; return the last validation accuracy."""
    model = seeded(task, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(task.train_samples)
        for start in range(0, len(order), batch):
            optimizer.zero_grad()
            task.loss(model, task.batch(order[start : start + batch])).backward()
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    model.eval()
    with torch.no_grad():
        return task.evaluate(model)["accuracy"]


@pytest.mark.parametrize("spec", SPECS)
def test_model_is_float32_and_follows_the_seed(spec: str) -> None:
    task = load(spec)
    states = [seeded(task, seed).state_dict() for seed in (1, 1, 2)]
    assert {tensor.dtype for tensor in states[0].values()} == {torch.float32}
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_indices_are_the_same_samples_in_every_worker(spec: str) -> None:
    one, other = load(spec), load(spec)
    assert one.train_samples == other.train_samples
    indices = np.array([0, one.train_samples - 1, 7], dtype=np.int64)
    ours, theirs = tensors(one.batch(indices)), tensors(other.batch(indices))
    assert {len(tensor) for tensor in ours} == {3}
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_loss_is_a_mean_with_a_gradient(spec: str) -> None:
    task = load(spec)
    model = seeded(task, 1)
    first, second = np.arange(5), np.arange(5, 20)
    loss = task.loss(model, task.batch(np.arange(20)))
    parts = 5 * task.loss(model, task.batch(first)) + 15 * task.loss(model, task.batch(second))
    assert loss.shape == ()
    torch.testing.assert_close(loss, parts / 20)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("spec", SPECS)
def test_evaluation_is_finite_and_changes_nothing(spec: str) -> None:
    task = load(spec)
    model = task.model().eval()
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        metrics = task.evaluate(model)
        assert task.evaluate(model) == metrics
    assert {"loss", "accuracy"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_digits_are_scaled_and_no_validation_image_is_trained_on() -> None:
    task = load("digits")
    images, labels = task.batch(np.arange(task.train_samples))
    assert images.shape == (1408, 64)
    assert images.min() == 0
    assert images.max() == 1
    assert len(labels.unique()) == 10


def test_digits_are_learned_with_a_margin() -> None:
    assert train(load("digits"), epochs=30, batch=128, rate=0.1, seed=1) >= 0.94


def test_characters_are_learned_with_a_margin() -> None:
    """Every letter by itself would take a loss of about 3.1."""
    task = load("characters:characters=100000,context=32,layers=1,width=64")
    model, rng = seeded(task, 1), np.random.default_rng(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(rng.integers(task.train_samples, size=32)))
        loss.backward()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    with torch.no_grad():
        metrics = task.evaluate(model.eval())
    assert metrics["loss"] < 2.8
    assert metrics["accuracy"] > 0.2


def test_the_plain_script_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("to be, or not to be: that is the question\n" * 100)
    arguments = ["--data", str(tmp_path / "text"), "--steps", "12", "--batch-size", "8"]
    monkeypatch.setattr(sys, "argv", ["plain_gpt.py", *arguments])
    runpy.run_path(str(EXAMPLES / "plain_gpt.py"), run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"step 12: loss ([\d.]+), validation loss ([\d.]+)", line)
    assert found is not None
    assert max(map(float, found.groups())) < 4.5, "it begins at ln 256 = 5.5"


def test_the_example_is_learned() -> None:
    assert train(load("spirals:task"), epochs=40, batch=32, rate=0.1, seed=1) >= 0.9
