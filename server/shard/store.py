"""The store of the parameters: values, optimizer, replica, and the messages of updates. `making` makes
versions.

`parameters` are the server's own, in float32; `downlink` has the replica, which every worker holds a copy of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...common.parts import Plan
from ...compressors import DensePayload, Payload, decode, finite
from ...optim.memory import Remembered
from ...optim.optimizer import Optimizer, OptimizerGroup
from ...proto.manifest import Manifest
from ...proto.messages import Content, Update
from ...proto.transfer import encode_chunks, part_transfer, payload_header
from ...proto.wire import encode_server
from .downlink import Downlink, PartUpdate

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
BuildOptimizer = Callable[[Sequence[torch.Tensor]], Optimizer]
# Returns the optimizer's state for a manifest's parameters in these groups, by ranges in flat order, or None.
Recall = Callable[[Manifest, Sequence[OptimizerGroup]], Sequence[Remembered] | None]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One part of an update as encoded messages, the same for every worker.

    Attributes:
        messages: header and chunks.
        raw_bytes: bytes of the part's elements as float32.
        whole: True if the part holds the value of each element, so that it fits a replica at any version.
        number: number of the part.
    """

    messages: tuple[bytes, ...]
    raw_bytes: int
    whole: bool
    number: int = 0


Send = Callable[[Encoded], None]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the parameters of one version.

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
    """

    def __init__(
        self,
        manifest: Manifest,
        values: Sequence[Float32],
        downlink: str,
        build_optimizer: BuildOptimizer,
        seed: int = 0,
        plan: Plan | None = None,
    ) -> None:
        """
        Args:
            values: initial parameters, a flat float32 array for each tensor of the manifest; copied.
            downlink: compressor of the updates, or `auto`; see `server/shard/downlink`.
            build_optimizer: creates the optimizer of the plan's parts, with the manifest's groups.
            plan: division of the model into parts; None for the default plan."""
        self.manifest = manifest
        self.plan = plan or manifest.plan()
        self.version = 0
        self._flat = torch.from_numpy(np.concatenate([*values, np.empty(0, np.float32)]))
        self._gradient = torch.zeros_like(self._flat)
        self.parameters = self._by_tensor(self._flat)
        self._optimizer = build_optimizer(self._stepped())
        self._downlink = Downlink(
            *(manifest, self.plan, self._flat, downlink, seed),
            scratch=self._gradient,  # free to be overwritten once the part is stepped
            leaves_zeros=self._optimizer.leaves_zeros,
        )
        self.checked = 0, 0

    def _by_tensor(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor, one for each tensor of the manifest, in its shape."""
        pairs = zip(self.manifest.specs, pairwise(self.plan.starts), strict=True)
        return [flat[start:end].view(spec.shape) for spec, (start, end) in pairs]

    def _stepped(self) -> list[torch.Tensor]:
        """Return views of the parameters, one for each part, with their gradients. The optimizer steps parts;
        each element's step is the same in any part."""
        stepped: list[torch.Tensor] = []
        for part in self.plan.parts:
            stepped.append(self._flat[part.start : part.end])
            stepped[-1].grad = self._gradient[part.start : part.end]
        return stepped

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
        }

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the state by an image from a store with the same manifest, plan and options. The image's
        tensors belong to this store afterwards."""
        self._flat.copy_(image["parameters"])
        self.version, self.checked = image["version"], image["checked"]
        self._optimizer.restore(image["optimizer"])
        self._downlink.restore(image["downlink"])

    def recall(self, remembered: Recall) -> None:
        """Replace the optimizer's state by the one that `remembered` supplies for the manifest and groups;
        keep it if `remembered` returns None."""
        found = remembered(self.manifest, self._optimizer.groups)
        if found is not None:
            self._optimizer.recall(found)

    def remembered(self) -> Sequence[Remembered]:
        """Return the optimizer's state of ranges in flat order. The tensors share the optimizer's memory."""
        return self._optimizer.remembered()

    def snapshot(self) -> list[Encoded]:
        """Return the replica as an update, one entry for each part, for a worker that has no replica or an
        outdated one."""
        return [self._encode(self.version, update) for update in self._downlink.snapshot()]

    def _encode(self, version: int, update: PartUpdate) -> Encoded:
        """Encode one part of the update to a version."""
        # A part without a difference, and with a value for every element, replaces any older replica.
        whole = all(
            content is Content.VALUES and isinstance(payload, DensePayload)
            for payload, content in zip(update.payloads, update.contents, strict=True)
        )
        header = Update(
            version=version,
            part=update.part,
            plan=self.plan.number,
            whole=whole,
            payloads=tuple(map(payload_header, update.payloads, update.contents)),
        )
        transfer = part_transfer(version, update.part)
        chunks = encode_chunks(transfer, [payload.data for payload in update.payloads])
        raw_bytes = 4 * self.plan.parts[update.part].elements
        return Encoded((encode_server(header), *chunks), raw_bytes, whole, update.part)

    def load(self, version: int, values: Sequence[Payload]) -> None:
        """Replace the parameters and the optimizer's tensors by a worker's snapshot. values: payload of each
        tensor, in the manifest's order."""
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

    def sha256(self) -> str:
        """Return the SHA-256 of the parameters that every worker has, in hexadecimal."""
        digest = hashlib.sha256()
        for tensor, value in zip(self.manifest.tensors, self.values(), strict=True):
            if not tensor.state:
                digest.update(value.data)
        return digest.hexdigest()

    def copy(self) -> Copy:
        """Return a copy of the parameters that every worker has, and their SHA-256."""
        named = zip(self.manifest.tensors, self.replica, strict=True)
        parameters = {tensor.name: each.clone() for tensor, each in named if not tensor.state}
        return Copy(self.version, parameters, self.sha256())


def _flat(tensor: torch.Tensor) -> Float32:
    return tensor.detach().view(-1).numpy()
