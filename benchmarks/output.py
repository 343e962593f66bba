"""Output of benchmarks: Markdown tables, progress, JSON files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..deploy.report import write_atomically


def row(cells: Iterable[object]) -> str:
    """Return a row of a Markdown table from the values of its cells."""
    return f"| {' | '.join(map(str, cells))} |"


def table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table from its headings and the values of its rows."""
    return "\n".join([row(headings), "|---" * len(headings) + "|", *map(row, rows)])


def say(text: str) -> None:
    """Print a line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def write_json(path: Path | None, rows: Any) -> None:
    """Write `rows`, a value for JSON, to `path`. Do nothing if `path` is None."""
    if path is not None:
        write_atomically(path, json.dumps(rows, indent=2, allow_nan=False) + "\n")
