"""Storage backends, in which state outlives its process: a folder of this machine, or one at a URL that
fsspec reaches (`s3://bucket/job`).

A backend holds checkpoint folders (`checkpoint`) and short texts. A folder is whole or not there. On a disk
it is written under another name, synced and renamed. Object stores rename nothing: there the manifest is
written last and removed first, and a folder without one does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from ..common import failpoints
from ..common.naming import printable
from . import checkpoint

OWNER = "owner"

# A user, a colon, and a password up to the last "@". A password may hold "/", where RFC 3986 wants %2F; only
# digits before a "/" or the end are a port, and an address in brackets is a host.
_PASSWORD = re.compile(r"://(?>\[[\da-fA-F:.]*\]|[^/:])*+:(?!\d+(?:/|$)).*@", re.DOTALL)
_PLAIN_PASSWORD = re.compile(r"://[^/?#@]*@")


class BackendError(OSError):
    """A backend does not exist or cannot be reached from here; the message says what to do."""


def is_url(where: str | Path) -> bool:
    return "://" in str(where)


def below(where: str | Path, name: str) -> str:
    """Return where a folder within another is. name: a file name."""
    return f"{str(where).rstrip('/')}/{name}"


def shown(where: str | Path) -> str:
    """Return a path or URL for messages, without what may be secret: a password, and all that follows `?`."""
    text = str(where)
    if not is_url(text):
        return text
    if found := _PASSWORD.search(text):
        # Where it is not certain which "@" ends the password, nothing after the scheme is shown.
        rest = f"@{text[found.end() :]}" if _PLAIN_PASSWORD.fullmatch(found[0]) else ""
        text = f"{text[: found.start()]}://…{rest}"
    return re.sub(r"\?.*", "?…", text, flags=re.DOTALL)


def backend_at(where: str | Path) -> Backend:
    """Return the backend at a path or URL. Raises BackendError for a URL that cannot be reached here."""
    return Remote(str(where)) if is_url(where) else Disk(Path(where))


class Disk:
    """A folder of this machine. Its methods are those of all backends; they raise OSError if it is unusable.

    Attributes:
        name: for people.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.path = path
        self._lock: int | None = None

    def hold(self) -> None:
        """Lock it. Raises BlockingIOError if another process has locked it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise BlockingIOError(*error.args) from None
        self._lock = lock
        for left in self.path.glob(".*.partial"):  # of a process that was killed meanwhile
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def claim(self) -> None:
        """Called before the first `write`. Does nothing, because the lock suffices."""

    def folders(self, prefix: str) -> list[str]:
        """Return the names of whole folders that begin with `prefix`, ascending."""
        return sorted(each.name for each in self.path.glob(f"{prefix}*") if each.is_dir())

    def left(self, prefix: str) -> list[str]:
        """Like `folders`, but with those that were never whole or have been set aside in part."""
        hidden = [checkpoint.folder_of(each) for each in self.path.glob(f".{prefix}*") if each.is_dir()]
        return sorted({*self.folders(prefix), *hidden})

    def write(self, folder: str, tree: Any, about: Mapping[str, Any]) -> int:
        """Write a folder in place of a previous one of that name. Return its bytes."""
        return checkpoint.write_folder(self.path / folder, tree, about)

    def read(self, folder: str) -> tuple[Any, dict[str, Any]]:
        """Return tree and manifest of a folder. Raises DamagedError, also if there is none."""
        return checkpoint.read_folder(self.path / folder)

    def set_aside(self, folder: str) -> None:
        """Remove a damaged folder from what `folders` returns."""
        aside = self.path / f"damaged-{folder}"
        shutil.rmtree(aside, ignore_errors=True)
        (self.path / folder).rename(aside)

    def remove(self, folder: str) -> None:
        checkpoint.remove_folder(self.path / folder)

    def text(self, name: str) -> str:
        """Raises FileNotFoundError."""
        return (self.path / name).read_text(encoding="utf-8")

    def put_text(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        checkpoint.sync(partial)
        partial.replace(self.path / name)
        checkpoint.sync(self.path)


class Remote:
    """A folder at a URL. Files pass through the machine's folder for temporary files."""

    def __init__(self, url: str) -> None:
        """Raises BackendError."""
        _check(url)
        self.name = url.rstrip("/")
        self._files, self._root = _reached(self.name)
        self._owner = ""

    def hold(self) -> None:
        """Do nothing: an object store has no locks."""

    def claim(self) -> None:
        """Have the process that claimed it before write no more."""
        self._owner = uuid.uuid4().hex
        self.put_text(OWNER, self._owner)

    def release(self) -> None:
        """Keep the owner's name, which a checkpoint that is still being written compares."""

    def folders(self, prefix: str) -> list[str]:
        return [folder for folder in self.left(prefix) if self._exists(f"{folder}/{checkpoint.MANIFEST}")]

    def left(self, prefix: str) -> list[str]:
        with self._reaching():
            self._files.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                names = [
                    str(each).rstrip("/").rpartition("/")[2] for each in self._files.ls(self._root, False)
                ]
                return sorted(name for name in names if name.startswith(prefix))
            return []

    def write(self, folder: str, tree: Any, about: Mapping[str, Any]) -> int:
        self._check_owner()
        self.remove(folder)
        with tempfile.TemporaryDirectory(prefix="gradwire-") as name:
            local = Path(name)
            written = checkpoint.write_files(local, tree, about)
            with self._reaching():
                for file in (checkpoint.TREE, checkpoint.TENSORS):
                    self._files.put_file(str(local / file), self._at(f"{folder}/{file}"))
                failpoints.reached("checkpoint.stored")
            self._check_owner()
            with self._reaching():
                manifest = (local / checkpoint.MANIFEST).read_bytes()
                self._files.pipe_file(self._at(f"{folder}/{checkpoint.MANIFEST}"), manifest)
        return written

    def _check_owner(self) -> None:
        if self._owner and self.text(OWNER) != self._owner:
            raise OSError(f"{self.name}: another gc-server has taken it over; stop one of the two")

    def read(self, folder: str) -> tuple[Any, dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="gradwire-") as name:
            local = Path(name)
            for file in (checkpoint.MANIFEST, checkpoint.TREE, checkpoint.TENSORS):
                self._get(f"{folder}/{file}", local / file)
            return checkpoint.read_folder(local)

    def _get(self, name: str, to: Path) -> None:
        """Fetch a file, if it exists; its reader reports a missing one."""
        with self._reaching(), contextlib.suppress(FileNotFoundError):
            self._files.get_file(self._at(name), str(to))

    def set_aside(self, folder: str) -> None:
        with self._reaching():
            self._files.rm_file(self._at(f"{folder}/{checkpoint.MANIFEST}"))

    def remove(self, folder: str) -> None:
        for file in (checkpoint.MANIFEST, checkpoint.TREE, checkpoint.TENSORS):
            with self._reaching(), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._at(f"{folder}/{file}"))
        with contextlib.suppress(Exception):  # object stores have none
            self._files.rmdir(self._at(folder))

    def text(self, name: str) -> str:
        with self._reaching():
            data: bytes = self._files.cat_file(self._at(name))
        return data.decode()

    def put_text(self, name: str, text: str) -> None:
        with self._reaching():
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(self._at(name), text.encode())

    def _exists(self, name: str) -> bool:
        with self._reaching():
            return bool(self._files.exists(self._at(name)))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _reaching(self) -> Generator[None]:
        """Turn exceptions of a store's library into OSError that names the backend."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise OSError(f"{self.name}: {str(error) or repr(error)}") from error


Backend = Disk | Remote


def _check(url: str) -> None:
    """Raises BackendError for a URL to which no file name can be added, or that logs would give away."""
    why = ""
    if _PASSWORD.search(url):
        why = "expected none with a password: credentials are what the store's package finds by itself"
    elif found := re.search(r"[?#]", url):
        why = f"expected none with {found[0]!r}: names of files are added at its end"
    elif not url.isprintable() or " " in url:
        why = "expected one without spaces and control characters"
    if why:
        raise BackendError(f"{printable(shown(url))}: {why}")


def _reached(url: str) -> tuple[Any, str]:
    """fsspec's file system, and the path in it. Raises BackendError."""
    try:
        fsspec: Any = importlib.import_module("fsspec.core")
    except ImportError:
        remedy = "pip install '.[remote]' in a checkout of Gradwire"
        raise BackendError(f"{shown(url)}: URLs need fsspec; {remedy}") from None
    try:
        files, root = fsspec.url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:  # it names the package
        raise BackendError(f"{shown(url)}: {error}, with pip, in the environment of Gradwire") from None
    except Exception as error:
        raise BackendError(f"{shown(url)}: {str(error) or repr(error)}") from None
    if hasattr(files, "auto_mkdir"):  # a disk
        files.auto_mkdir = True
    return files, str(root).rstrip("/")


@contextlib.contextmanager
def local_copy(where: str | Path) -> Generator[Path | None]:
    """A file on this machine with what is there; None if that is a folder. Raises OSError."""
    if not is_url(where):
        yield None if Path(where).is_dir() else Path(where)
        return
    files, path = _reached(str(where))
    try:
        is_file = bool(files.isfile(path))
        with tempfile.TemporaryDirectory(prefix="gradwire-") as name:
            copy = Path(name) / "file"
            if is_file:
                files.get_file(path, str(copy))
            yield copy if is_file else None
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{shown(where)}: {str(error) or repr(error)}") from error
