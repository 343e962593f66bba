"""Conditions and results of the measurements that repeat the papers' tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which a measurement runs.

    Attributes:
        quick: True for small sizes, so that all measurements take minutes.
        data: options of a task that name its files, by the task's name, such as `data=/data/cifar`.
        seeds: seeds of runs that are trained.
        given: further arguments of the measurement that the user has chosen.
    """

    quick: bool
    data: Mapping[str, str] = field(default_factory=dict[str, str])
    seeds: Sequence[int] = (1,)
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def task(self, files: str, otherwise: str) -> str:
        """Return the spec of a task with the user's files, or `otherwise` if the user has named none.

        Args:
            files: spec of the task, without the option that names its files.
            otherwise: spec of a task that needs no files.
        """
        name, _, options = files.partition(":")
        return f"{name}:{self.data[name]},{options}".rstrip(",") if name in self.data else otherwise

    @property
    def seed_text(self) -> str:
        """The seeds, for the settings of a result."""
        return "seeds " + ", ".join(map(str, self.seeds))


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a picture: lines through points.

    Attributes:
        x, y: labels of the axes.
        lines: by name, the x and y values of the points; y is a mean where there are several runs.
        runs: by name, the y values of each seed's run at the same x; empty without seeds.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    runs: Mapping[str, Sequence[Sequence[float]]] = field(
        default_factory=dict[str, Sequence[Sequence[float]]]
    )


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a measurement, as a page shows it. Texts are Markdown.

    Attributes:
        settings: conditions of the measurement.
        ours: its most telling numbers in one line.
        headings, rows: the table.
        panels: panels of the picture; empty for none.
    """

    settings: str
    ours: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    panels: Sequence[Panel] = ()
