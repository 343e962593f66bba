"""Places for state: on a disk, and at URLs, where nothing can be renamed."""

from __future__ import annotations

import importlib
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import failpoints, places, saved
from gradwire.places import Place, PlaceError, Remote, local_copy, place_at

TREE = {"tensor": torch.arange(5), "plain": [1, "two"]}


def value(tree: Any) -> Any:
    return tree["tensor"].tolist(), tree["plain"]


@pytest.fixture(params=["disk", "file", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "deep" / "er"
    return {
        "disk": str(folder),
        "file": f"file://{folder}",
        "memory": f"memory://bucket/{uuid.uuid4().hex}",
    }[request.param]


def held(where: str) -> Place:
    place = place_at(where)
    place.hold()
    return place


def test_what_is_read_is_what_was_written(where: str) -> None:
    place = held(where)
    assert place.folders("a-") == []
    assert place.write("a-1", TREE, {"version": 1}) > 40
    place.write("a-2", {"other": 1}, {})
    place.write("a-2", TREE, {})  # instead
    place.write("b-3", TREE, {})
    place.put_text("job.json", "one")
    place.put_text("job.json", "two")
    again = place_at(where)
    assert again.folders("a-") == ["a-1", "a-2"]
    tree, manifest = again.read("a-1")
    assert value(tree) == value(TREE)
    assert manifest["version"] == 1
    assert value(again.read("a-2")[0]) == value(TREE)
    assert again.text("job.json") == "two"
    place.remove("a-1")
    assert again.folders("a-") == ["a-2"]
    with pytest.raises(FileNotFoundError):
        place.text("none")
    with pytest.raises(saved.DamagedError):
        place.read("none")
    place.release()


@pytest.mark.parametrize("point", ["checkpoint.written", "checkpoint.stored"])
def test_a_folder_without_its_manifest_is_none(point: str, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: failpoints.arm(""))
    place = held(f"memory://bucket/{uuid.uuid4().hex}")
    failpoints.arm(f"{point}=eio@1")
    with pytest.raises(OSError, match="Input/output error"):
        place.write("a-1", TREE, {})
    assert place.folders("a-") == []
    assert place.left("a-") == (["a-1"] if point == "checkpoint.stored" else [])
    place.write("a-1", TREE, {})
    assert value(place.read("a-1")[0]) == value(TREE)


def test_a_damaged_folder_is_told_of_and_set_aside(where: str) -> None:
    place = held(where)
    place.write("a-1", TREE, {})
    url = where if places.is_url(where) else f"file://{where}"
    found: Any = importlib.import_module("fsspec.core").url_to_fs(url)
    files, path = found
    data = files.cat_file(f"{path}/a-1/{saved.TENSORS}")
    files.pipe_file(f"{path}/a-1/{saved.TENSORS}", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(saved.DamagedError, match="checksum"):
        place.read("a-1")
    place.set_aside("a-1")
    assert place.folders("a-") == []
    place.release()


def test_the_server_that_came_last_writes_and_the_one_before_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"memory://bucket/{uuid.uuid4().hex}"
    first, second = held(url), held(url)
    with pytest.raises(OSError, match="another gc-server has taken it over"):
        first.write("a-1", TREE, {})
    assert second.folders("a-") == []
    second.write("a-1", TREE, {})
    with pytest.raises(OSError, match="another gc-server has taken it over"):
        first.write("a-1", {"other": 1}, {})
    assert value(second.read("a-1")[0]) == value(TREE), "what the last has written stays"
    put_file = vars(second)["_files"].put_file

    def puts(*arguments: Any) -> None:
        put_file(*arguments)
        held(url)  # meanwhile
        second.release()

    monkeypatch.setattr(vars(second)["_files"], "put_file", puts)
    with pytest.raises(OSError, match="another gc-server has taken it over"):
        second.write("a-2", TREE, {})
    assert second.folders("a-") == ["a-1"]


def test_a_folder_stays_until_another_one_is_in_its_place(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.addfinalizer(lambda: failpoints.arm(""))
    place = held(str(tmp_path))
    place.write("a-1", TREE, {})
    failpoints.arm("checkpoint.synced=eio@1")
    with pytest.raises(OSError, match="Input/output error"):
        place.write("a-1", {"other": 1}, {})
    assert value(place.read("a-1")[0]) == value(TREE)
    (tmp_path / ".a-2.partial").mkdir()  # of a process that was killed
    (tmp_path / ".a-3.before.partial").mkdir()
    assert place.left("a-") == ["a-1", "a-2", "a-3"]
    assert place.folders("a-") == ["a-1"]
    place.remove("a-2")
    place.remove("a-3")
    assert place.left("a-") == ["a-1"]
    place.release()


def test_a_disk_belongs_to_one(tmp_path: Path) -> None:
    place = held(str(tmp_path))
    with pytest.raises(BlockingIOError):
        held(str(tmp_path))
    place.release()
    held(str(tmp_path)).release()


def test_what_a_store_raises_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Remote("memory://bucket/job")

    class NoCredentialsError(Exception):
        pass

    def fails(*_: Any, **__: Any) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    for name in ("put_file", "pipe_file", "cat_file", "ls", "get_file"):
        monkeypatch.setattr(vars(place)["_files"], name, fails)
    for call in (
        place.hold,
        lambda: place.write("a-1", TREE, {}),
        lambda: place.folders("a-"),
        lambda: place.read("a-1"),
        lambda: place.text("job.json"),
    ):
        with pytest.raises(OSError, match="memory://bucket/job: Unable to locate credentials"):
            call()


def test_a_url_that_cannot_be_reached_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlaceError, match="Protocol not known: nonsense"):
        place_at("nonsense://bucket/job")
    with pytest.raises(PlaceError, match=r"s3://bucket/job: .*s3fs"):
        place_at("s3://bucket/job")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PlaceError, match=r"URLs need fsspec; pip install 'gradwire\[remote\]'"):
        place_at("s3://bucket/job")


def test_a_file_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("all of it")
    for where in (str(tmp_path / "file"), f"file://{tmp_path}/file"):
        with local_copy(where) as file:
            assert file is not None
            assert file.read_text() == "all of it"
    for where in (str(tmp_path), f"file://{tmp_path}"):
        with local_copy(where) as file:
            assert file is None
