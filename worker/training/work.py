"""The kinds of work that a server may request, and the parser of the spec by which a job's terms name one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...common.spec import parse_one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Work `gradients`: a worker pushes the mean gradient of each assignment's samples.

    Attributes:
        single: True if each push makes a version of its own, so that a worker may compute several times, or
            never, at one version.
    """

    single: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """Work `local`: a worker takes steps of its own, and pushes the change that they make.

    Attributes:
        correction: λ, 0 to 1: share of its distance from the round's first model by which each local step
            is pulled back.
        elastic: α of elastic averaging, 0 to 1; 0 without it.
        clip: largest Euclidean norm of the gradient of each local step of a task; 0 for no limit.
    """

    correction: float = 0.0
    delayed: bool = False
    elastic: float = 0.0
    overlay: bool = False
    clip: float = 0.0
    fragments: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedExchange:
    """Work `exchange`: workers exchange gradients as coded packets, and each takes the optimizer's step."""


Work = Gradients | Local | CodedExchange
WORK: Mapping[str, type[Work]] = {"gradients": Gradients, "local": Local, "exchange": CodedExchange}


def parse_work(text: str) -> Work:
    """Parse the spec of a kind of work, such as `local:correction=0.1`. Raises SpecError if this release does
    not know the kind of work or an option."""
    return parse_one_of("work", text, WORK)
