"""The parameters: what a closed round does to them, and what goes down to the workers.

`parameters` are the server's own, in float32; `downlink` says what of them the workers have.

Nothing here knows of sockets or clocks. One thread at a time may use a store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from ...compressors import DensePayload, Payload, decode, finite, wire_bytes
from ...optimizer import Optimizer
from ...proto.manifest import Manifest
from ...proto.messages import Content, Update
from ...proto.transfer import encode_chunks, tensor_header
from ...proto.wire import encode_server
from ..job.events import Apply
from .aggregation import Aggregation, Mean, combine
from .downlink import Downlink, Way
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
            downlink: compressor of the updates, or `auto`; see `downlink`.
            seed: of the job, for compressors that draw.
            aggregation: how a round's gradients become one.
            delay_compensation: λ of g + λ g² (w - w_base), which makes up to first order for the parameters'
                having moved on since a gradient was computed; 0 for none. Keeps a copy of every version at
                which gradients are being computed. Source: Zheng et al., "Asynchronous Stochastic Gradient
                Descent with Delay Compensation" (ICML 2017).
            keep_last: keep a copy of the parameters before each step, to go back to if it fails. Not needed
                where `replica` is one.
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
        self._downlink = Downlink(
            *(manifest, self.parameters, downlink, seed),
            scratch=self._gradients,  # which nobody needs after the step
            leaves_zeros=self._optimizer.leaves_zeros,
        )
        self._keep_last = keep_last
        self._last: list[torch.Tensor] = []
        self._bases: dict[int, list[torch.Tensor]] = {}  # by version
        if delay_compensation:
            self._keep_base(0, frozenset())

    def apply(self, order: Apply, pushes: Sequence[Sequence[Payload]]) -> Broadcast:
        """Take one optimizer step and encode what the workers need for it. pushes: of the contributions.

        The mean is one over all samples, summed in the order given (`mean`). Without samples, and with fewer
        gradients than the aggregation needs, the parameters stay as they are. If the step fails, they become
        what every worker has where the replica is apart from them, otherwise what they were, if that is kept.

        Raises:
            DivergedError: the parameters are no longer finite.
        """
        shares = [
            share
            for share in zip(order.contributions, pushes, strict=True)
            if share[0].samples > 0 and share[0].weight != 0
        ]
        way = self._downlink.choose(shares)
        last = self._before()
        try:
            return self._apply(order, shares, way)
        except Exception:
            for parameter, before in zip(self.parameters, last, strict=True):
                parameter.copy_(before)
            raise

    def _before(self) -> Sequence[torch.Tensor]:
        """What to go back to: the replica if it is apart from the parameters, or a copy that is kept."""
        if self.replica is not self.parameters or not self._keep_last:
            self._last = []
            return self.replica
        self._last = self._last or [torch.empty_like(parameter) for parameter in self.parameters]
        for kept, parameter in zip(self._last, self.parameters, strict=True):
            kept.copy_(parameter)
        return self._last

    @property
    def replica(self) -> Sequence[torch.Tensor]:
        """What every worker has of the last version."""
        return self._downlink.replica

    def _apply(self, order: Apply, shares: Sequence[Share], way: Way) -> Broadcast:
        changed = len(shares) >= self._aggregation.fewest
        if changed:
            outs = [_flat(gradient) for gradient in self._gradients]
            if isinstance(self._aggregation, Mean):
                mean(shares, order.weight, outs)
            else:
                combine(self._aggregation, [payloads for _, payloads in shares], outs)
            if self._compensation and order.base_version is not None:
                self._compensate(order.base_version, order.weight)
            self._optimizer.learning_rate = self._base_rate * order.rate_factor
            self._optimizer.step()
            self._check_finite(order.version)
        content, payloads = self._downlink.update(way, order.version, changed=changed)
        broadcast = _encode(order.version, content, payloads)
        self.version = order.version
        if self._compensation:
            self._keep_base(order.version, order.bases)
        return broadcast if changed else replace(broadcast, passed_over=len(shares))

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
            if not finite(parameter.detach().view(-1)):
                raise DivergedError(f"parameters of {spec.name!r} are no longer finite at version {version}")

    def snapshot(self) -> Broadcast:
        """The replica as it is, for a worker that has none or an old one."""
        return _encode(self.version, Content.VALUES, self._downlink.snapshot())

    def load(self, version: int, values: Sequence[Payload]) -> None:
        """Take over a worker's parameters, and what its optimizer remembers with them."""
        for parameter, payload in zip(self.parameters, values, strict=True):
            _flat(parameter)[:] = decode(payload)
        self.version = version

    def relabel(self, version: int) -> None:
        """Call what is here another version."""
        self.version = version

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


def _encode(version: int, content: Content, payloads: Sequence[Payload]) -> Broadcast:
    update = Update(
        version=version,
        content=content,
        tensors=tuple(tensor_header(tensor, payload) for tensor, payload in enumerate(payloads)),
    )
    messages = (encode_server(update), *encode_chunks(version, [payload.data for payload in payloads]))
    raw_bytes = sum(payload.elements for payload in payloads) * 4
    return Broadcast(version, content, messages, raw_bytes)


def compressed_bytes(payloads: Sequence[Payload]) -> tuple[int, int]:
    """Of the payloads that are not dense: their bytes with levels, and what the tensors take as float32."""
    compressed = [payload for payload in payloads if not isinstance(payload, DensePayload)]
    return sum(map(wire_bytes, compressed)), sum(payload.elements * 4 for payload in compressed)
