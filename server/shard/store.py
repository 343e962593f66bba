"""The parameters: what a closed round does to them, and what goes down to the workers.

`parameters` are the server's own, in float32; `downlink` says what of them the workers have.

Nothing here knows of sockets or clocks. One thread at a time may use a store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from ...compressors import DensePayload, Part, Payload, Plan, Unit, decode, divide, finite, wire_bytes
from ...optimizer import Optimizer
from ...proto.manifest import Manifest
from ...proto.messages import Content, Update
from ...proto.transfer import PLAN, encode_chunks, part_transfer, payload_header
from ...proto.wire import encode_server
from ..job.events import Apply
from .aggregation import Aggregation, Krum, Mean, combine, least_far
from .downlink import Downlink, PartUpdate, Placed
from .mean import Payloads, Push, add_up, weights

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
MEAN = Mean()
BuildOptimizer = Callable[[Sequence[torch.Tensor]], Optimizer]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part of an update as messages, the same for everybody.

    raw_bytes: what its elements take as float32. whole: whether a replica at any version can take it in.
    """

    messages: tuple[bytes, ...]
    raw_bytes: int
    whole: bool


Send = Callable[[Encoded], None]


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
        plan: Plan | None = None,
    ) -> None:
        """
        Args:
            values: initial parameters, a flat float32 array per tensor of the manifest; copied.
            downlink: compressor of the updates, or `auto`; see `downlink`.
            seed: of the job, for compressors that draw.
            aggregation: how a round's gradients become one.
            delay_compensation: λ of g + λ g² (w - w_base), which makes up to first order for the parameters'
                having moved on since a gradient was computed; 0 for none. Keeps a copy of every version at
                which gradients are being computed. Source: Zheng et al., "Asynchronous Stochastic Gradient
                Descent with Delay Compensation" (ICML 2017).
            plan: how the model is divided; the default one if None.
            keep_last: keep a copy of what every worker has before each step, to go back to if it fails.
        """
        self._aggregation = aggregation
        self._compensation = delay_compensation
        self.manifest = manifest
        self.plan = plan or divide([spec.elements for spec in manifest.specs])
        self.version = 0
        self._flat = torch.from_numpy(np.concatenate([*values, np.empty(0, np.float32)]))
        self._gradient = torch.zeros_like(self._flat)
        self.parameters = self._by_tensor(self._flat)
        # The optimizer sees parts: its steps are the same for each element, wherever that lies.
        stepped: list[torch.Tensor] = []
        for part in self.plan.parts:
            stepped.append(self._flat[part.start : part.end])
            stepped[-1].grad = self._gradient[part.start : part.end]
        self._optimizer = build_optimizer(stepped)
        self._base_rate = self._optimizer.learning_rate
        self._downlink = Downlink(
            *(manifest, self.plan, self._flat, downlink, seed),
            scratch=self._gradient,  # which nobody needs after the step
            leaves_zeros=self._optimizer.leaves_zeros,
        )
        self._keep_last = keep_last
        self._last: torch.Tensor | None = None
        self._bases: dict[int, torch.Tensor] = {}  # by version
        if delay_compensation:
            self._keep_base(0, frozenset())

    def _by_tensor(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.manifest.specs, pairwise(self.plan.starts), strict=True)
        return [flat[start:end].view(spec.shape) for spec, (start, end) in pairs]

    def apply(self, order: Apply, pushes: Sequence[Push], send: Send) -> int:
        """Take one optimizer step, and encode what the workers need for it. pushes: of the contributions.

        send: takes each part of the update as soon as it is encoded.
        The mean is one over all samples, summed in the order given (`mean`). Without samples, and with fewer
        gradients than the aggregation needs, the parameters stay as they are. If the step fails, they become
        what every worker has where the replica is apart from them, otherwise what they were, if that is kept.
        Returns how many gradients came and had no effect, because they were too few to be aggregated as
        asked.

        Raises:
            DivergedError: the parameters are no longer finite.
        """
        pairs = [
            (contribution, push)
            for contribution, push in zip(order.contributions, pushes, strict=True)
            if contribution.samples > 0 and contribution.weight != 0
        ]
        shares = [contribution for contribution, _ in pairs]
        step = Step(order, weights(shares, order.weight), [push for _, push in pairs])
        step.changes = len(pairs) >= self._aggregation.fewest
        if step.changes and isinstance(self._aggregation, Krum):
            step.chosen = least_far(self._aggregation, [_in_order(push) for push in step.pushes])
        self._optimizer.learning_rate = self._base_rate * order.rate_factor
        last = self._before()
        try:
            for unit in self.plan.units:
                self._apply_unit(unit, step, send)
        except Exception:
            self._flat.copy_(last)
            raise
        self.version = order.version
        if self._compensation:
            self._keep_base(order.version, order.bases)
        return 0 if step.changes else len(pairs)

    def _apply_unit(self, unit: Unit, step: Step, send: Send) -> None:
        if len(unit.parts) == 1 or self._downlink.piecewise(unit, self._placed(unit.parts[:1], step)):
            groups = [[part] for part in unit.parts]
        else:
            groups = [list(unit.parts)]
        for group in groups:
            start, end = self.plan.parts[group[0]].start, self.plan.parts[group[-1]].end
            ways = self._downlink.choose(unit, start, end, self._placed(group, step))
            for part in group:
                if step.changes:
                    self._step_part(part, step)
            for update in self._downlink.encode(ways, group, step.order.version, changed=step.changes):
                send(self._encode(step.order.version, update))

    def _placed(self, parts: Sequence[int], step: Step) -> list[Placed]:
        """What there is of some parts, which a push may hold in part."""
        return [
            (self.plan.parts[part].start, payloads)
            for part in parts
            for payloads in step.of(part)
            if payloads
        ]

    def _step_part(self, number: int, step: Step) -> None:
        """Sum a part and take the optimizer's step with it."""
        part = self.plan.parts[number]
        out = self._gradient[part.start : part.end].numpy()
        if isinstance(self._aggregation, Mean):
            present = [
                (push[number], w) for push, w in zip(step.pushes, step.weights, strict=True) if number in push
            ]
            add_up([payloads for payloads, _ in present], [weight for _, weight in present], out)
        elif isinstance(self._aggregation, Krum):
            add_up([step.pushes[step.chosen][number]], [1.0], out)
        else:
            combine(self._aggregation, step.of(number), out)
        if self._compensation and step.order.base_version is not None:
            self._compensate(part, step.order.base_version, step.order.weight)
        self._optimizer.step(number)
        if not finite(self._flat[part.start : part.end]):
            self._refuse(part, step.order.version)

    def _before(self) -> torch.Tensor:
        """What to go back to: what every worker has. A copy if that is kept: parts of the step may have gone
        to the workers when another one fails."""
        replica = self._downlink.replica
        if not self._keep_last:
            return replica
        if self._last is None:
            self._last = torch.empty_like(self._flat)
        return self._last.copy_(replica)

    @property
    def replica(self) -> Sequence[torch.Tensor]:
        """What every worker has of the last version."""
        return self._by_tensor(self._downlink.replica)

    def _refuse(self, part: Part, version: int) -> None:
        pairs = zip(self.manifest.specs, self.parameters, strict=True)
        for spec, parameter in pairs:
            if not finite(parameter.view(-1)):
                raise DivergedError(f"parameters of {spec.name!r} are no longer finite at version {version}")

    def _compensate(self, part: Part, base_version: int, weight: float) -> None:
        """Of weight · g make weight · (g + λ g² (w - w_base))."""
        here = slice(part.start, part.end)
        gradient = self._gradient[here]
        moved = self._downlink.replica[here] - self._bases[base_version][here]
        gradient.add_(moved.mul_(gradient).mul_(gradient), alpha=self._compensation / weight)

    def _keep_base(self, newest: int, bases: frozenset[int]) -> None:
        """Workers may be told to compute at this version; others that nobody computes at are forgotten."""
        for version in list(self._bases):
            if version < newest - 1 and version not in bases:
                del self._bases[version]
        self._bases[newest] = self._downlink.replica.clone()

    def snapshot(self) -> list[Encoded]:
        """The replica as it is, for a worker that has none or an old one."""
        return [self._encode(self.version, update) for update in self._downlink.snapshot()]

    def _encode(self, version: int, update: PartUpdate) -> Encoded:
        """The messages of a part of an update."""
        pairs = zip(update.payloads, update.contents, strict=True)
        whole = all(
            content is Content.VALUES and isinstance(payload, DensePayload) for payload, content in pairs
        )
        header = Update(
            version=version,
            part=update.part,
            plan=PLAN,
            whole=whole,
            payloads=tuple(map(payload_header, update.payloads, update.contents)),
        )
        transfer = part_transfer(version, update.part)
        chunks = encode_chunks(transfer, [payload.data for payload in update.payloads])
        return Encoded((encode_server(header), *chunks), 4 * self.plan.parts[update.part].elements, whole)

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


@dataclass(slots=True, eq=False)
class Step:
    """What a version is made of. pushes: that have an effect, with their weights, in rank order. changes:
    whether they are enough. chosen: by Krum."""

    order: Apply
    weights: Sequence[float]
    pushes: Sequence[Push]
    changes: bool = True
    chosen: int = 0

    def of(self, part: int) -> list[Payloads]:
        """What there is of a part."""
        return [push[part] for push in self.pushes if part in push]


def _in_order(push: Push) -> list[Payload]:
    return [payload for part in sorted(push) for payload in push[part]]


def compressed_bytes(payloads: Sequence[Payload]) -> tuple[int, int]:
    """Of the payloads that are not dense: their bytes with levels, and what the tensors take as float32."""
    compressed = [payload for payload in payloads if not isinstance(payload, DensePayload)]
    return sum(map(wire_bytes, compressed)), sum(payload.elements * 4 for payload in compressed)
