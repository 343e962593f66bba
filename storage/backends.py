"""Storage backends, where state outlives its process: a folder on this machine, or one at a URL that fsspec
supports (`s3://bucket/job`).

A backend holds checkpoint folders (`checkpoint`) and short texts. A folder is complete or absent. On a disk
it is written under another name, synced and renamed. Object stores cannot rename: there the manifest is
written last and removed first, and a folder without a manifest does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from ..common import failpoints
from ..common.naming import printable
from . import checkpoint

OWNER = "owner"
log = logging.getLogger("gradwire.storage")

# Matches a user, a colon, and a password up to the last "@". A password may contain "/", although RFC 3986
# requires %2F. Digits before a "/" or the end are a port instead, and an address in brackets is a host.
_PASSWORD = re.compile(r"://(?>\[[\da-fA-F:.]*\]|[^/:])*+:(?!\d+(?:/|$)).*@", re.DOTALL)
_PLAIN_PASSWORD = re.compile(r"://[^/?#@]*@")


class BackendError(OSError):
    """A backend that does not exist or cannot be reached from this process; the message says what to do.

    Example:
        >>> try:
        ...     gradwire.connect(state="no-such://place", worker_id="w0")
        ... except gradwire.BackendError as error:
        ...     print(error)
        no-such://place/...: Protocol not known: no-such"""


def is_url(where: str | Path) -> bool:
    """Return True if `where` is a URL, False if it is a path."""
    return "://" in str(where)


def below(where: str | Path, name: str) -> str:
    """Return the path or URL of `name`, a file name, within the folder `where`."""
    return f"{str(where).rstrip('/')}/{name}"


def shown(where: str | Path) -> str:
    """Return a path or URL for messages, without its password and without everything after `?`."""
    text = str(where)
    if not is_url(text):
        return text
    if found := _PASSWORD.search(text):
        # If it is uncertain which "@" ends the password, hide everything after the scheme.
        rest = f"@{text[found.end() :]}" if _PLAIN_PASSWORD.fullmatch(found[0]) else ""
        text = f"{text[: found.start()]}://…{rest}"
    return re.sub(r"\?.*", "?…", text, flags=re.DOTALL)


def backend_at(where: str | Path) -> Backend:
    """Return the backend at a path or URL; raise BackendError for a URL that this process cannot use."""
    return Remote(str(where)) if is_url(where) else Disk(Path(where))


class Disk:
    """A storage backend in a folder on this machine.

    It has the same methods as `Remote`. They raise OSError if the disk fails.

    Attributes:
        name: the folder, for messages.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.path = path
        self._lock: int | None = None

    def hold(self) -> None:
        """Create the folder and lock it until `release`; raise BlockingIOError if another process holds the
        lock.

        Folders that a killed process left incomplete are removed. Raise BackendError if the file system has
        no locks, because two servers would damage each other's files."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tighten()
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise
        except OSError as error:
            os.close(lock)
            raise BackendError(
                f"{self.path}: its file system cannot lock files ({error.strerror}), so nothing would keep "
                "out a second server; use a folder on a local disk, or mount this one with locks (NFS: "
                "local_lock=flock)"
            ) from None
        self._lock = lock
        for left in self.path.glob(".*.partial"):  # left by a process that was killed while writing
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)

    def _tighten(self) -> None:
        """Close the folder to other users, who could read the parameters; warn if it is not ours alone."""
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if not mode & 0o077:
            return
        try:
            # A folder that holds other files as well, such as /tmp, stays as it is.
            if (self.path / "lock").exists() or not any(self.path.iterdir()):
                self.path.chmod(0o700)
                return
        except OSError:
            pass  # it belongs to another user, or its file system has no modes
        log.warning(
            "%s: other users of this machine can list this folder (mode %o); its new files are closed to "
            "them",
            *(self.path, mode),
        )

    def release(self) -> None:
        """Release the lock of `hold`, if it is held."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def claim(self) -> None:
        """Do nothing, because `hold` already excludes other processes. Called before the first `write`."""

    def folders(self, prefix: str) -> list[str]:
        """Return the names of complete folders that begin with `prefix`, ascending."""
        return sorted(each.name for each in self.path.glob(f"{prefix}*") if each.is_dir())

    def left(self, prefix: str) -> list[str]:
        """Return the names that begin with `prefix` of all folders, ascending, incomplete and half removed
        ones included."""
        hidden = [checkpoint.folder_of(each) for each in self.path.glob(f".{prefix}*") if each.is_dir()]
        return sorted({*self.folders(prefix), *hidden})

    def write(self, folder: str, tree: Any, about: Mapping[str, Any]) -> int:
        """Write a checkpoint folder, in place of a previous one of that name, and return the bytes of its
        files. about: plain values for the manifest."""
        return checkpoint.write_folder(self.path / folder, tree, about)

    def read(self, folder: str) -> tuple[Any, dict[str, Any]]:
        """Return the tree and the manifest of a checkpoint folder; raise DamagedError if it is damaged or
        missing."""
        return checkpoint.read_folder(self.path / folder)

    def set_aside(self, folder: str) -> None:
        """Rename a damaged folder, so that `folders` no longer returns it but its files are kept."""
        aside = self.path / f"damaged-{folder}"
        shutil.rmtree(aside, ignore_errors=True)
        (self.path / folder).rename(aside)

    def remove(self, folder: str) -> None:
        """Delete the checkpoint folder of that name, if it exists."""
        checkpoint.remove_folder(self.path / folder)

    def text(self, name: str) -> str:
        """Return the text stored under `name`; raise FileNotFoundError if there is none."""
        return (self.path / name).read_text(encoding="utf-8")

    def put_text(self, name: str, text: str) -> None:
        """Store a text under `name`, replacing a previous one in one step."""
        partial = self.path / f".{name}.partial"
        checkpoint.write_private(partial, text)
        checkpoint.sync(partial)
        partial.replace(self.path / name)
        checkpoint.sync(self.path)


class Remote:
    """A storage backend in a folder at a URL. Files pass through this machine's folder for temporary files.

    It has the same methods as `Disk`. They raise OSError if the store fails; `write` does, too, once another
    process has claimed the folder.

    Attributes:
        name: the URL, for messages.
    """

    def __init__(self, url: str) -> None:
        """Open the store at `url`; raise BackendError if this process cannot use it."""
        _check(url)
        self.name = url.rstrip("/")
        self._files, self._root = _reached(self.name)
        self._owner = ""

    def hold(self) -> None:
        """Do nothing, because an object store has no locks."""

    def claim(self) -> None:
        """Make this process the only writer: `write` now fails in the process that claimed the folder
        before."""
        self._owner = uuid.uuid4().hex
        self.put_text(OWNER, self._owner)

    def release(self) -> None:
        """Do nothing: a checkpoint that is still being written has yet to compare the owner's name."""

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
        """Raise OSError if another process has claimed the folder at this URL since `claim`."""
        if self._owner and self.text(OWNER) != self._owner:
            raise OSError(f"{self.name}: another gc-server has taken over this URL; stop one of the two")

    def read(self, folder: str) -> tuple[Any, dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="gradwire-") as name:
            local = Path(name)
            for file in (checkpoint.MANIFEST, checkpoint.TREE, checkpoint.TENSORS):
                self._get(f"{folder}/{file}", local / file)
            return checkpoint.read_folder(local)

    def _get(self, name: str, to: Path) -> None:
        """Fetch a file if it exists. A missing file is reported by the code that reads the copy."""
        with self._reaching(), contextlib.suppress(FileNotFoundError):
            self._files.get_file(self._at(name), str(to))

    def set_aside(self, folder: str) -> None:
        """Remove the manifest of a damaged folder, so that `folders` no longer returns it but its files are
        kept."""
        with self._reaching():
            self._files.rm_file(self._at(f"{folder}/{checkpoint.MANIFEST}"))

    def remove(self, folder: str) -> None:
        for file in (checkpoint.MANIFEST, checkpoint.TREE, checkpoint.TENSORS):
            with self._reaching(), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._at(f"{folder}/{file}"))
        with contextlib.suppress(Exception):  # object stores have no folders to remove
            self._files.rmdir(self._at(folder))

    def text(self, name: str) -> str:
        with self._reaching():
            data: bytes = self._files.cat_file(self._at(name))
        return data.decode()

    def put_text(self, name: str, text: str) -> None:
        """Store a text under `name`, replacing a previous one."""
        with self._reaching():
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(self._at(name), text.encode())

    def _exists(self, name: str) -> bool:
        """Return True if the store has a file of that name."""
        with self._reaching():
            return bool(self._files.exists(self._at(name)))

    def _at(self, name: str) -> str:
        """Return the path of a file within the store."""
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _reaching(self) -> Generator[None]:
        """Turn the exceptions of a store's library into OSError with the backend's name; FileNotFoundError
        passes."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise OSError(f"{self.name}: {str(error) or repr(error)}") from error


Backend = Disk | Remote


def _check(url: str) -> None:
    """Raise BackendError if file names cannot be appended to `url`, or if it holds a password, which logs
    would show."""
    why = ""
    if _PASSWORD.search(url):
        why = "expected a URL without a password: the store's package finds credentials by itself"
    elif found := re.search(r"[?#]", url):
        why = f"expected a URL without {found[0]!r}: file names are appended to it"
    elif not url.isprintable() or " " in url:
        why = "expected a URL without spaces and control characters"
    if why:
        raise BackendError(f"{printable(shown(url))}: {why}")


def _reached(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for `url`, and the path within it; raise BackendError if there is none."""
    try:
        fsspec: Any = importlib.import_module("fsspec.core")
    except ImportError:
        remedy = "pip install '.[remote]' in a checkout of Gradwire"
        raise BackendError(f"{shown(url)}: URLs need fsspec; {remedy}") from None
    try:
        files, root = fsspec.url_to_fs(url, skip_instance_cache=True)
    except ImportError as error:  # its message names the package
        raise BackendError(f"{shown(url)}: {error}, with pip, in the environment of Gradwire") from None
    except Exception as error:
        raise BackendError(f"{shown(url)}: {str(error) or repr(error)}") from None
    if hasattr(files, "auto_mkdir"):  # only file systems with real folders have this attribute
        files.auto_mkdir = True
    return files, str(root).rstrip("/")


@contextlib.contextmanager
def local_copy(where: str | Path) -> Generator[Path | None]:
    """Yield the path of a file with the content at `where`, or None if `where` is a folder.

    A local file is yielded itself; one at a URL is copied, and the copy removed afterwards. Raises OSError if
    it cannot be read."""
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
