"""State that is to outlive its process: trees of plain values and tensors in a folder, and back.

A folder is whole or not there: its files are written and synced under another name, the manifest with their
checksums last, and the folder is renamed then. What is read is checked against the manifest before any of it
is used. Nothing is unpickled: tensors are in a safetensors file, everything else is JSON, and a dataclass is
made only of a module that is loaded already.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, EnumType
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

from . import failpoints

MANIFEST = "manifest.json"
TREE, TENSORS = "state.json", "tensors.safetensors"
FORMAT = 1
_PLAIN = (str, bool, int, float, type(None))


class FormatError(Exception):
    """A folder is of another release; the message says which format it has."""


class DamagedError(Exception):
    """A folder is not what was written: the message says what is wrong with which file."""


# ---- trees


def flatten(tree: Any) -> tuple[Any, Tensors]:
    """A tree as what JSON takes, and its tensors by name, which share memory with it.

    Takes None, bool, int, float, str, bytes, list, tuple, NamedTuple, dict with any keys, dataclass, Enum,
    numpy array and CPU tensor. Raises TypeError for anything else.
    """
    tensors: Tensors = {}
    return _flatten(tree, tensors), tensors


def _flatten(value: Any, tensors: Tensors) -> Any:
    import numpy as np
    import torch

    if isinstance(value, _PLAIN) and not isinstance(value, Enum):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {"tensor": name}
    items: Any = value  # of which nothing is known but what the checks say
    if isinstance(value, np.ndarray | np.generic):
        name, array = str(len(tensors)), np.array(items)
        tensors[name] = torch.from_numpy(array.reshape(-1).view(np.uint8))
        return {"array": name, "dtype": array.dtype.str, "shape": list(array.shape)}
    if isinstance(value, Enum):
        return {"enum": _name(type(value)), "value": value.value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made_of: Any = value.__class__
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(made_of)}
        return {
            "dataclass": _name(made_of),
            "fields": {name: _flatten(each, tensors) for name, each in fields.items()},
        }
    if isinstance(value, tuple):
        each_of = [_flatten(each, tensors) for each in items]
        kind: Any = items.__class__
        return {"tuple": each_of} if kind is tuple else {"named": _name(kind), "items": each_of}
    if isinstance(value, list):
        return [_flatten(each, tensors) for each in items]
    if isinstance(value, dict):
        return {"dict": [[_flatten(key, tensors), _flatten(items[key], tensors)] for key in items]}
    raise TypeError(f"{type(value).__qualname__} cannot be saved: {value!r:.100}")


def unflatten(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree again. Raises DamagedError for what `flatten` has not made."""
    import numpy as np

    if isinstance(plain, _PLAIN):
        return plain
    if plain.__class__ is list:
        return [unflatten(each, tensors) for each in plain]
    try:
        match plain:
            case {"bytes": text}:
                return base64.b64decode(text)
            case {"tensor": name}:
                return tensors[name]
            case {"array": name, "dtype": dtype, "shape": shape}:
                array = tensors[name].numpy().view(np.dtype(dtype)).reshape(shape)
                return array[()] if not shape else array
            case {"dataclass": kind, "fields": fields}:
                made = object.__new__(_kind(kind))
                for name, each in fields.items():
                    object.__setattr__(made, name, unflatten(each, tensors))
                return made
            case {"enum": kind, "value": value}:
                return _kind(kind)(value)
            case {"named": kind, "items": items}:
                return _kind(kind)(*[unflatten(each, tensors) for each in items])
            case {"tuple": items}:
                return tuple(unflatten(each, tensors) for each in items)
            case {"dict": items}:
                return {unflatten(key, tensors): unflatten(each, tensors) for key, each in items}
            case _:
                pass
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"a saved value cannot be read: {error!r}") from None
    raise DamagedError(f"no saved value: {plain!r:.100}")


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _kind(name: str) -> Any:
    """A dataclass, NamedTuple or Enum of a module that is loaded. Raises DamagedError."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    plain_class = found.__class__ in (type, EnumType)
    if plain_class and (
        dataclasses.is_dataclass(found) or hasattr(found, "_fields") or found.__class__ is EnumType
    ):
        return found
    raise DamagedError(f"{name!r} is no class of values that is known here")


# ---- folders


def write_folder(folder: Path, tree: Any, about: Mapping[str, Any]) -> int:
    """Write a tree as a folder, which is whole or not there. One that is there stays until then.
    about: plain values for its manifest.

    Returns its bytes. Raises OSError; nothing is left of it then.
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
    """Write the files of a tree into a folder that is there. about: as above. Returns their bytes. Raises
    OSError."""
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    plain, tensors = flatten(tree)
    (folder / TREE).write_text(json.dumps(plain), encoding="utf-8")
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / TENSORS)
    failpoints.reached("checkpoint.written")
    files = {name: _about(folder / name) for name in (TREE, TENSORS)}
    manifest = {"format": FORMAT, **about, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return sum(each["bytes"] for each in files.values())


def size(tree: Any) -> int:
    """Bytes of the tensors and arrays of a tree."""
    return sum(each.nbytes for each in flatten(tree)[1].values())


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder says of itself. Raises DamagedError, FormatError, and OSError where it cannot be told."""
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise FormatError(f"{folder} has format {manifest['format']}, and this release reads {FORMAT}")
        return cast("dict[str, Any]", manifest)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / MANIFEST} cannot be read: {error}") from None


def read_folder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The tree and the manifest of a folder. Raises DamagedError where anything is not as it was written,
    FormatError, and OSError where that cannot be told."""
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
        return unflatten(plain, load_file(folder / TENSORS)), manifest
    except (ValueError, SafetensorError) as error:
        raise DamagedError(f"{folder} cannot be read: {error}") from None


def remove_folder(folder: Path) -> None:
    """And what was never whole of it. What is left after a crash in between is no folder to be read."""
    gone, before = _hidden(folder)
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _hidden(folder: Path) -> tuple[Path, Path]:
    """Where it is while it is written or removed, and where the one before it is meanwhile."""
    return folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.before.partial")


def name_of(hidden: Path) -> str:
    """Of the folder of which a hidden one was left."""
    return hidden.name[1:].partition(".")[0]


def _about(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def sync(path: Path) -> None:
    """Have a file or folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # nobody reads it soon, and others can use its memory
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
