"""The plan that a server makes from the options and measurements of a job. Predictions call the same
function."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..common.parts import LEAST_BYTES, Plan, cut_up, divide, largest_part
from .choices import Fusion, Merging, Order, turns
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
    least_bytes: int = LEAST_BYTES,
    uncut: Collection[int] = (),
) -> Plan:
    """Return the plan of a model: its units and parts, and the order in which parts are sent.

    Without `layers` and `link`, a fusion or an order that needs measurements falls back to units made by size
    and to the order `p3`.

    Args:
        elements: number of elements of each tensor, in manifest order, which is that of the forward pass.
        layers: measurements of each tensor, in the same order; empty if not measured.
        link: measured link, from all workers to the server; None if not measured.
        part_bytes: size of the largest part as float32, in bytes; 0 for the default.
        slices: number of slices among which redundant workers divide the parts.
        least_bytes: lower bound of the default size of a part, as float32, in bytes.
        uncut: indices of tensors that are in one part each, however large (`TensorCoding.uncut`).
    """
    merged = False
    if fusion.merging is Merging.NONE:
        units = [1] * len(elements)
    elif fusion.measured and link is not None:
        units = [group.last - group.first for group in fusion.groups(layers, link)]
        merged = True
    else:
        part_bytes = fusion.bytes if fusion.merging is Merging.BYTES and fusion.bytes else part_bytes
        return _ordered(divide(elements, part_bytes, slices, least_bytes, uncut), order, layers, link)
    most = largest_part(sum(elements), part_bytes, slices, least_bytes)
    return _ordered(replace(cut_up(elements, units, most, uncut), merged=merged), order, layers, link)


def _ordered(plan: Plan, order: Order, layers: Sequence[Layer], link: Link | None) -> Plan:
    """Return the plan with the priorities of its parts and the credit that `order` asks for."""
    parts = [len(unit.parts) for unit in plan.units]
    units = [joined(layers[unit.first : unit.last]) for unit in reversed(plan.units)] if layers else []
    return replace(plan, turns=turns(order, units, parts, link), credit=order.credit)
