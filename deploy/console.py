"""The terminal of all commands: rich's console, and tables whose cells are literal text."""

from __future__ import annotations

from collections.abc import Sequence

import rich.console
from rich.table import Table
from rich.text import Text

from ..common.naming import printable


class Console(rich.console.Console):
    """Rich's console that passes on the error of a closed pipe, which `exits.command` handles."""

    def on_broken_pipe(self) -> None:
        """Called when standard output is a closed pipe. Raise BrokenPipeError instead of exiting."""
        raise BrokenPipeError


def table(
    title: str, left: Sequence[str], right: Sequence[str] = (), last: Sequence[str] = (), *, caption: str = ""
) -> Table:
    """Return a table without rows, with these columns, of which those of `right` are aligned to the right."""
    found = Table(title=literal(title, "table.title") if title else None, caption=caption or None)
    for name in left:
        found.add_column(literal(name), no_wrap=True)
    for name in right:
        found.add_column(literal(name), justify="right", no_wrap=True)
    for name in last:
        found.add_column(literal(name), no_wrap=True)
    return found


def add_row(table: Table, *cells: str | Text, style: str | None = None) -> None:
    """Add a row to a table; its texts are printed as they are."""
    table.add_row(*(literal(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def literal(text: str, style: str = "") -> Text:
    """Return text that rich prints as it is, without control characters: it reads markup in a string."""
    return Text(printable(text), style=style)
