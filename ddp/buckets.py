"""DDP's buckets, which wait for their mean, and their pieces, which travel as bundles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..compressors.payload import Float32
from .bundle import Parameter

DTYPES = torch.float32, torch.bfloat16, torch.float16
BUNDLE_BYTES = 512 << 10  # of gradients, as float32: fewer are not worth the messages of an exchange

# On a slower link, a bundle of dense codes ends with the tensor that makes it this large. Its bytes travel
# while the next one is compressed. On a faster link the messages cost more.
CUT_BYTES_PER_S, BUNDLE_ELEMENTS = 40e6, 1 << 20


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


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The gradients of consecutive parameters of a bucket.

    Attributes:
        buffer: the piece of the bucket's buffer.
        parameters: its parameters, in order.
    """

    buffer: torch.Tensor
    parameters: Sequence[Parameter]


def bundled(buckets: Sequence[Bucket], link_rate: float) -> Iterator[list[Piece]]:
    """Yield the pieces of each bundle: of one, or on a slow link of several.

    link_rate: bytes per second.
    """
    if link_rate >= CUT_BYTES_PER_S:
        yield [Piece(bucket.buffer, bucket.parameters) for bucket in buckets]
        return
    bundle: list[Piece] = []
    waiting = 0
    for bucket in buckets:
        first = start = end = 0
        for number, parameter in enumerate(bucket.parameters):
            end += math.prod(parameter.shape)
            last = number + 1 == len(bucket.parameters)
            if last or waiting + end - start >= BUNDLE_ELEMENTS:
                bundle.append(Piece(bucket.buffer[start:end], bucket.parameters[first : number + 1]))
                waiting, first, start = waiting + end - start, number + 1, end
            if waiting >= BUNDLE_ELEMENTS:
                yield bundle
                bundle, waiting = [], 0
    if bundle:
        yield bundle


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


def gradients_of(pieces: Sequence[Piece]) -> torch.Tensor:
    """Return the pieces' gradients end to end, as float32; of one piece of float32, its buffer."""
    values = [piece.buffer.float() for piece in pieces]
    return values[0] if len(values) == 1 else torch.cat([each.to(values[0].device) for each in values])


def fill(pieces: Sequence[Piece], write: Callable[[Float32], object]) -> None:
    """Fill the pieces' buffers, end to end, with the values that `write` writes to an array."""
    only = pieces[0].buffer
    if len(pieces) == 1 and only.device.type == "cpu" and only.dtype is torch.float32:
        write(only.numpy())
        return
    sizes = [piece.buffer.numel() for piece in pieces]
    out = np.empty(sum(sizes), np.float32)
    write(out)
    values = torch.split(torch.from_numpy(out), sizes)
    for piece, value in zip(pieces, values, strict=True):
        piece.buffer.copy_(value)
