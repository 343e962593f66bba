"""The state of a job that every replica has beside the values of its tensors: bases (`compressors/bases`),
and the optimizer's state of tensors that replicas step themselves (`server/shard/coordinates`).

An update brings the mean gradient of such a tensor. The replica takes the same step as the server, with the
same arithmetic on the host, and advances the bases. Where an update brings the change of a tensor instead, it
brings the coordinates beside it. A snapshot brings bases and optimizer's state themselves.

The state of a tensor belongs to the version of the tensor's part. A part that is applied early can be taken
back, and so can its tensors' state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from ...compressors import Bases, Payload, ProjectedPayload, decode, sums_of_coordinates
from ...compressors.payload import Float32
from ...optim.memory import Remembered
from ...optim.optimizer import Optimizer, OptimizerGroup
from ...optim.steps import COUNT, memory_names
from ...proto.messages import Beside, Update
from ...proto.updates import BASES, SharedSizes


class SharedState:
    """Bases and optimizer's state of a replica's tensors. The replica owns it.

    Attributes:
        bases: bases of each tensor, at the version of its part.
        sizes: sizes by which the headers of updates are checked.
    """

    def __init__(self, bases: Bases, groups: Sequence[OptimizerGroup], group_of: Sequence[int]) -> None:
        """
        Args:
            bases: the job's bases at version 0.
            groups: optimizer of each parameter group.
            group_of: number of the group of each tensor.
        """
        self.bases = bases
        self._groups, self._group_of = groups, group_of
        self._number = {tensor: number for number, tensor in enumerate(bases.counts)}
        one = torch.empty(1, dtype=torch.float32, device="cpu")
        # Stand for the tensors, whose values are given with each step.
        stand_ins = [one.expand(bases.specs[tensor].elements) for tensor in bases.counts]
        self._optimizer = Optimizer.of_groups(groups, stand_ins, [group_of[each] for each in bases.counts])
        self._kept: dict[int, tuple[Float32, Sequence[Remembered]]] = {}  # state from before early parts
        self.sizes = SharedSizes(
            coordinates=bases.counts,
            bases={tensor: values.size for tensor, values in bases.values.items()},
            memory=frozenset[str]().union(*(memory_names(group.options) for group in groups)),
        )

    def step(self, given: Sequence[tuple[int, Payload, torch.Tensor]], update: Update) -> None:
        """Take the optimizer's step of tensors, and advance the bases of those that came as coordinates.

        Args:
            given: index of each tensor, its mean gradient, and its values, float32, shape (elements,), which
                are stepped in place.
            update: the update that brought them, with the learning rates and the factor of clipping.
        """
        means = [(tensor, each) for tensor, each, _ in given if isinstance(each, ProjectedPayload)]
        coordinates = self._coordinates(means)
        starts = [*accumulate((each.elements for _, each in means), initial=0)]
        expanded = np.empty(starts[-1], np.float32)
        self.bases.expand_each(coordinates, dict(zip(coordinates, starts, strict=False)), expanded)
        if update.clip is not None:
            expanded *= np.float32(update.clip)
        self.bases = self.bases.advance(coordinates)
        rates = update.learning_rates
        self._optimizer.learning_rates = list(rates) * (len(self._groups) if len(rates) == 1 else 1)
        # On the host, like the server: on a GPU the same step may have other bits.
        hosts = [values.cpu() for _, _, values in given]
        found = dict(zip(coordinates, np.split(expanded, starts[1:-1]), strict=False))
        gradients = [
            torch.from_numpy(found[tensor] if tensor in found else decode(mean)) for tensor, mean, _ in given
        ]
        self._optimizer.step_copies([self._number[tensor] for tensor, _, _ in given], hosts, gradients)
        for host, (_, _, values) in zip(hosts, given, strict=True):
            if host is not values:
                values.copy_(host)

    def take(self, beside: Sequence[Beside], payloads: Sequence[Payload]) -> None:
        """Advance bases by the coordinates that an update has beside a part's elements, or replace bases and
        optimizer's state by those of a snapshot."""
        memory: dict[int, dict[tuple[int, int], Remembered]] = {}
        advanced: list[tuple[int, ProjectedPayload]] = []
        for each, payload in zip(beside, payloads, strict=True):
            tensor = each.tensor
            if isinstance(payload, ProjectedPayload):
                advanced.append((tensor, payload))
            elif each.name == BASES:
                self._replace(tensor, decode(payload))
                memory.setdefault(tensor, {})
            else:
                runs = memory.setdefault(tensor, {})
                names = memory_names(self._groups[self._group_of[tensor]].options)
                place = each.start, each.end
                run = runs.setdefault(place, Remembered(*place, dict.fromkeys(names)))
                found = torch.from_numpy(decode(payload))
                run.memory[each.name] = found.view(()) if each.name == COUNT else found
        if advanced:
            self.bases = self.bases.advance(self._coordinates(advanced))
        for tensor, runs in memory.items():
            whole = [Remembered(0, self.bases.specs[tensor].elements, {})]
            self._optimizer.restore_memory(self._number[tensor], [*runs.values()] or whole)

    def keep(self, tensors: Iterable[int]) -> None:
        """Keep the state of tensors whose part is about to be applied early, for `go_back`."""
        for tensor in tensors:
            if tensor in self._number:
                memory = self._optimizer.copy_memory(self._number[tensor])
                self._kept[tensor] = self.bases.values[tensor], memory

    def go_back(self) -> None:
        """Restore the state of all tensors from before early parts."""
        for tensor, (values, memory) in self._kept.items():
            self._replace(tensor, values)
            self._optimizer.restore_memory(self._number[tensor], memory)
        self._kept.clear()

    def settle(self) -> None:
        """Drop the state that `keep` has kept, because the version is complete or invalid."""
        self._kept.clear()

    @staticmethod
    def _coordinates(means: Sequence[tuple[int, ProjectedPayload]]) -> dict[int, Float32]:
        sums = sums_of_coordinates([[each] for _, each in means], 1.0)
        return {tensor: each for (tensor, _), each in zip(means, sums, strict=True)}

    def _replace(self, tensor: int, values: Float32) -> None:
        self.bases = replace(self.bases, values={**self.bases.values, tensor: values})
