"""The parameters: what a closed round does to them, and what goes down to the workers.

`parameters` are the server's own, in float32. With a lossy downlink the workers' replicas differ from them,
and `replica` is the copy that every worker holds, bit for bit: each update carries the compressed difference
between the two, so that what one update leaves out is in the next: the difference is the residual, and error
feedback needs no other state. Without loss the values themselves go down and the two are the same tensors.

Nothing here knows of sockets or clocks. One thread at a time may use a store.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from ...compressors import (
    DenseFormat,
    DensePayload,
    IndexCoding,
    LayerRule,
    ModelCompressor,
    Payload,
    SparsePayload,
    add_update,
    decode,
    lossless,
    wire_bytes,
)
from ...optimizer import Optimizer
from ...proto.manifest import Manifest
from ...proto.messages import Content, Update
from ...proto.transfer import encode_chunks, tensor_header
from ...proto.wire import encode_server
from ..job.events import Apply
from .aggregation import Aggregation, Mean, combine
from .mean import Share, mean

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
MEAN = Mean()
BuildOptimizer = Callable[[Sequence[torch.Tensor]], Optimizer]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """An encoded update: the same messages go to everybody.

    raw_bytes: what its tensors take as float32. passed_over: gradients that came and had no effect, because
    they were too few to be aggregated as was asked for.
    """

    version: int
    content: Content
    messages: tuple[bytes, ...]
    raw_bytes: int
    passed_over: int = 0

    @property
    def wire_bytes(self) -> int:
        """Of its messages, without what gRPC puts around them."""
        return sum(map(len, self.messages))


class DivergedError(ArithmeticError):
    """The parameters have left the range of float32: the training has diverged."""


class Store:
    def __init__(
        self,
        manifest: Manifest,
        values: Sequence[Float32],
        downlink: str,
        build_optimizer: BuildOptimizer,
        seed: int = 0,
        aggregation: Aggregation = MEAN,
        delay_compensation: float = 0.0,
        keep_last: bool = False,
    ) -> None:
        """
        Args:
            values: initial parameters, a flat float32 array per tensor of the manifest; taken over.
            downlink: compressor of the updates, "none" for values without loss.
            seed: of the job, for compressors that draw.
            aggregation: how a round's gradients become one.
            delay_compensation: λ of g + λ g² (w - w_base), which makes up to first order for the parameters'
                having moved on since a gradient was computed; 0 for none. Keeps a copy of every version at
                which gradients are being computed. Source: Zheng et al., "Asynchronous Stochastic Gradient
                Descent with Delay Compensation" (ICML 2017).
            keep_last: keep a copy of the parameters before each step, to go back to if it fails. Not needed
                with a lossy downlink, where `replica` is one.
        """
        self._aggregation = aggregation
        self._compensation = delay_compensation
        self.manifest = manifest
        self.version = 0
        self.parameters = [
            torch.from_numpy(value).reshape(spec.shape)
            for spec, value in zip(manifest.specs, values, strict=True)
        ]
        self._gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._optimizer = build_optimizer(self.parameters)
        self._base_rate = self._optimizer.learning_rate
        self._lossy = not lossless(downlink)
        self._encoder = ModelCompressor(manifest.specs, downlink, LayerRule(), seed, 0, bare=True)
        self.replica = (
            [parameter.clone() for parameter in self.parameters] if self._lossy else self.parameters
        )
        kept = self.parameters if keep_last and not self._lossy else []
        self._last = [parameter.clone() for parameter in kept]
        self._bases: dict[int, list[torch.Tensor]] = {}  # by version
        if delay_compensation:
            self._keep_base(0, frozenset())

    def apply(self, order: Apply, pushes: Sequence[Sequence[Payload]]) -> Broadcast:
        """Take one optimizer step and encode what the workers need for it. pushes: of the contributions.

        The mean is one over all samples, summed in the order given (`mean`). Without samples, and with fewer
        gradients than the aggregation needs, the parameters stay as they are. If the step fails, they become
        again what they were before it, if `keep_last` or the downlink has kept that.

        Raises:
            DivergedError: the parameters are no longer finite.
        """
        for kept, parameter in zip(self._last, self.parameters, strict=False):
            kept.copy_(parameter)
        try:
            return self._apply(order, list(zip(order.contributions, pushes, strict=True)))
        except Exception:
            # With a lossy downlink, the last parameters are those that every worker has.
            for parameter, last in zip(self.parameters, self._last or self.replica, strict=True):
                parameter.copy_(last)
            raise

    def _apply(self, order: Apply, shares: Sequence[Share]) -> Broadcast:
        contributing = [each for each in shares if each[0].samples > 0 and each[0].weight != 0]
        changed = len(contributing) >= self._aggregation.fewest
        if changed:
            outs = [_flat(gradient) for gradient in self._gradients]
            if isinstance(self._aggregation, Mean):
                mean(contributing, order.weight, outs)
            else:
                combine(self._aggregation, [payloads for _, payloads in contributing], outs)
            if self._compensation and order.base_version is not None:
                self._compensate(order.base_version, order.weight)
            self._optimizer.learning_rate = self._base_rate * order.rate_factor
            self._optimizer.step()
            self._check_finite(order.version)
        broadcast = self._encode_update(order.version, changed=changed)
        self.version = order.version
        if self._compensation:
            self._keep_base(order.version, order.bases)
        return broadcast if changed else replace(broadcast, passed_over=len(contributing))

    def _compensate(self, base_version: int, weight: float) -> None:
        """Of weight · g make weight · (g + λ g² (w - w_base))."""
        bases = self._bases[base_version]
        for gradient, replica, base in zip(self._gradients, self.replica, bases, strict=True):
            moved = replica - base
            gradient.add_(moved.mul_(gradient).mul_(gradient), alpha=self._compensation / weight)

    def _keep_base(self, newest: int, bases: frozenset[int]) -> None:
        """Workers may be told to compute at this version; others that nobody computes at are forgotten."""
        for version in list(self._bases):
            if version < newest - 1 and version not in bases:
                del self._bases[version]
        self._bases[newest] = [tensor.clone() for tensor in self.replica]

    def _check_finite(self, version: int) -> None:
        for spec, parameter in zip(self.manifest.specs, self.parameters, strict=True):
            if not torch.isfinite(parameter.sum(dtype=torch.float64)):
                raise DivergedError(f"parameters of {spec.name!r} are no longer finite at version {version}")

    def _encode_update(self, version: int, *, changed: bool) -> Broadcast:
        if not self._lossy and not changed:
            nothing = [_nothing(spec.elements) for spec in self.manifest.specs]
            return self._encode(version, Content.DELTA, nothing)
        if not self._lossy:
            return self._encode(version, Content.VALUES, list(map(_values, self.parameters)))
        largest = torch.finfo(torch.float32).max
        differences = [
            (parameter - replica).clamp_(-largest, largest)
            for parameter, replica in zip(self.parameters, self.replica, strict=True)
        ]
        # A warm-up is for gradients: updates are compressed in full from the first.
        payloads = self._encoder.compress(differences, 1, version=version, epoch=math.inf)
        for replica, payload in zip(self.replica, payloads, strict=True):
            add_update(payload, replica)
        return self._encode(version, Content.DELTA, payloads)

    def snapshot(self) -> Broadcast:
        """The replica as it is, for a worker that has none or an old one."""
        return self._encode(self.version, Content.VALUES, list(map(_values, self.replica)))

    def load(self, version: int, values: Sequence[Payload]) -> None:
        """Take over a worker's parameters, and what its optimizer remembers with them."""
        for parameter, payload in zip(self.parameters, values, strict=True):
            _flat(parameter)[:] = decode(payload)
        self.version = version

    def relabel(self, version: int) -> None:
        """Call what is here another version."""
        self.version = version

    def _encode(self, version: int, content: Content, payloads: Sequence[Payload]) -> Broadcast:
        parts = [payload.data for payload in payloads]
        update = Update(
            version=version,
            content=content,
            tensors=tuple(tensor_header(tensor, payload) for tensor, payload in enumerate(payloads)),
        )
        messages = (encode_server(update), *encode_chunks(version, parts))
        raw_bytes = sum(payload.elements for payload in payloads) * 4
        return Broadcast(version, content, messages, raw_bytes)

    def values(self) -> list[Bytes]:
        """The parameters as little-endian float32 bytes, in manifest order, over their own memory."""
        return [_flat(parameter).view(np.uint8) for parameter in self.parameters]

    def sha256(self) -> str:
        """Over the values of the parameters."""
        digest = hashlib.sha256()
        for tensor, value in zip(self.manifest.tensors, self.values(), strict=True):
            if not tensor.state:
                digest.update(value.data)
        return digest.hexdigest()

    def save(self, path: Path, digest: str, *, finished: bool = True) -> None:
        """Write the parameters as safetensors, under a temporary name first.

        Args:
            digest: their SHA-256.
            finished: whether training was; the file's metadata say so, with the version and the digest.
        """
        named = zip(self.manifest.tensors, self.parameters, strict=True)
        tensors = {tensor.name: parameter for tensor, parameter in named if not tensor.state}
        metadata = {
            "version": str(self.version),
            "sha256": digest,
            "finished": "true" if finished else "false",
        }
        temporary = path.with_name(path.name + ".partial")
        temporary.touch()
        mode = temporary.stat().st_mode  # by the process's umask; safetensors lets nobody else read its files
        save_file({name: p.contiguous() for name, p in tensors.items()}, temporary, metadata)
        temporary.chmod(mode & 0o777)
        temporary.replace(path)


def _flat(tensor: torch.Tensor) -> Float32:
    return tensor.detach().view(-1).numpy()


def _values(tensor: torch.Tensor) -> Payload:
    """The tensor as a dense payload over its own memory."""
    values = _flat(tensor)
    return DensePayload(format=DenseFormat.FLOAT32, elements=values.size, data=values.view(np.uint8))


def _nothing(elements: int) -> Payload:
    """Zeros, in a few bytes."""
    nothing = np.empty(0, np.uint8)
    values = DensePayload(format=DenseFormat.BFLOAT16, elements=0, data=nothing)
    return SparsePayload(elements=elements, count=0, coding=IndexCoding.GAPS, values=values, data=nothing)


def compressed_bytes(payloads: Sequence[Payload]) -> tuple[int, int]:
    """Of the payloads that are not dense: their bytes with levels, and what the tensors take as float32."""
    compressed = [payload for payload in payloads if not isinstance(payload, DensePayload)]
    return sum(map(wire_bytes, compressed)), sum(payload.elements * 4 for payload in compressed)
