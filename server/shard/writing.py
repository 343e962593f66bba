"""Writes a model as a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]


def write_model(
    path: Path, tensors: Mapping[str, torch.Tensor], *, version: int, digest: str, finished: bool
) -> None:
    """Write tensors by name as a safetensors file, under a temporary name until the file is complete. Equal
    arguments give equal bytes. Raises OSError if the file cannot be written. finished: whether training is
    finished, for the metadata."""
    metadata = {"version": str(version), "sha256": digest, "finished": "true" if finished else "false"}
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.touch()
        # As the process's umask has it: safetensors makes files that only their owner can read.
        mode = temporary.stat().st_mode
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
        _sort_metadata(temporary)
        with suppress(OSError):  # a file system without modes (SMB, FAT) refuses
            temporary.chmod(mode & 0o777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # frees the space, for the disk may be full
        raise


def _sort_metadata(path: Path) -> None:
    """Sort the metadata in a safetensors file's header by name. safetensors writes them in random order,
    which would give files of equal parameters different checksums."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # always, unless safetensors and json escape a name differently
            file.seek(8)
            file.write(text.ljust(size))
