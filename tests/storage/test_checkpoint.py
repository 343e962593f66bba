"""Checkpoint folders: what is read is what was written, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.common import failpoints
from gradwire.storage import checkpoint
from gradwire.storage.values import DamagedError

TREE: dict[Any, Any] = {"tensor": torch.arange(5), ("a", 1): [None, b"\x00\xff"]}


def same(tree: Any) -> bool:
    rest = {key: each for key, each in tree.items() if key != "tensor"}
    return torch.equal(tree["tensor"], TREE["tensor"]) and rest == {("a", 1): TREE["a", 1]}


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    written = checkpoint.write_folder(tmp_path / "a", TREE, {"version": 3})
    tree, manifest = checkpoint.read_folder(tmp_path / "a")
    assert same(tree)
    assert manifest["version"] == 3
    assert written == sum(
        (tmp_path / "a" / name).stat().st_size for name in (checkpoint.TREE, checkpoint.TENSORS)
    )
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object cannot be saved"):
        checkpoint.write_folder(tmp_path / "a", {"a": object()}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [checkpoint.TREE, checkpoint.TENSORS, checkpoint.MANIFEST])
@pytest.mark.parametrize("damage", ["a bit", "the end", "everything", "the file"])
def test_damage_is_noticed(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "a"
    checkpoint.write_folder(folder, TREE, {})
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[data.index(b"sha256") + 12 if name == checkpoint.MANIFEST else len(data) // 2] ^= 1
    left = {"the end": len(data) - 3, "everything": 0}.get(damage, len(data))
    path.write_bytes(bytes(data[:left]))
    if damage == "the file":
        path.unlink()
    with pytest.raises(DamagedError):
        checkpoint.read_folder(folder)


@pytest.mark.parametrize("point", ["checkpoint.written", "checkpoint.synced", "checkpoint.renamed"])
def test_a_folder_is_whole_or_not_there_wherever_writing_ends(
    tmp_path: Path, point: str, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: failpoints.arm(""))
    failpoints.arm(f"{point}=enospc@1")
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write_folder(tmp_path / "a", TREE, {})
    if point == "checkpoint.renamed":
        assert same(checkpoint.read_folder(tmp_path / "a")[0])
    else:
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [1, 99])
def test_another_format_is_named(tmp_path: Path, number: int) -> None:
    checkpoint.write_folder(tmp_path / "a", TREE, {})
    path = tmp_path / "a" / checkpoint.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))
    with pytest.raises(
        checkpoint.FormatError,
        match=f"format {number}, and this release reads 4; start the release of gradwire",
    ):
        checkpoint.read_folder(tmp_path / "a")
