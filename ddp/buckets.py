"""DDP's buckets, which wait for their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..compressors.payload import Float32
from .bundle import Parameter

DTYPES = torch.float32, torch.bfloat16, torch.float16
BUNDLE_BYTES = 512 << 10  # of gradients, as float32: fewer are not worth the messages of an exchange


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """A bucket of DDP's whose mean is not computed yet.

    Attributes:
        buffer: this rank's gradients, one-dimensional; overwritten with the mean.
        parameters: the parameters whose gradients are in the buffer, in its order.
        future: completes with `buffer` once it holds the mean over the ranks.
    """

    buffer: torch.Tensor
    parameters: Sequence[Parameter]
    future: torch.futures.Future[torch.Tensor]


def check(buffer: torch.Tensor, parameters: Sequence[Parameter]) -> None:
    """Raise TypeError if a buffer holds gradients that cannot be compressed."""
    if buffer.layout is not torch.strided or buffer.dtype not in DTYPES:
        got = f"{buffer.dtype} ({buffer.layout})"
        known = ", ".join(map(str, DTYPES))
        remedy = "convert these parameters, or have DDP ignore them; no sparse=True in embeddings"
        raise TypeError(
            f"gradient of {parameters[0].name!r}: expected a dense one of {known}, got {got}; {remedy}"
        )


def large(buckets: Sequence[Bucket]) -> bool:
    """Return True if the buckets are large enough to travel as a bundle."""
    return sum(4 * bucket.buffer.numel() for bucket in buckets) >= BUNDLE_BYTES


def gradients_of(buckets: Sequence[Bucket]) -> torch.Tensor:
    """Return the buckets' gradients end to end, as float32; of one bucket of float32, its buffer."""
    pieces = [bucket.buffer.float() for bucket in buckets]
    return pieces[0] if len(pieces) == 1 else torch.cat([each.to(pieces[0].device) for each in pieces])


def fill(buckets: Sequence[Bucket], write: Callable[[Float32], object]) -> None:
    """Fill the buckets' buffers, end to end, with the values that `write` writes to an array."""
    only = buckets[0].buffer
    if len(buckets) == 1 and only.device.type == "cpu" and only.dtype is torch.float32:
        write(only.numpy())
        return
    sizes = [bucket.buffer.numel() for bucket in buckets]
    out = np.empty(sum(sizes), np.float32)
    write(out)
    values = torch.split(torch.from_numpy(out), sizes)
    for bucket, value in zip(buckets, values, strict=True):
        bucket.buffer.copy_(value)
