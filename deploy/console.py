"""Rich's console, which leaves a reader who has gone to `exits.command`."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Raise the error that rich has caught. Rich itself would exit, with the code of a fault."""
        raise BrokenPipeError
