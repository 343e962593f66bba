"""A job that begins with a checkpoint goes on from what the optimizer remembered, where it is the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pushes import apply, pushed

from gradwire.compressors import DenseFormat, DensePayload, Payload
from gradwire.optim.optimizer import Optimizer, OptimizerGroup, parse_optimizer
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.plans import plan_message
from gradwire.server.durable.resuming import Resumed, read_model
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.writing import write_model
from gradwire.storage import checkpoint as files

SHAPES = {"first": (7, 5), "second": (5,), "third": (30, 30), "none": (0,), "last": (30,)}
JOB = OptimizerGroup(options=parse_optimizer("sgd"), learning_rate=0.05)


def manifest(optimizer: str, names: Sequence[str] = tuple(SHAPES), groups: int = 1) -> Manifest:
    """groups: how many, of one optimizer."""
    tensors = tuple(
        m.Tensor(name=name, shape=SHAPES[name], dtype="float32", group=len(name) % groups) for name in names
    )
    return Manifest(tensors, 100, (m.Group(optimizer=optimizer),) * groups)


def begun(model: Manifest, part_bytes: int, values: dict[str, torch.Tensor] | None = None) -> SteppedStore:
    plan = model.plan(part_bytes)

    def build(parameters: Sequence[torch.Tensor]) -> Optimizer:
        return Optimizer.of_groups(model.optimizer_groups(JOB), parameters, model.group_of, model.ends)

    flat = [(values[each.name] if values else torch.ones(each.shape)).reshape(-1) for each in model.specs]
    return SteppedStore(model, [each.numpy().copy() for each in flat], "none", build, plan=plan)


def dense(values: torch.Tensor) -> Payload:
    data = values.numpy().astype(np.float32)
    return DensePayload(format=DenseFormat.FLOAT32, elements=data.size, data=data.view(np.uint8))


def trained(store: SteppedStore, steps: range, only: Sequence[str] = tuple(SHAPES)) -> None:
    """only: names of the tensors of which there is a gradient."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        order = [drawn[each.name].reshape(-1) for each in store.manifest.specs]
        flat = torch.cat(order)
        push: dict[int, list[Payload]] = {}
        for number, part in enumerate(store.plan.parts):
            inside = [
                name
                for name, end, spec in zip(
                    names_in(store), store.manifest.ends, store.manifest.specs, strict=True
                )
                if end - spec.elements < part.end and part.start < end
            ]
            if set(inside) <= set(only):
                push[number] = [dense(flat[part.start : part.end])]
        apply(store, version=store.version + 1, shares=[pushed(8, push)])


def names_in(store: SteppedStore) -> list[str]:
    return [each.name for each in store.manifest.specs]


def values(store: SteppedStore) -> dict[str, torch.Tensor]:
    return dict(zip(names_in(store), store.replica, strict=True))


def checkpoint(store: SteppedStore, folder: Path) -> Resumed:
    tree: dict[str, Any] = {
        "manifest": store.manifest.to_message(),
        "plan": plan_message(store.plan),
        "shard": store.image(),
        "state": {"frozen": {}, "buffers": {}},
    }
    files.write_folder(folder, tree, {})
    return read_model(folder)


def same(one: SteppedStore, other: SteppedStore) -> bool:
    theirs = values(other)
    return all(torch.equal(each, theirs[name]) for name, each in values(one).items())


@pytest.mark.parametrize("optimizer", ["sgd:momentum=0.9", "adam", "adamw:weight_decay=0.1", "adagrad"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_new_job_goes_on_from_what_the_optimizer_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optimizer: str, groups: int
) -> None:
    """Also if tensors come in another order, in other groups and parts, and have not taken the same steps."""
    caplog.set_level(logging.INFO)
    store = begun(manifest(optimizer), 256)
    trained(store, range(5), only=("third", "last"))
    trained(store, range(5, 9))
    found = checkpoint(store, tmp_path / "checkpoint")
    again, anew = (
        begun(manifest(optimizer, tuple(reversed(SHAPES)), groups), 1024, dict(found.tensors))
        for _ in range(2)
    )
    again.recall(found.recall)
    for each in (store, again, anew):
        trained(each, range(9, 14))
    assert same(store, again)
    assert not same(store, anew)
    (record,) = [each for each in caplog.records if "starting with" in each.message]
    kind = optimizer.partition(":")[0]
    assert f"version 9, and its optimizer state, {kind} (" in record.message


OTHERS: list[tuple[str, str]] = [
    ("sgd:momentum=0.9", "adam"),
    ("sgd:momentum=0.9", "sgd"),
    ("sgd", "sgd:momentum=0.9"),
    ("adam", "adamw"),
]


@pytest.mark.parametrize(("before", "after"), OTHERS)
def test_another_optimizer_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, after: str
) -> None:
    store = begun(manifest(before), 256)
    trained(store, range(4))
    found = checkpoint(store, tmp_path / "checkpoint")
    other, anew = (begun(manifest(after), 256, dict(found.tensors)) for _ in range(2))
    other.recall(found.recall)
    for each in (other, anew):
        trained(each, range(4, 8))
    assert same(other, anew)
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "version 4, without its optimizer state: the optimizer of tensor 'first' is" in record.message
    assert f"and was {before.partition(':')[0]}:" in record.message


def test_a_state_dict_has_parameters_alone(tmp_path: Path) -> None:
    store = begun(manifest("adam"), 256)
    trained(store, range(4))
    copy = store.copy()
    path = tmp_path / "model.safetensors"
    write_model(path, copy.parameters, version=copy.version, digest=copy.digest, finished=True)
    found = read_model(path)
    assert found.recall(store.manifest, store.manifest.optimizer_groups(JOB)) is None
    assert torch.equal(found.tensors["first"], values(store)["first"])


def test_parameters_that_were_frozen_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint has their values, and nothing that an optimizer remembers of them."""
    store = begun(manifest("adam", ("first", "second")), 256)
    trained(store, range(4))
    found = checkpoint(store, tmp_path / "checkpoint")
    thawed = manifest("adam")
    assert found.recall(thawed, thawed.optimizer_groups(JOB)) is None
    assert "without its optimizer state: tensor 'third' was frozen" in caplog.text
