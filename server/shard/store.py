"""The store of the parameters: values, optimizer, replica, and the messages of updates. `making` makes
versions.

`parameters` are the server's own, in float32; `downlink` has the replica, which every worker holds a copy of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt
import torch

from ...common.parts import Plan, Unit
from ...compressors import (
    Bases,
    CompressorSpec,
    DenseFormat,
    DensePayload,
    Payload,
    decode,
    dense_payload,
    finite,
    payload_bytes,
)
from ...optim.memory import Remembered, joined
from ...optim.optimizer import Optimizer, OptimizerGroup
from ...proto.manifest import Manifest
from ...proto.messages import Beside, Content, Update
from ...proto.transfer import Pack, encode_chunks, part_transfer, payload_header
from ...proto.updates import BASES
from ...proto.wire import encode_server
from .coordinates import stepped_by_replicas
from .downlink import Downlink
from .lent import Lent
from .part_update import PartUpdate, State

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
BuildOptimizer = Callable[[Sequence[torch.Tensor]], Optimizer]
# Returns the optimizer's state for a manifest's parameters in these groups, by ranges in flat order, or None.
Recall = Callable[[Manifest, Sequence[OptimizerGroup]], Sequence[Remembered] | None]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One part of an update as encoded messages, the same for every worker.

    Attributes:
        messages: header and chunks; those of a snapshot are encoded each time they are read.
        raw_bytes: bytes of the part's elements as float32.
        whole: True if the part holds the value of each element, so that it fits a replica at any version.
        number: number of the part.
        payload_bytes: bytes of its payloads, before packing.
    """

    messages: Iterable[bytes]
    raw_bytes: int
    whole: bool
    number: int = 0
    payload_bytes: int = 0


Send = Callable[[Encoded], None]


@dataclass(frozen=True, slots=True, eq=False)
class EarlierBases:
    """Bases of an earlier job, from which another job continues.

    Attributes:
        compressor: spec of the earlier job's compressor.
        values: bases by name of the tensor.
    """

    compressor: str
    values: Mapping[str, Float32]


@dataclass(frozen=True, slots=True)
class Copy:
    """The parameters of one version.

    Attributes:
        parameters: parameters by name.
    """

    version: int
    parameters: Mapping[str, torch.Tensor]
    digest: str


class DivergedError(ArithmeticError):
    """Raised when a parameter is not finite any more: the training has diverged."""


class Store:
    """The parameters of a job with their optimizer and the replica. One thread at a time may use a store.

    Attributes:
        parameters: the server's parameters, by tensor.
        checked: the last version at which a checksum of the replica was computed, and that checksum.
        downlink: compressor of the updates, or `auto`.
        bases: bases of the present version; None if the job's compressor has none.
        stepped: indices of the tensors of which replicas take the optimizer's step.
    """

    def __init__(
        self,
        manifest: Manifest,
        values: Sequence[Float32],
        downlink: str,
        build_optimizer: BuildOptimizer,
        seed: int = 0,
        plan: Plan | None = None,
        *,
        whole_gradient: bool = False,
        compressor: CompressorSpec | None = None,
        pack: Pack | None = None,
    ) -> None:
        """
        Args:
            values: initial parameters, flat float32 arrays that lie end to end. A single one belongs to the
                store afterwards; several are copied.
            downlink: compressor of the updates, or `auto`; see `server/shard/downlink`.
            build_optimizer: creates the optimizer of the plan's parts, with the manifest's groups.
            plan: division of the model into parts; None for the default plan.
            whole_gradient: True to have a gradient of all parts at once; False of one unit at a time.
            compressor: the job's compressor; None for one without bases.
            pack: packs the chunks of updates and snapshots, as in `encode_chunks`."""
        self.manifest, self._pack = manifest, pack
        self.plan = plan or manifest.plan()
        self.version = 0
        self._flat = torch.from_numpy(np.concatenate(values) if len(values) > 1 else values[0])
        self._whole_gradient = whole_gradient
        self._gradient = torch.empty(0, dtype=torch.float32, device="cpu")
        self._base = 0  # element in flat order at which the gradient begins
        self._lent: list[ReferenceType[Lent]] = []  # of one thread alone, unlike a WeakSet
        self.parameters = self._by_tensor(self._flat)
        self._optimizer = build_optimizer(self._stepped())
        self.downlink = downlink
        self.bases: Bases | None = None
        if compressor is not None and compressor.shared:
            self.bases = Bases.of_job(manifest.specs, compressor, seed)
        self._named = "" if self.bases is None else str(compressor)
        self._seed = seed
        self.stepped = stepped_by_replicas(self.bases, downlink)
        self._downlink = Downlink(
            *(manifest, self.plan, self._flat, downlink, seed),
            scratch=self._gradient_of,  # free to be overwritten once the part is stepped
            leaves_zeros=self._optimizer.leaves_zeros,
            stepped=self.stepped,
            lossy=compressor is not None and not compressor.lossless and not compressor.shared,
            changes=lambda: self._recall(0, self._flat.numel()),
        )
        self.checked = 0, 0

    def _by_tensor(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor, one for each tensor of the manifest, in its shape."""
        pairs = zip(self.manifest.specs, pairwise(self.plan.starts), strict=True)
        return [flat[start:end].view(spec.shape) for spec, (start, end) in pairs]

    def _stepped(self) -> list[torch.Tensor]:
        """Return views of the parameters, one for each part, with their gradients. The optimizer steps parts;
        each element's step is the same in any part."""
        elements = self._flat.numel()
        if not self._whole_gradient:
            elements = max((unit.end - unit.start for unit in self.plan.units), default=0)
        if self._gradient.numel() < elements:
            self._gradient = torch.zeros(elements, dtype=torch.float32, device="cpu")
        stepped: list[torch.Tensor] = []
        for unit in self.plan.units:
            self._begin_unit(unit)
            for number in unit.parts:
                part = self.plan.parts[number]
                stepped.append(self._flat[part.start : part.end])
                stepped[-1].grad = self._gradient_of(part.start, part.end)
        return stepped

    def _begin_unit(self, unit: Unit) -> None:
        """Use the memory of the gradient for a unit, before its parts are summed."""
        self._base = 0 if self._whole_gradient else unit.start

    def _gradient_of(self, start: int, end: int) -> torch.Tensor:
        """Return the gradient of a range of the present unit, in flat order."""
        return self._gradient[start - self._base : end - self._base]

    def _lend(
        self,
        transfer: int,
        start: int,
        end: int,
        head: Sequence[bytes] = (),
        beside: Sequence[Bytes] = (),
    ) -> Lent:
        """Return messages with the replica's present values of a range of elements. beside: bytes that follow
        them."""
        values = self._downlink.replica[start:end].numpy().view(np.uint8)
        pack = self._pack if head else None  # a client that fetches has no measured link
        lent = Lent(transfer, values, head, start, beside, pack)
        self._lent = [*(each for each in self._lent if each() is not None), ref(lent)]
        return lent

    def _recall(self, start: int, end: int) -> None:
        """Copy lent values of a range for those that still read them, before the range changes."""
        for each in list(self._lent):
            lent = each()
            if lent is not None and lent.start < end and start < lent.start + lent.elements:
                lent.keep()
                self._lent.remove(each)

    def adopt(self, plan: Plan) -> None:
        """Divide the model by another plan, between two versions. No value changes by it."""
        self.plan = plan
        self._optimizer.divide(self._stepped())
        self._downlink.adopt(plan)

    @property
    def replica(self) -> Sequence[torch.Tensor]:
        """The parameters that every worker has, by tensor."""
        return self._by_tensor(self._downlink.replica)

    def _refuse(self, version: int) -> None:
        """Raise a DivergedError that names the first parameter that is not finite."""
        pairs = zip(self.manifest.specs, self.parameters, strict=True)
        for spec, parameter in pairs:
            if not finite(parameter.view(-1)):
                raise DivergedError(f"parameters of {spec.name!r} are no longer finite at version {version}")

    def image(self) -> dict[str, Any]:
        """Return the complete state between two versions, as plain values and copies of tensors. A store that
        restores it continues with the same bits."""
        return {
            "version": self.version,
            "parameters": self._flat.clone(),
            "optimizer": self._optimizer.image(),
            "downlink": self._downlink.image(),
            "checked": self.checked,
            "shared": None if self.bases is None else dict(self.bases.values),
            "compressor": self._named,
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the state by an image from a store with the same manifest, plan and options. The image's
        tensors belong to this store afterwards."""
        self._recall(0, self._flat.numel())
        self._flat.copy_(image["parameters"])
        self.version, self.checked = image["version"], image["checked"]
        self._optimizer.restore(image["optimizer"])
        self._downlink.restore(image["downlink"])
        if self.bases is not None:
            self.bases = replace(self.bases, values=image["shared"])

    def recall(self, remembered: Recall) -> None:
        """Replace the optimizer's state by the one that `remembered` supplies for the manifest and groups;
        keep it if `remembered` returns None."""
        found = remembered(self.manifest, self._optimizer.groups)
        if found is not None:
            self._optimizer.recall(found)

    def recall_bases(self, earlier: EarlierBases) -> None:
        """Continue with the bases of an earlier job that had the same compressor."""
        if self.bases is not None and earlier.compressor == self._named:
            values = {
                index: earlier.values.get(self.manifest.specs[index].name, own)
                for index, own in self.bases.values.items()
            }
            self.bases = replace(self.bases, values=values)

    def remembered(self) -> Sequence[Remembered]:
        """Return the optimizer's state of ranges in flat order. The tensors share the optimizer's memory."""
        return self._optimizer.remembered()

    def snapshot(self) -> list[Encoded]:
        """Return the replica as an update, one entry for each part, for a worker that has no replica or an
        outdated one. Its values are encoded while they are read."""
        runs = self._optimizer.remembered() if self.stepped else []
        return [
            self._encode(self.version, replace(update, beside=self._states(update.part, runs)), lends=True)
            for update in self._downlink.snapshot()
        ]

    def _with_bases(self, part: int) -> list[int]:
        """Return the indices of the tensors with bases in a part."""
        starts, bounds = self.plan.starts, self.plan.parts[part]
        with_bases = () if self.bases is None else self.bases.values
        return [n for n in with_bases if bounds.start <= starts[n] and starts[n + 1] <= bounds.end]

    def _states(self, part: int, runs: Sequence[Remembered]) -> list[State]:
        """Return all that a replica needs of a part's tensors beside their values: bases, and the optimizer's
        state where replicas take the step. runs: the optimizer's state of all elements."""
        states: list[State] = []
        for tensor in self._with_bases(part):
            assert self.bases is not None
            states.append(State(tensor, _numbers(self.bases.values[tensor]), BASES))
            start, end = self.plan.starts[tensor : tensor + 2]
            pieces = [run.within(start, end, 0) for run in runs if tensor in self.stepped]
            for run in joined([piece for piece in pieces if piece is not None]):
                for name, values in run.memory.items():
                    if values is not None:
                        numbers = _numbers(values.view(-1).numpy())
                        states.append(State(tensor, numbers, name, run.start, run.end))
        return states

    def _encode(
        self, version: int, update: PartUpdate, *, lends: bool = False, clip: float | None = None
    ) -> Encoded:
        """Encode one part of the update to a version.

        Args:
            lends: True if the part holds the replica's values, to be encoded while they are read.
            clip: factor that clips gradients in coordinates; None without clipping."""
        # A part without a difference, and with a value for every element, replaces any older replica. Bases
        # are replaced only by a snapshot's.
        whole = all(
            content is Content.VALUES and isinstance(payload, DensePayload)
            for payload, content in zip(update.payloads, update.contents, strict=True)
        )
        replaced = sum(state.name == BASES for state in update.beside)
        whole = whole and replaced == len(self._with_bases(update.part))
        rates = self._optimizer.learning_rates if Content.GRADIENT in update.contents else ()
        header = Update(
            version=version,
            part=update.part,
            plan=self.plan.number,
            whole=whole,
            payloads=tuple(map(payload_header, update.payloads, update.contents)),
            beside=tuple(
                Beside(
                    tensor=each.tensor,
                    name=each.name,
                    start=each.start,
                    end=each.end,
                    payload=payload_header(each.payload),
                )
                for each in update.beside
            ),
            learning_rates=tuple(rates[:1] if len({*rates}) == 1 else rates),
            clip=clip if rates else None,
        )
        transfer = part_transfer(version, update.part)
        head, part = encode_server(header), self.plan.parts[update.part]
        beside = [each.payload.data for each in update.beside]
        if lends:
            messages: Iterable[bytes] = self._lend(transfer, part.start, part.end, (head,), beside)
        else:
            data = [*(payload.data for payload in update.payloads), *beside]
            messages = (head, *encode_chunks(transfer, data, pack=self._pack))
        payloads = [*update.payloads, *(each.payload for each in update.beside)]
        size = sum(map(payload_bytes, payloads))
        return Encoded(messages, 4 * part.elements, whole, update.part, size)

    def load(self, version: int, values: Sequence[Payload]) -> None:
        """Replace the parameters and the optimizer's tensors by a worker's snapshot. values: payload of each
        tensor, in the manifest's order."""
        self._recall(0, self._flat.numel())
        for parameter, payload in zip(self.parameters, values, strict=True):
            _flat(parameter)[:] = decode(payload)
        self.version = version

    def relabel(self, version: int) -> None:
        """Give the unchanged parameters another version number."""
        self.version = version

    def values(self) -> list[Bytes]:
        """Return the replica as little-endian float32 bytes, one array for each tensor in the manifest's
        order. The arrays share the replica's memory."""
        return [_flat(parameter).view(np.uint8) for parameter in self.replica]

    def messages(self) -> Lent:
        """Return messages with the replica's values, which are encoded while they are read."""
        return self._lend(self.version, 0, self._flat.numel())

    def settle(self) -> None:
        """Apply the last version's updates to the replica, so that no read of it has to."""
        _ = self._downlink.replica

    def sha256(self) -> str:
        """Return the SHA-256 of the parameters that every worker has, in hexadecimal."""
        digest = hashlib.sha256()
        for tensor, value in zip(self.manifest.tensors, self.values(), strict=True):
            if not tensor.state:
                digest.update(value.data)
        return digest.hexdigest()

    def copy(self, *, last: bool = False) -> Copy:
        """Return the parameters that every worker has, and their SHA-256. last: True to share the store's
        memory, because no version follows; False for copies."""
        named = zip(self.manifest.tensors, self.replica, strict=True)
        parameters = {
            tensor.name: each if last else each.clone() for tensor, each in named if not tensor.state
        }
        return Copy(self.version, parameters, self.sha256())


def _numbers(values: Float32) -> Payload:
    return dense_payload(DenseFormat.FLOAT32, np.ascontiguousarray(values))


def _flat(tensor: torch.Tensor) -> Float32:
    return tensor.detach().view(-1).numpy()
