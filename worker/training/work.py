"""The kinds of work that a server may ask for, from the spec that the job's terms name it by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...common.spec import parse_one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """The mean gradient of each assignment's samples.

    single: whether gradients become versions one at a time, so that a worker may compute at one version
        twice, or not at all.
    """

    single: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """Local steps, and the change that they make.

    correction: λ, 0 to 1, how strongly each pulls back. delayed: whether the steps of the next round are
        begun while the changes of this one are exchanged.
    """

    correction: float = 0.0
    delayed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedExchange:
    """Coded packets of gradients, exchanged among the workers, which take the step themselves."""


Work = Gradients | Local | CodedExchange
WORK: Mapping[str, type[Work]] = {"gradients": Gradients, "local": Local, "exchange": CodedExchange}


def parse_work(text: str) -> Work:
    """Raises SpecError for work that this release does not know."""
    return parse_one_of("work", text, WORK)
