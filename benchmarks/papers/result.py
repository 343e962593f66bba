"""Arguments and results of the measurements that repeat the papers' tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DIGITS = "digits:model=mlp"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which a measurement runs.

    Attributes:
        quick: whether sizes are small, so that all measurements take minutes.
        data: options of a task that name its files, by the task's name, such as `data=/data/cifar`.
        seeds: seeds of runs without shaped links.
    """

    quick: bool
    data: Mapping[str, str] = field(default_factory=dict[str, str])
    seeds: Sequence[int] = (1,)

    def task(self, name: str, options: str, otherwise: str) -> str:
        """Return the spec of a task with the user's files, or `otherwise` if the user has named none.

        Args:
            name: name of the task.
            options: further options of the task with files, such as `model=resnet20`.
            otherwise: spec of a task that needs no files.
        """
        return f"{name}:{self.data[name]},{options}".rstrip(",") if name in self.data else otherwise


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a picture: lines through points.

    Attributes:
        title: title of the panel.
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
    """The result of a measurement, which a page of docs/papers shows.

    Attributes:
        settings: conditions of the measurement, as Markdown.
        ours: its most telling numbers in one line, as Markdown.
        headings: headings of the table.
        rows: cells of each row, as Markdown.
        panels: panels of the picture; empty for none.
    """

    settings: str
    ours: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    panels: Sequence[Panel] = ()
