"""Tensors that travel as coordinates in bases: one call for all of a unit, wherever other tensors lie between
them."""

from __future__ import annotations

from collections.abc import Collection

from ..base import NonFiniteGradient, serves_many
from ..draft import Draft
from ..kernels import devices
from ..payload import Payload
from .runs import checks_alone


def compress_projected(draft: Draft, indices: Collection[int]) -> dict[int, Payload]:
    """Return the payload of each of these tensors that one call can serve, by index: on the host, with plain
    feedback."""
    model, ledger, bases = draft.model, draft.ledger, draft.bases
    groups: dict[int, list[int]] = {}
    if not devices.on_gpu(ledger.device):
        for index in indices:
            if index in bases.compressors and checks_alone(model.compressors[index]):
                groups.setdefault(id(bases.compressors[index]), []).append(index)
    found: dict[int, Payload] = {}
    for group in groups.values():
        compressor = bases.compressors[group[0]]
        if not serves_many(compressor):
            continue
        payloads, finite = compressor.compress_each(
            [model.specs[index] for index in group],
            [draft.gradients[index] for index in group],
            [draft.range_of(index)[0] for index in group],
            [bases.values[index] for index in group],
            [draft.random(index).seed for index in group],
            ledger.residual,
            ledger.draft,
        )
        if not all(finite):
            raise NonFiniteGradient(model.specs[group[finite.index(False)]].name)
        found.update(zip(group, payloads, strict=True))
    return found
