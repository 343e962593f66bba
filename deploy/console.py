"""Rich's console, which lets `exits.command` handle a closed pipe."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Raise the error that rich has caught; rich would exit with code 1."""
        raise BrokenPipeError
