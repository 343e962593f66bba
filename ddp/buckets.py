"""DDP's buckets on their way: those that wait for their mean, and those whose frames are being gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .bundle import Bundle, Parameter, mean
from .exchange import Flight, Frame


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
class Sent:
    """A bundle whose frame is being gathered.

    Attributes:
        buckets: the buckets that the bundle covers, in its order.
        agreed: CRC-32C that the frames of all ranks must carry.
    """

    bundle: Bundle
    buckets: Sequence[Bucket]
    agreed: int
    flight: Flight


def average(frames: Sequence[Frame], buckets: Sequence[Bucket]) -> None:
    """Decode the ranks' frames and write their mean into the buckets' buffers."""
    pushes = [frame.payloads for frame in frames]
    only = buckets[0].buffer
    if len(buckets) == 1 and only.device.type == "cpu" and only.dtype is torch.float32:
        mean(pushes, only.numpy())
        return
    sizes = [bucket.buffer.numel() for bucket in buckets]
    out = np.empty(sum(sizes), np.float32)
    mean(pushes, out)
    values = torch.split(torch.from_numpy(out), sizes)
    for bucket, value in zip(buckets, values, strict=True):
        bucket.buffer.copy_(value)
