"""The user's choices about plans: how tensors merge, in which order parts are sent, when to plan again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from ..common.spec import SpecError, unknown
from . import schedules
from .fusion import FusionGroup, by_bytes, fastest, layer_by_layer, seamgs
from .profile import Layer, Link

E = TypeVar("E", bound=StrEnum)

MGS_BYTES = 1 << 16  # default of `mgs`: bytes of a message
CREDIT = 4  # default of `credit`: parts in flight


class Merging(StrEnum):
    """Rules by which tensors are merged into units; `fusion` has their algorithms."""

    NONE = "none"
    BYTES = "bytes"
    MG_WFBP = "mgwfbp"
    MGS = "mgs"
    SEAMGS = "seamgs"


class Ordering(StrEnum):
    """Rules that decide which of the waiting parts is sent first; `schedules` has their sources."""

    FIFO = "fifo"
    P3 = "p3"
    CREDIT = "credit"
    TWO_PHASE = "two-phase"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusion:
    """The choice of `--fusion`: how tensors are merged into units. `bytes`: size of a unit as float32 with
    `Merging.BYTES` (0 for the size of a part), as sent with `Merging.MGS`."""

    merging: Merging
    bytes: int = 0

    @property
    def measured(self) -> bool:
        """True if the rule needs measurements. Until there are some, units are made by size.

        In the units that it makes from measurements, sparsifiers choose from all tensors of a unit as from
        one.
        """
        return self.merging in (Merging.MG_WFBP, Merging.MGS, Merging.SEAMGS)

    @property
    def takes_norms(self) -> bool:
        """True if the rule depends on the norms of gradients, which are then measured (`norms`)."""
        return self.merging is Merging.SEAMGS

    def groups(self, layers: Sequence[Layer], link: Link) -> list[FusionGroup]:
        """Return the groups of layers that this rule merges, the layers of backward's first gradients first.

        `Merging.BYTES` needs no measurements and is not handled here: `parts.divide` makes its units.
        """
        match self.merging:
            case Merging.MG_WFBP:
                return fastest(layers, link)
            case Merging.MGS:
                return by_bytes(layers, self.bytes)
            case Merging.SEAMGS:
                return seamgs(layers, link)
            case _:
                return layer_by_layer(layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The choice of `--order`: which of the waiting parts is sent first. `credit`: number of parts of one
    worker that may be in flight at once; 0 for no limit."""

    ordering: Ordering
    credit: int = 0

    @property
    def measured(self) -> bool:
        """True if the rule needs measurements. Until there are some, parts are sent in the order of `p3`."""
        return self.ordering is Ordering.TWO_PHASE


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """The choice of `--replan`: another plan after `every` versions, if not 0, or when measurements drift."""

    every: int = 0
    drift: bool = False


def parse_fusion(text: str) -> Fusion:
    """Parse the text of `--fusion`. Raises SpecError if it is no rule, or has a wrong number."""
    merging, number = _with_number("fusion", text, Merging, {Merging.BYTES, Merging.MGS})
    return Fusion(merging=merging, bytes=number or (MGS_BYTES if merging is Merging.MGS else 0))


def parse_order(text: str) -> Order:
    """Parse the text of `--order`. Raises SpecError if it is no rule, or has a wrong number."""
    ordering, number = _with_number("order", text, Ordering, {Ordering.CREDIT})
    return Order(ordering=ordering, credit=(number or CREDIT) if ordering is Ordering.CREDIT else 0)


def parse_replan(text: str) -> Replan:
    """Parse the text of `--replan`. Raises SpecError unless it is never, drift or a number of versions."""
    if text in ("never", "drift"):
        return Replan(drift=text == "drift")
    if not text.isdecimal() or not int(text):
        raise SpecError(f"replan: expected never, drift or a number of versions from 1, got {text!r}")
    return Replan(every=int(text))


def _with_number(kind: str, text: str, names: type[E], numbered: set[E]) -> tuple[E, int]:
    """Parse NAME, or NAME=NUMBER for `numbered`; return the member of `names` and the number or 0."""
    name, equals, number = text.partition("=")
    if name not in list(names):
        raise SpecError(unknown(kind, name, [str(each) for each in names]))
    found = names(name)
    if not equals:
        return found, 0
    if found not in numbered:
        raise SpecError(f"{kind} {text!r}: {name} takes no number")
    if not number.isdecimal() or not int(number):
        raise SpecError(f"{kind} {text!r}: expected a number from 1 after {name}=, got {number!r}")
    return found, int(number)


def turns(order: Order, units: Sequence[Layer], parts: Sequence[int], link: Link | None) -> tuple[int, ...]:
    """Return the priority of each part, 0 first; return an empty tuple if parts are sent as they become
    ready.

    For `two-phase` it is the order of `p3`, but for the units that `schedules.two_phase` raises.

    Args:
        units: measurements of each unit, in forward order; empty if not measured.
        parts: number of parts of each unit, in the order of the plan, which is that of backward.
    """
    if order.ordering is Ordering.FIFO:
        return ()
    raised: dict[int, int] = {}
    if order.ordering is Ordering.TWO_PHASE and link is not None and units:
        most = max(unit.sent_bytes / count for unit, count in zip(units, reversed(parts), strict=True))
        raised = schedules.two_phase(units, link, max(1.0, most)).raised
    keys: list[tuple[int, bool, int, int]] = []
    for forward, count in zip(reversed(range(len(parts))), parts, strict=True):
        # A raised unit goes just before the one that it was raised over.
        before = raised.get(forward, forward)
        keys += [(before, forward not in raised, forward, piece) for piece in range(count)]
    of_part = [0] * len(keys)
    for turn, part in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
        of_part[part] = turn
    return tuple(of_part)
