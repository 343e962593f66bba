"""A plan as a server makes it, and as predictions take it to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .choices import Fusion, Merging, Order, turns
from .parts import LEAST_BYTES, Plan, cut_up, divide, largest_part
from .profile import Layer, Link, joined


def make_plan(
    elements: Sequence[int],
    fusion: Fusion,
    order: Order,
    *,
    layers: Sequence[Layer] = (),
    link: Link | None = None,
    part_bytes: int = 0,
    slices: int = 1,
    groups: Sequence[int] = (),
    least_bytes: int = LEAST_BYTES,
) -> Plan:
    """How a model is divided, and in which order its parts travel.

    Args:
        elements: of each tensor, in forward order.
        layers, link: as measured, with the groups of the tensors; without them units are made by size where a
            measurement is needed.
        part_bytes, slices, groups, least_bytes: as in `parts.divide`.
    """
    merged = False
    if fusion.merging is Merging.NONE:
        units = [1] * len(elements)
    elif fusion.measured and link is not None:
        units = [group.last - group.first for group in fusion.groups(layers, link)]
        merged = True
    else:
        part_bytes = fusion.bytes if fusion.merging is Merging.BYTES and fusion.bytes else part_bytes
        return _ordered(divide(elements, part_bytes, slices, groups, least_bytes), order, layers, link)
    most = largest_part(sum(elements), part_bytes, slices, least_bytes)
    return _ordered(replace(cut_up(elements, units, most), merged=merged), order, layers, link)


def _ordered(plan: Plan, order: Order, layers: Sequence[Layer], link: Link | None) -> Plan:
    parts = [len(unit.parts) for unit in plan.units]
    units = [joined(layers[unit.first : unit.last]) for unit in reversed(plan.units)] if layers else []
    return replace(plan, turns=turns(order, units, parts, link), credit=order.credit)
