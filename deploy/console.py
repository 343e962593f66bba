"""Rich's console, changed to let `exits.command` handle a closed pipe."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """Rich's console that passes on the error of a closed pipe. All commands print tables with it."""

    def on_broken_pipe(self) -> None:
        """Called when standard output is a closed pipe. Raises BrokenPipeError instead of exiting."""
        raise BrokenPipeError
