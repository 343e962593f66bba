"""Every table and figure of the five papers: its name, its numbers, and the measurement that repeats it.

`catalogue.toml` is the data. An entry without a measurement has the reason why it is not repeated here.
`gc-paper NAME` measures an entry by its name, such as `001-table1`. `pages` writes the entries into
papers/docs, beside our numbers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

Kind = Literal["table", "figure"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table or figure of a paper. It has either a measurement or a reason.

    Attributes:
        paper: key of the paper.
        number: its number in the paper.
        title: its title in English.
        theirs: the paper's numbers, or the content of its picture, as Markdown.
        measurement: name in `MEASUREMENTS`; "" for none.
        reason: why it is not repeated here; "" if it is.
    """

    paper: str
    kind: Kind
    number: str
    title: str
    theirs: str = "–"
    measurement: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        """Name of the entry on the command line, such as `001-table1`."""
        return f"{self.paper}-{self.kind}{self.number}"

    @property
    def label(self) -> str:
        """The entry's kind and number, such as `table 1`."""
        return f"{self.kind} {self.number}"


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper whose methods Gradwire has.

    Attributes:
        key: number of the paper, which begins the names of its entries.
        page: name of its page in papers/docs, without `.md`.
        entries: its figures, then its tables, by number.
    """

    key: str
    page: str
    title: str
    authors: str
    year: int
    published: str
    entries: Sequence[Entry]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement, as a call of a function.

    Attributes:
        by: name of the function in `measurements.FUNCTIONS`.
        differs: settings that differ from the paper's; "" for none.
        options: arguments of the function.
        quick: arguments that replace them for --quick.
    """

    by: str
    differs: str
    options: Mapping[str, Any]
    quick: Mapping[str, Any]


def _paper(plain: dict[str, Any]) -> Paper:
    entries: list[Entry] = []
    for each in plain.pop("entry"):
        kind: Kind = "table" if "table" in each else "figure"
        entries.append(Entry(paper=plain["key"], kind=kind, number=each.pop(kind), **each))
    return Paper(entries=entries, **plain)


def _measurement(plain: dict[str, Any]) -> Measurement:
    by, differs, quick = plain.pop("by"), plain.pop("differs", ""), plain.pop("quick", {})
    return Measurement(by=by, differs=differs, quick=quick, options=plain)


_PLAIN = tomllib.loads(files("gradwire_papers").joinpath("catalogue.toml").read_text(encoding="utf-8"))
PAPERS: Sequence[Paper] = [_paper(each) for each in _PLAIN["paper"]]
MEASUREMENTS: Mapping[str, Measurement] = {
    name: _measurement(each) for name, each in _PLAIN["measurement"].items()
}
ENTRIES: Sequence[Entry] = [entry for paper in PAPERS for entry in paper.entries]


def entries_of(name: str) -> list[Entry]:
    """Return the entries that a name selects: one, those of a paper or of a measurement, or `all`."""
    return [each for each in ENTRIES if name in ("all", each.paper, each.name, each.measurement)]
