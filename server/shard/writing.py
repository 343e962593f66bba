"""A model as a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]


def write_model(
    path: Path, tensors: Mapping[str, torch.Tensor], *, version: int, digest: str, finished: bool
) -> None:
    """Write tensors by name, under a temporary name first. Raises OSError.

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
        temporary.chmod(mode & 0o777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # the disk may be full
        raise
