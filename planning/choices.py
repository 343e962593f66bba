"""What a user asks of the plan: how tensors are merged, in which order parts travel, how often that is found
anew."""

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

MGS_BYTES = 1 << 16  # of a message by default
CREDIT = 4  # parts by default


class Merging(StrEnum):
    """How tensors become units."""

    NONE = "none"
    BYTES = "bytes"
    MG_WFBP = "mgwfbp"
    MGS = "mgs"
    SEAMGS = "seamgs"


class Ordering(StrEnum):
    """Which of the parts that wait goes first."""

    FIFO = "fifo"
    P3 = "p3"
    CREDIT = "credit"
    TWO_PHASE = "two-phase"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusion:
    """bytes: of a unit, as float32 with `bytes` (0 for the size of a part), as it is sent with `mgs`."""

    merging: Merging
    bytes: int = 0

    @property
    def measured(self) -> bool:
        """Whether it takes a profile; until there is one, units are made by size. From the units that are
        made then, sparsifiers choose as a whole."""
        return self.merging in (Merging.MG_WFBP, Merging.MGS, Merging.SEAMGS)

    def groups(self, layers: Sequence[Layer], link: Link) -> list[FusionGroup]:
        """In the order of backward. Not for `bytes`, which needs no profile."""
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
    """credit: parts that may be on their way at once; 0 for any number."""

    ordering: Ordering
    credit: int = 0

    @property
    def measured(self) -> bool:
        """Whether it takes a profile. Until there is one, it is that of `p3`."""
        return self.ordering is Ordering.TWO_PHASE


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """every: versions between two plans; 0 for never again. drift: when what is measured has changed."""

    every: int = 0
    drift: bool = False


def parse_fusion(text: str) -> Fusion:
    """`none`, `bytes`, `bytes=N`, `mgwfbp`, `mgs`, `mgs=N` or `seamgs`. Raises SpecError."""
    merging, number = _with_number("fusion", text, Merging, {Merging.BYTES, Merging.MGS})
    return Fusion(merging=merging, bytes=number or (MGS_BYTES if merging is Merging.MGS else 0))


def parse_order(text: str) -> Order:
    """`fifo`, `p3`, `credit`, `credit=N` or `two-phase`. Raises SpecError."""
    ordering, number = _with_number("order", text, Ordering, {Ordering.CREDIT})
    return Order(ordering=ordering, credit=(number or CREDIT) if ordering is Ordering.CREDIT else 0)


def parse_replan(text: str) -> Replan:
    """`never`, `drift` or a number of versions. Raises SpecError."""
    if text in ("never", "drift"):
        return Replan(drift=text == "drift")
    if not text.isdecimal() or not int(text):
        raise SpecError(f"replan: expected never, drift or a number of versions from 1, got {text!r}")
    return Replan(every=int(text))


def _with_number(kind: str, text: str, names: type[E], numbered: set[E]) -> tuple[E, int]:
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
    """By part its turn; none for the order in which parts come. Of two-phase, p3 and fifo the best serves as
    two-phase.

    Args:
        units: in forward order. Empty if they have not been measured.
        parts: by unit in the order of the plan, which is that of backward, how many parts it has.
        link: None if it has not been measured.
    """
    if order.ordering is Ordering.FIFO:
        return ()
    raised: dict[int, int] = {}
    if order.ordering is Ordering.TWO_PHASE and link is not None and units:
        most = max(unit.sent_bytes / count for unit, count in zip(units, reversed(parts), strict=True))
        found = schedules.best(units, link, max(1.0, most))
        if found.name == "fifo":
            return ()
        raised = found.raised
    last = len(parts) - 1
    of_unit: list[tuple[tuple[int, bool, int], int, int]] = []
    part = 0
    for place, count in enumerate(parts):
        forward = last - place
        for piece in range(count):
            # A raised unit goes just before the one that it was raised over.
            of_unit.append(((raised.get(forward, forward), forward not in raised, forward), piece, part))
            part += 1
    of_part = [0] * part
    for turn, (_, _, each) in enumerate(sorted(of_unit)):
        of_part[each] = turn
    return tuple(of_part)
