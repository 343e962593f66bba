"""The checkpoint format: a tree of values and tensors as a folder. Of the server, and of workers' own states.

    state.json           the tree (`values`)
    tensors.safetensors  its tensors
    manifest.json        the format, what the writer says of the folder, and the checksums of both files

A folder is whole or not there: its files are written and synced under another name, the manifest last, and
the folder is renamed then. What is read is checked against the manifest before any of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..common import failpoints
from .values import DamagedError, pack, unpack

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
TREE, TENSORS = "state.json", "tensors.safetensors"
FORMAT = 2  # 1 had paths of Python classes


class FormatError(Exception):
    """A folder is of another release; the message says which format it has, and what to do."""


def write_folder(folder: Path, tree: Any, about: Mapping[str, Any]) -> int:
    """Write a tree as a folder. A previous folder of that name stays until this one is whole.

    Args:
        about: plain values for the manifest.

    Returns:
        The bytes of its files.

    Raises:
        OSError: nothing is left of it.
        TypeError: the tree holds what cannot be saved.
    """
    partial, before = _hidden(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
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
    """Write the files of a tree into an existing folder, unsynced. Arguments, result and errors are those of
    `write_folder`."""
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    tensors: dict[str, torch.Tensor] = {}
    plain = pack(tree, tensors)
    (folder / TREE).write_text(json.dumps(plain), encoding="utf-8")
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / TENSORS)
    failpoints.reached("checkpoint.written")
    files = {name: _about(folder / name) for name in (TREE, TENSORS)}
    manifest = {"format": FORMAT, **about, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return sum(each["bytes"] for each in files.values())


def size(tree: Any) -> int:
    """Return the bytes of the tensors and arrays of a tree."""
    tensors: dict[str, torch.Tensor] = {}
    pack(tree, tensors)
    return sum(each.nbytes for each in tensors.values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder. Raises DamagedError, FormatError, and OSError if it cannot be told."""
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
    """Return the tree and the manifest of a folder. Raises DamagedError where anything is not as it was
    written, FormatError, and OSError where that cannot be told."""
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
            raise DamagedError(f"{path} is damaged: its checksum is not the manifest's")
    try:
        plain = json.loads((folder / TREE).read_text(encoding="utf-8"))
        return unpack(plain, load_file(folder / TENSORS)), manifest
    except (ValueError, RecursionError, SafetensorError) as error:
        raise DamagedError(f"{folder} cannot be read: {error}") from None


def remove_folder(folder: Path) -> None:
    """Remove a folder, and what was left of it half written. A crash meanwhile leaves nothing readable."""
    gone, before = _hidden(folder)
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _hidden(folder: Path) -> tuple[Path, Path]:
    """Return where a folder is while it is written or removed, and where the previous one is meanwhile."""
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.before.partial")


def folder_of(hidden: Path) -> str:
    """Return the name of the folder of which a hidden one was left."""
    return hidden.name[1:].partition(".")[0]


def _about(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # nobody reads it soon, and others can use its memory
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
