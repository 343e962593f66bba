"""The checkpoint format: a tree of values and tensors as a folder. Servers and workers store their states in
it.

    state.json           the tree (`values`)
    tensors.safetensors  its tensors
    manifest.json        the format, values that the writer adds, and the checksums of both files

A folder is complete or absent: its files are written and synced under another name, the manifest last, and
then the folder is renamed. Everything read is checked against the manifest before any of it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..common import failpoints
from .values import DamagedError, pack, unpack

if TYPE_CHECKING:
    import torch

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
MANIFEST = "manifest.json"
TREE, TENSORS = "state.json", "tensors.safetensors"
FORMAT = 11  # 10 had no epochs in the manifest


class FormatError(Exception):
    """A folder in the format of another release; the message says which format and how to proceed."""


def write_folder(folder: Path, tree: Any, about: Mapping[str, Any]) -> int:
    """Write a tree as a checkpoint folder. A previous folder of that name stays until the new one is
    complete.

    Args:
        about: plain values for the manifest.

    Returns:
        The bytes of its files.

    Raises:
        OSError: the disk failed; nothing of the new folder is left.
        TypeError: the tree holds a value that cannot be saved.
    """
    partial, before = _hidden(folder)
    shutil.rmtree(partial, ignore_errors=True)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial.mkdir(mode=0o700)
    try:
        written = write_files(partial, tree, about)
        for name in (TREE, TENSORS, MANIFEST):
            sync(partial / name)
        sync(partial)
        failpoints.reached("checkpoint.synced")
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        partial.rename(folder)
        failpoints.reached("checkpoint.renamed")
        sync(folder.parent)
        failpoints.reached("checkpoint.directory-synced")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(before, ignore_errors=True)
    return written


def write_files(folder: Path, tree: Any, about: Mapping[str, Any]) -> int:
    """Write the three files of a checkpoint into an existing folder, without syncing them.

    Args:
        about: plain values for the manifest.

    Returns:
        The bytes of the state and the tensors.

    Raises:
        OSError: the disk failed; files may be left.
        TypeError: the tree holds a value that cannot be saved.
    """
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    tensors: dict[str, torch.Tensor] = {}
    plain = pack(tree, tensors)
    write_private(folder / TREE, json.dumps(plain))
    (folder / TENSORS).touch(0o600)  # safetensors before 0.8 leaves the mode to the umask
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / TENSORS)
    failpoints.reached("checkpoint.written")
    files = {name: _about(folder / name) for name in (TREE, TENSORS)}
    manifest = {"format": FORMAT, **about, "files": files}
    write_private(folder / MANIFEST, json.dumps(manifest, indent=1))
    return sum(each["bytes"] for each in files.values())


def size(tree: Any) -> int:
    """Return the total number of bytes of the tensors and arrays in a tree."""
    tensors: dict[str, torch.Tensor] = {}
    pack(tree, tensors)
    return sum(each.nbytes for each in tensors.values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder.

    Raises:
        DamagedError: the manifest is missing or is not valid.
        FormatError: another release wrote it.
        OSError: the disk failed.
    """
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise FormatError(
                f"{folder} has format {manifest['format']}, and this release reads {FORMAT}; start the "
                "release of gradwire that wrote it"
            )
        return cast("dict[str, Any]", manifest)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / MANIFEST} cannot be read: {error}") from None


def read_folder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the tree of a checkpoint folder and the folder's index file, which lists files and checksums.

    Raises:
        DamagedError: a file is missing, or differs from the manifest's checksum.
        FormatError: another release wrote it.
        OSError: the disk failed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    manifest = read_manifest(folder)
    for name in (TREE, TENSORS):
        path = folder / name
        try:
            expected, found = manifest["files"][name], _about(path)
        except (FileNotFoundError, KeyError, TypeError) as error:
            raise DamagedError(f"{path} cannot be read: {error!r}") from None
        if found != expected:
            raise DamagedError(f"{path} is damaged: its checksum differs from the manifest's")
    try:
        plain = json.loads((folder / TREE).read_text(encoding="utf-8"))
        return unpack(plain, load_file(folder / TENSORS)), manifest
    except (ValueError, RecursionError, SafetensorError) as error:
        raise DamagedError(f"{folder} cannot be read: {error}") from None


def remove_folder(folder: Path) -> None:
    """Delete a checkpoint folder, and its half written or half removed remains. A crash leaves no readable
    folder."""
    gone, before = _hidden(folder)
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _hidden(folder: Path) -> tuple[Path, Path]:
    """Return the temporary names of a folder: while it is written or removed, and of the one that it
    replaces."""
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.before.partial")


def folder_of(hidden: Path) -> str:
    """Return the name of the folder that the hidden, temporary folder `hidden` belongs to."""
    return hidden.name[1:].partition(".")[0]


def _about(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file, as the manifest stores them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; raise OSError if the disk fails.

    Some file systems (FUSE, SMB) sync files only. They decide themselves when a new name is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise
        if hasattr(os, "posix_fadvise"):  # the file is not read soon: free its page cache for other uses
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
