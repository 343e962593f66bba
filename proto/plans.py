"""Conversion of a job's plan between `messages.PlanAnnouncement` on the wire and `compressors.Plan` in the
code.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import pairwise

from ..common.parts import ALIGNMENT, Plan, arrange
from . import messages as m
from .manifest import Manifest
from .refusal import Reason, refused
from .transfer import MAX_PARTS


def plan_message(plan: Plan) -> m.PlanAnnouncement:
    """Return the message that announces a plan."""
    tensors = tuple(unit.last - unit.first for unit in plan.units)
    cuts = sorted(plan.parts[part].start for unit in plan.units for part in unit.parts[1:])
    return m.PlanAnnouncement(
        number=plan.number,
        tensors=tensors,
        cuts=tuple(cuts),
        merged=plan.merged,
        turns=plan.turns,
        credit=plan.credit,
        norms=plan.norms,
    )


def plan_of(message: m.PlanAnnouncement, manifest: Manifest, *, worker: str = "") -> Plan:
    """Return the plan that a message announces, checked against the model.

    Raises:
        Refused: PLAN, naming the field, before memory of the size of the plan is allocated.
    """

    def check(right: bool, field: str, limit: str, value: object) -> None:
        if not right:
            raise refused(Reason.PLAN, worker=worker, field=f"plan {field}", limit=limit, value=str(value))

    tensors, cuts = message.tensors, message.cuts
    count = len(tensors) + len(cuts)
    check(message.number > 0, "number", "at least 1", message.number)
    check(count <= MAX_PARTS, "tensors and cuts", f"at most {MAX_PARTS} parts", count)
    check(0 not in tensors, "tensors", "at least 1 in each unit", 0)
    total = sum(tensors)
    check(total == len(manifest.tensors), "tensors", f"{len(manifest.tensors)} in all", total)
    for cut, following in pairwise(cuts):
        check(cut < following, "cuts", "ascending ones", f"{following} after {cut}")
    ends, last, inside = [0, *manifest.ends], total, 0
    for number, size in enumerate(tensors):
        first = last - size
        begin, end = bisect_right(cuts, ends[first]), bisect_left(cuts, ends[last])
        where = f"of unit {number}, from {manifest.specs[first].name!r},"
        check(size == 1 or begin >= end, f"cuts {where}", "none in several tensors", f"{end - begin}")
        for cut in cuts[begin:end]:
            at = cut - ends[first]
            check(at % ALIGNMENT == 0, f"cuts {where}", f"multiples of {ALIGNMENT} elements", at)
        inside += max(0, end - begin)
        last = first
    check(inside == len(cuts), "cuts", "all of them within units", f"{len(cuts) - inside} elsewhere")
    turns = message.turns
    right = not turns or sorted(turns) == list(range(count))
    got = f"{len(turns)}, {len({*turns})} of them different"
    check(right, "turns", f"each number from 0 to {count - 1} once, or none", got)
    plan = arrange([spec.elements for spec in manifest.specs], tensors, cuts, message.number)
    norms = tuple(message.norms)
    check(len(norms) in (0, total), "norms", f"{total}, or none", len(norms))
    for norm in norms:
        check(0 <= norm < math.inf, "norms", "finite ones of at least 0", norm)
    return replace(plan, merged=message.merged, turns=tuple(turns), credit=message.credit, norms=norms)
