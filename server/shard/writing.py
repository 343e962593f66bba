"""A model as a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]


def write_model(
    path: Path, tensors: Mapping[str, torch.Tensor], *, version: int, digest: str, finished: bool
) -> None:
    """Write tensors by name, under a temporary name first. Raises OSError. Equal arguments give equal bytes.

    Args:
        version, digest, finished: for the file's metadata: of the parameters, their SHA-256, and whether
            training was finished.
    """
    metadata = {"version": str(version), "sha256": digest, "finished": "true" if finished else "false"}
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # by the process's umask; safetensors lets nobody else read its files
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
        _sort_metadata(temporary)
        temporary.chmod(mode & 0o777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # the disk may be full
        raise


def _sort_metadata(path: Path) -> None:
    """Sort the metadata in a safetensors file's header by name. safetensors writes them in random order, so
    that files of equal parameters would have different checksums."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # equal, unless safetensors and json escape some name in different ways
            file.seek(8)
            file.write(text.ljust(size))
