"""Pages of docs/papers: the index of all tables and figures, and a page and pictures for each paper.

All of it follows from the catalogue and the records, so it can be written at any time. The index stands
between two marks in README.md, whose other text is written by hand.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...deploy.plot import PlotError, panels
from ...deploy.report import write_atomically
from .. import output
from ..arguments import BenchError
from .catalogue import ENTRIES, PAPERS, Entry, Paper
from .repeats import Record, shown
from .result import Result

README = "README.md"
BEGIN, END = "<!-- tables and figures, by gc-bench paper -->", "<!-- end of tables and figures -->"
NOT_YET = "not run yet"
MOST_DOTS = 40  # lines with more points have no dots


def ours_of(entry: Entry, records: Mapping[str, Record]) -> str:
    """Return the cell with our number for an entry, or the reason why there is none, as Markdown."""
    if not entry.measurement:
        return f"not here: {entry.reason}"
    record = records.get(entry.measurement)
    if record is None:
        return NOT_YET
    if record.result is None:
        return f"not run: {record.failure}".replace("\n", " ").replace("|", "/")
    return record.result.ours


def label(entry: Entry) -> str:
    """Return the entry's kind and number, such as `table 1`."""
    return f"{entry.kind} {entry.number}"


def index(records: Mapping[str, Record]) -> str:
    """Return Markdown with a table for each paper, and a row for each of its tables and figures."""
    parts: list[str] = []
    for paper in PAPERS:
        rows = [
            (label(entry), entry.title, entry.theirs, ours_of(entry, records), f"`{entry.name}`")
            for entry in entries_of(paper)
        ]
        parts.append(
            f"### [{paper.title}]({paper.page}.md)\n\n{citation(paper)}\n\n"
            + output.table(("", "what", "paper", "ours, or why not here", "name"), rows)
        )
    return "\n\n".join(parts) + "\n"


def citation(paper: Paper) -> str:
    """Return authors, year and place of publication of a paper, as a line of Markdown."""
    return f"{paper.authors} ({paper.year}). {paper.published}."


def entries_of(paper: Paper) -> list[Entry]:
    """Return the catalogue's entries of a paper: its figures, then its tables, by number."""
    return [entry for entry in ENTRIES if entry.paper == paper.key]


def page(paper: Paper, records: Mapping[str, Record]) -> str:
    """Return the Markdown page of a paper. Entries that share a measurement share a section."""
    parts = [
        f"# {paper.title}\n\n{citation(paper)}\n\n"
        f"Written by `gc-bench paper`; [README.md]({README}) says how. Presets with the paper's settings are "
        f"`{paper.key}-*.toml` in examples/papers.\n"
    ]
    sections: dict[str, list[Entry]] = {}
    for entry in entries_of(paper):
        sections.setdefault(entry.measurement, []).append(entry)
    for measurement, entries in sections.items():
        if not measurement:
            continue
        names = ", ".join(label(entry) for entry in entries)
        parts.append(f"## {names[0].upper()}{names[1:]}\n")
        parts.append(
            "\n".join(f"- {label(e)}: {e.title}. Paper: {e.theirs}. `{e.name}`" for e in entries) + "\n"
        )
        record = records.get(measurement)
        parts.append(f"{NOT_YET[0].upper()}{NOT_YET[1:]}.\n" if record is None else shown(record, entries))
        if record is not None and record.result is not None and record.result.panels:
            parts.append(f"![{names}]({picture(paper, measurement)})\n")
            parts += [f"{caption}\n"] if (caption := _caption(record.result)) else []
    missing = sections.get("", [])
    if missing:
        rows = [(label(entry), entry.title, entry.theirs, entry.reason) for entry in missing]
        parts.append("## Not repeated here\n")
        parts.append(output.table(("", "what", "paper", "why not"), rows) + "\n")
    return "\n".join(parts)


def _caption(result: Result) -> str:
    """Return the sentence that says which runs the lines of a picture show; empty where there is one run."""
    if any(len(runs) > 1 for panel in result.panels for runs in panel.runs.values()):
        return "Lines are means over the seeds, bands reach from the lowest seed to the highest."
    # Records of earlier releases hold the points of one seed.
    return "Lines are those of the first seed alone." if re.search(r"seeds \d+,", result.settings) else ""


def picture(paper: Paper, measurement: str) -> str:
    """Return the file name of a measurement's picture on the page of a paper."""
    return f"{paper.key}-{measurement}.svg"


def drawn(result: Result) -> str:
    """Draw the panels of a result and return the SVG, the same for the same numbers.

    Raises:
        PlotError: if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PlotError(
            f"no pictures: {error}; for matplotlib run pip install '.[run]' in a checkout of Gradwire"
        ) from error
    with mpl.rc_context({"svg.hashsalt": "gradwire", "font.size": 8}):
        figure, found = panels([panel.title for panel in result.panels])
        for axes, panel in zip(found, result.panels, strict=True):
            for name, (x, y) in panel.lines.items():
                (line,) = axes.plot(x, y, marker="." if len(x) <= MOST_DOTS else None, label=name)
                if len(runs := panel.runs.get(name, ())) > 1:
                    lowest, highest = zip(
                        *((min(each), max(each)) for each in zip(*runs, strict=True)), strict=True
                    )
                    axes.fill_between(x, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set(xlabel=panel.x, ylabel=panel.y)
            axes.grid(alpha=0.25)
            axes.legend(frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)


def write(folder: Path, records: Mapping[str, Record], measured: Sequence[str]) -> None:
    """Write the index, all pages, and the pictures of some measurements.

    Args:
        folder: folder of the pages.
        records: all records.
        measured: names of the measurements whose pictures are drawn.

    Raises:
        BenchError: if README.md has lost its marks.
    """
    readme = folder / README
    old = (
        readme.read_text(encoding="utf-8")
        if readme.exists()
        else f"# The papers' measurements\n\n{BEGIN}\n{END}\n"
    )
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchError(
            f"{readme}: expected the lines {BEGIN!r} and {END!r}; add them where the index belongs"
        )
    write_atomically(readme, f"{before}{BEGIN}\n{index(records)}{END}{after}")
    for paper in PAPERS:
        write_atomically(folder / f"{paper.page}.md", page(paper, records))
        for name in {entry.measurement for entry in entries_of(paper)} & set(measured):
            result = records[name].result
            if result is not None and result.panels:
                write_atomically(folder / picture(paper, name), drawn(result))
