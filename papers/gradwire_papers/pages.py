"""Pages of papers/docs: the index of all measurements, and a page and pictures for each paper.

All of it follows from the catalogue and the records, so it can be written at any time. The index stands
between two marks in README.md, whose other text is written by hand.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from gradwire.benchmarks import BenchError, table

from .catalogue import PAPERS, Entry, Paper
from .measurements import Record, replace_text
from .result import Result

README = "README.md"
BEGIN, END = "<!-- tables and figures, by gc-paper -->", "<!-- end of tables and figures -->"
NOT_YET = "not run yet"
MOST_DOTS = 40  # lines with more points have no dots


def ours_of(measurement: str, records: Mapping[str, Record]) -> str:
    """Return the cell with our numbers, or the reason why there are none, as Markdown."""
    record = records.get(measurement)
    if record is None:
        return NOT_YET
    if record.result is None:
        return f"not run: {record.failure}".replace("\n", " ").replace("|", "/")
    return record.result.ours


def index(records: Mapping[str, Record]) -> str:
    """Return Markdown with a table for each paper, and a row for each of its measurements."""
    parts: list[str] = []
    for paper in PAPERS:
        rows = [
            (labels(entries), f"`{measurement}`", ours_of(measurement, records))
            for measurement, entries in sections_of(paper).items()
        ]
        parts.append(
            f"### [{paper.title}]({paper.page}.md) ({paper.key})\n\n"
            + table(("", "measurement", "ours"), rows)
        )
    return "\n\n".join(parts) + "\n"


def sections_of(paper: Paper) -> dict[str, list[Entry]]:
    """Return the paper's entries that are measured, by measurement."""
    found: dict[str, list[Entry]] = {}
    for entry in paper.entries:
        if entry.measurement:
            found.setdefault(entry.measurement, []).append(entry)
    return found


def labels(entries: Sequence[Entry]) -> str:
    """Return the labels of entries in one line, such as `figure 1, table 1`."""
    return ", ".join(entry.label for entry in entries)


def citation(paper: Paper) -> str:
    """Return authors, year and place of publication of a paper, as a line of Markdown."""
    return f"{paper.authors} ({paper.year}). {paper.published}."


def page(paper: Paper, records: Mapping[str, Record]) -> str:
    """Return the Markdown page of a paper. Entries that share a measurement share a section."""
    parts = [
        f"# {paper.title}\n\n{citation(paper)}\n\n"
        f"Written by `gc-paper`; [README.md]({README}) says how. Presets with the paper's settings are "
        f"`{paper.key}-*.toml` in papers/presets.\n"
    ]
    for measurement, entries in sections_of(paper).items():
        names = labels(entries)
        parts.append(f"## {names[0].upper()}{names[1:]}\n")
        parts.append(
            "\n".join(f"- {e.label}: {e.title}. Paper: {e.theirs}. `{e.name}`" for e in entries) + "\n"
        )
        record = records.get(measurement)
        parts.append(f"{NOT_YET[0].upper()}{NOT_YET[1:]}.\n" if record is None else record.shown)
        if record is not None and record.result is not None and record.result.panels:
            parts.append(f"![{names}]({picture(paper, measurement)})\n")
            parts += [f"{caption}\n"] if (caption := _caption(record.result)) else []
    missing = [entry for entry in paper.entries if not entry.measurement]
    if missing:
        rows = [(entry.label, entry.title, entry.theirs, entry.reason) for entry in missing]
        parts.append("## Not repeated here\n")
        parts.append(table(("", "what", "paper", "why not"), rows) + "\n")
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
    """Draw the panels of a result side by side and return the SVG, the same for the same numbers."""
    with mpl.rc_context({"svg.hashsalt": "gradwire", "font.size": 8}):
        count = len(result.panels)
        # Not through pyplot, which would look for a display.
        figure: Any = Figure(figsize=(5 * count, 4), layout="constrained")
        found = figure.subplots(1, count, squeeze=False)[0]
        for axes, panel in zip(found, result.panels, strict=True):
            for name, (x, y) in panel.lines.items():
                (line,) = axes.plot(x, y, marker="." if len(x) <= MOST_DOTS else None, label=name)
                if len(runs := panel.runs.get(name, ())) > 1:
                    lowest, highest = zip(
                        *((min(each), max(each)) for each in zip(*runs, strict=True)), strict=True
                    )
                    axes.fill_between(x, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            axes.spines[["top", "right"]].set_visible(False)
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
    replace_text(readme, f"{before}{BEGIN}\n{index(records)}{END}{after}")
    for paper in PAPERS:
        replace_text(folder / f"{paper.page}.md", page(paper, records))
        for name in sections_of(paper).keys() & set(measured):
            result = records[name].result
            if result is not None and result.panels:
                replace_text(folder / picture(paper, name), drawn(result))
