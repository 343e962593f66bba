"""Where the figures of a benchmark go: Markdown tables, JSON files, plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..deploy.report import write_atomically


def row(cells: Iterable[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    return "\n".join([row(headings), "|---" * len(headings) + "|", *map(row, rows)])


def say(text: str) -> None:
    """How far a benchmark is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def write_json(path: Path | None, rows: Any) -> None:
    """If a file was asked for."""
    if path is not None:
        write_atomically(path, json.dumps(rows, indent=2, allow_nan=False) + "\n")
