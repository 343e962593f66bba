"""Trees in folders: what is read is what was written, or it is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire import failpoints, saved
from gradwire.compressors.four_bit import RunningMagnitude
from gradwire.proto.messages import EntryKind
from gradwire.server.job.events import PushKey

TREE: dict[Any, Any] = {
    "plain": [None, True, -1, 2**63, 0.1, math.inf, "text", b"\x00\xff"],
    PushKey("w", 1, 2): (1, (2, "three")),
    7: {"a state": RunningMagnitude(total=1.5, elements=2.0), "an enum": EntryKind.BUFFER},
    "tensors": [torch.arange(5, dtype=torch.float32), torch.tensor(2.5), torch.empty(0)],
    "arrays": [np.arange(6, dtype=np.uint8).reshape(2, 3), np.array([1e-300])],
}


def same(one: Any, other: Any) -> bool:
    kind = one.__class__
    if kind in (torch.Tensor, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if kind is dict:
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if kind in (list, tuple):
        return kind is other.__class__ and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other) and kind is other.__class__


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    written = saved.write_folder(tmp_path / "a", TREE, {"version": 3})
    tree, manifest = saved.read_folder(tmp_path / "a")
    assert same(tree, TREE)
    assert manifest["version"] == 3
    assert written == sum((tmp_path / "a" / name).stat().st_size for name in (saved.TREE, saved.TENSORS))
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="set cannot be saved"):
        saved.write_folder(tmp_path / "a", {"a": {1}}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [saved.TREE, saved.TENSORS, saved.MANIFEST])
@pytest.mark.parametrize("damage", ["a bit", "the end", "everything", "the file"])
def test_damage_is_noticed(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "a"
    saved.write_folder(folder, TREE, {})
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[data.index(b"sha256") + 12 if name == saved.MANIFEST else len(data) // 2] ^= 1
    left = {"the end": len(data) - 3, "everything": 0}.get(damage, len(data))
    path.write_bytes(bytes(data[:left]))
    if damage == "the file":
        path.unlink()
    with pytest.raises(saved.DamagedError):
        saved.read_folder(folder)


def test_only_values_are_made_and_only_of_modules_that_are_loaded(tmp_path: Path) -> None:
    for name in ("os:system", "builtins:eval", "antigravity:fly", "pathlib:Path", "torch:Tensor"):
        with pytest.raises(saved.DamagedError):
            saved.unflatten({"named": name, "items": ["true"]}, {})
        with pytest.raises(saved.DamagedError):
            saved.unflatten({"dataclass": name, "fields": {}}, {})
    for wrong in ({"tensor": "9"}, {"else": 1}, {"array": "0", "dtype": "?", "shape": [1]}, {"tuple": 1}):
        with pytest.raises(saved.DamagedError):
            saved.unflatten(wrong, {"0": torch.zeros(2, dtype=torch.uint8)})


@pytest.mark.parametrize("point", ["checkpoint.written", "checkpoint.synced", "checkpoint.renamed"])
def test_a_folder_is_whole_or_not_there_wherever_writing_ends(
    tmp_path: Path, point: str, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: failpoints.arm(""))
    failpoints.arm(f"{point}=enospc@1")
    with pytest.raises(OSError, match="No space left"):
        saved.write_folder(tmp_path / "a", TREE, {})
    if point == "checkpoint.renamed":
        assert same(saved.read_folder(tmp_path / "a")[0], TREE)
    else:
        assert not list(tmp_path.iterdir())


def test_another_format_is_named(tmp_path: Path) -> None:
    saved.write_folder(tmp_path / "a", TREE, {})
    path = tmp_path / "a" / saved.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(saved.FormatError, match="format 99, and this release reads 1"):
        saved.read_folder(tmp_path / "a")
