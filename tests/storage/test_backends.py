"""Storage backends: on a disk, and at URLs, where nothing can be renamed."""

from __future__ import annotations

import errno
import importlib
import os
import stat
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.common import failpoints
from gradwire.common.configuration import UsageError
from gradwire.server.checks import check
from gradwire.server.durable.folder import StateError, StateFolder
from gradwire.server.durable.journal import Journal
from gradwire.settings import ServerSettings
from gradwire.storage import backends, checkpoint
from gradwire.storage.backends import Backend, BackendError, Disk, Remote, backend_at, local_copy
from gradwire.storage.values import DamagedError

TREE = {"tensor": torch.arange(5), "plain": [1, "two"]}


def value(tree: Any) -> Any:
    return tree["tensor"].tolist(), tree["plain"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://me:secret@host/a", "expected a URL without a password"),
        ("memory://bucket/a?versionId=1", "expected a URL without '?'"),
        ("memory://bucket/a#b", "expected a URL without '#'"),
        ("memory://bucket/a b", "expected a URL without spaces"),
        ("memory://bucket/a\nb", "expected a URL without spaces"),
    ],
)
def test_a_url_that_no_file_name_goes_with_is_refused(url: str, why: str) -> None:
    with pytest.raises(BackendError) as refused:
        backend_at(url)
    assert why in str(refused.value)
    assert "secret" not in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://me:secret@host/x", "s3://…@host/x"),
        ("s3://me:sec/ret@host/x", "s3://…"),
        ("s3://me:/secret@host/x", "s3://…"),
        ("s3://me:80secret@host/x", "s3://…@host/x"),
        ("s3://me:sec@ret@host/x", "s3://…"),
        ("s3://me:sec@ret/@host/x", "s3://…"),
        ("s3://me@here:secret@host/x", "s3://…"),
        ("s3://me@here:sec/ret@host/x", "s3://…"),
        ("s3://me:sec?ret@host/x", "s3://…"),
        ("s3://me:sec#ret@host/x", "s3://…"),
        ("s3://me:sec\nret@host/x", "s3://…@host/x"),
        ("s3://:secret@host/x", "s3://…@host/x"),
        ("http://[me:secret@host/x", "http://…@host/x"),
        ("simplecache::s3://me:sec/ret@host/x", "simplecache::s3://…"),
    ],
)
def test_a_password_is_refused_and_not_shown(url: str, shown: str) -> None:
    with pytest.raises(BackendError, match="expected a URL without a password") as refused:
        backend_at(url)
    assert str(refused.value).startswith(f"{shown}: ")
    assert backends.shown(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "http://h:80/a@b",
        "http://[::1]:80/a@b",
        "http://[::1]/a@b",
        "sftp://me@h:22/a@b",
        "sftp://me@h/a:b@c",
        "s3://bucket/a:b@c",
        "http://h:80",
    ],
)
def test_a_port_or_a_path_is_not_taken_for_a_password(url: str) -> None:
    assert backends.shown(url) == url
    backend_at(f"memory://{url.partition('://')[2]}")


def test_messages_have_no_secrets_of_urls() -> None:
    shown = backends.shown("https://me:secret@host/model.safetensors?signature=secret")
    assert shown == "https://…@host/model.safetensors?…"
    with pytest.raises(UsageError, match=r"^--state s3://…@host/job with --durability journal: "):
        check(ServerSettings(state="s3://me:secret@host/job"))
    with (
        pytest.raises(OSError, match=r"^nonsense://…@host/a\?…: Protocol"),
        local_copy("nonsense://me:x@host/a?y"),
    ):
        pass
    assert [backends.below(where, "n") for where in ("/a/", "s3://b/c/", "s3://b")] == [
        "/a/n",
        "s3://b/c/n",
        "s3://b/n",
    ]


@pytest.fixture(params=["disk", "file", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "deep" / "er"
    return {"disk": str(folder), "file": f"file://{folder}", "memory": f"memory://bucket/{uuid.uuid4().hex}"}[
        request.param
    ]


def held(where: str) -> Backend:
    backend = backend_at(where)
    backend.hold()
    backend.claim()
    return backend


def test_what_is_read_is_what_was_written(where: str) -> None:
    backend = held(where)
    assert backend.folders("a-") == []
    assert backend.write("a-1", TREE, {"version": 1}) > 40
    backend.write("a-2", {"other": 1}, {})
    backend.write("a-2", TREE, {})  # instead
    backend.write("b-3", TREE, {})
    backend.put_text("job.json", "one")
    backend.put_text("job.json", "two")
    again = backend_at(where)
    assert again.folders("a-") == ["a-1", "a-2"]
    tree, manifest = again.read("a-1")
    assert value(tree) == value(TREE)
    assert manifest["version"] == 1
    assert value(again.read("a-2")[0]) == value(TREE)
    assert again.text("job.json") == "two"
    backend.remove("a-1")
    assert again.folders("a-") == ["a-2"]
    with pytest.raises(FileNotFoundError):
        backend.text("none")
    with pytest.raises(DamagedError):
        backend.read("none")
    backend.release()


@pytest.mark.parametrize("point", ["checkpoint.written", "checkpoint.stored"])
def test_a_folder_without_its_manifest_is_none(point: str, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: failpoints.arm(""))
    backend = held(f"memory://bucket/{uuid.uuid4().hex}")
    failpoints.arm(f"{point}=eio@1")
    with pytest.raises(OSError, match="Input/output error"):
        backend.write("a-1", TREE, {})
    assert backend.folders("a-") == []
    assert backend.left("a-") == (["a-1"] if point == "checkpoint.stored" else [])
    backend.write("a-1", TREE, {})
    assert value(backend.read("a-1")[0]) == value(TREE)


def test_a_damaged_folder_is_told_of_and_set_aside(where: str) -> None:
    backend = held(where)
    backend.write("a-1", TREE, {})
    url = where if backends.is_url(where) else f"file://{where}"
    found: Any = importlib.import_module("fsspec.core").url_to_fs(url)
    files, path = found
    data = files.cat_file(f"{path}/a-1/{checkpoint.TENSORS}")
    files.pipe_file(f"{path}/a-1/{checkpoint.TENSORS}", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedError, match="checksum"):
        backend.read("a-1")
    backend.set_aside("a-1")
    assert backend.folders("a-") == []
    backend.release()


def test_the_server_that_came_last_writes_and_the_one_before_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"memory://bucket/{uuid.uuid4().hex}"
    first, second = held(url), held(url)
    with pytest.raises(OSError, match="another gc-server has taken over this URL"):
        first.write("a-1", TREE, {})
    assert second.folders("a-") == []
    second.write("a-1", TREE, {})
    with pytest.raises(OSError, match="another gc-server has taken over this URL"):
        first.write("a-1", {"other": 1}, {})
    assert value(second.read("a-1")[0]) == value(TREE), "what the last has written stays"
    put_file = vars(second)["_files"].put_file

    def puts(*arguments: Any) -> None:
        put_file(*arguments)
        held(url)  # meanwhile
        second.release()

    monkeypatch.setattr(vars(second)["_files"], "put_file", puts)
    with pytest.raises(OSError, match="another gc-server has taken over this URL"):
        second.write("a-2", TREE, {})
    assert second.folders("a-") == ["a-1"]


def test_a_folder_stays_until_another_one_is_in_its_place(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.addfinalizer(lambda: failpoints.arm(""))
    backend = held(str(tmp_path))
    backend.write("a-1", TREE, {})
    failpoints.arm("checkpoint.synced=eio@1")
    with pytest.raises(OSError, match="Input/output error"):
        backend.write("a-1", {"other": 1}, {})
    assert value(backend.read("a-1")[0]) == value(TREE)
    (tmp_path / ".a-2.partial").mkdir()  # of a process that was killed
    (tmp_path / ".a-3.before.partial").mkdir()
    assert backend.left("a-") == ["a-1", "a-2", "a-3"]
    assert backend.folders("a-") == ["a-1"]
    backend.remove("a-2")
    backend.remove("a-3")
    assert backend.left("a-") == ["a-1"]
    backend.release()


def test_a_disk_belongs_to_one(tmp_path: Path) -> None:
    backend = held(str(tmp_path))
    with pytest.raises(BlockingIOError):
        held(str(tmp_path))
    backend.release()
    held(str(tmp_path)).release()


def test_what_a_store_raises_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Remote("memory://bucket/job")

    class NoCredentialsError(Exception):
        pass

    def fails(*_: Any, **__: Any) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    for name in ("put_file", "pipe_file", "cat_file", "ls", "get_file"):
        monkeypatch.setattr(vars(backend)["_files"], name, fails)
    for call in (
        backend.claim,
        lambda: backend.write("a-1", TREE, {}),
        lambda: backend.folders("a-"),
        lambda: backend.read("a-1"),
        lambda: backend.text("job.json"),
    ):
        with pytest.raises(OSError, match="memory://bucket/job: Unable to locate credentials"):
            call()


def test_a_url_that_cannot_be_reached_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="Protocol not known: nonsense"):
        backend_at("nonsense://bucket/job")
    with pytest.raises(BackendError, match=r"s3://bucket/job: .*s3fs"):
        backend_at("s3://bucket/job")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BackendError, match=r"URLs need fsspec; pip install '\.\[remote\]' in a checkout"):
        backend_at("s3://bucket/job")


def test_a_file_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("all of it")
    for where in (str(tmp_path / "file"), f"file://{tmp_path}/file"):
        with local_copy(where) as file:
            assert file is not None
            assert file.read_text() == "all of it"
    for where in (str(tmp_path), f"file://{tmp_path}"):
        with local_copy(where) as file:
            assert file is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_is_not_another_server(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fails)
    with pytest.raises(StateError) as raised:
        StateFolder(tmp_path / "state", syncs=True)
    said = str(raised.value)
    assert f"{tmp_path}/state: its file system cannot lock files ({os.strerror(number)})" in said
    assert "use a folder on a local disk" in said
    assert "another gc-server" not in said


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_file_system_may_sync_files_only(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the disk itself, EIO, still is one, and so is any error of a file."""
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", files_only)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)):
            Disk(tmp_path).put_text("a", "text")
        return
    Disk(tmp_path).put_text("a", "text")
    assert Disk(tmp_path).text("a") == "text"


def test_only_its_owner_can_read_a_state(tmp_path: Path) -> None:
    old = os.umask(0)  # as open as a set-up can be
    try:
        backend = Disk(tmp_path / "state")
        backend.hold()
        backend.put_text("job.json", "{}")
        backend.write("a-1", TREE, {})
        journal = Journal(tmp_path / "state" / "journal", syncs=False)
        journal.close()
        backend.release()
        Disk(tmp_path / "worker" / "job.w0").write("worker-1", TREE, {})
    finally:
        os.umask(old)
    found = {each: each.stat().st_mode & 0o777 for each in tmp_path.rglob("*")}
    found.pop(tmp_path / "worker")  # shared by the workers of a machine
    assert {mode for each, mode in found.items() if each.is_dir()} == {0o700}
    assert {mode for each, mode in found.items() if each.is_file()} == {0o600}


def test_an_open_folder_of_an_earlier_server_is_closed_and_any_other_one_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("earlier", "empty", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    (tmp_path / "earlier" / "lock").touch()
    (tmp_path / "other" / "thesis.tex").touch()
    for name in ("earlier", "empty", "other"):
        held(str(tmp_path / name)).release()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("earlier", "empty", "other")] == [
        *(0o700, 0o700, 0o755)
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/other: other users of this machine can list this folder (mode 755); its new files are "
        "closed to them"
    ]
