"""The exceptions of this package in a script, shown in one line.

Their messages name the remedy: an option, a call of the script, the data set. A traceback through this
package would bury it. The line names the place in the script. Exceptions of other code, and those with a
cause in other code, are shown as before. All can be caught: `gradwire` exports their types.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

_PACKAGE = f"{__name__.partition('.')[0]}."
# Folders of Python and of installed packages, such as torch, whose frames lie between a script and a hook.
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


def in_one_line(error: BaseException) -> str:
    """Return the type and text of an exception, and the place in the script; its notes follow as lines."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            break
        file = frame.f_code.co_filename
        if not file.startswith(_INSTALLED) and "<frozen " not in file:
            place = f" ({Path(file).name}, line {line})"
    notes: list[str] = getattr(error, "__notes__", [])
    return "\n".join([f"gradwire.{type(error).__name__}: {error}{place}", *notes])


def show_in_one_line(*kinds: Any) -> None:
    """Have Python and IPython show these exceptions in one line, where they end a script or a cell."""
    for kind in kinds:
        kind._render_traceback_ = _for_ipython
    before = sys.excepthook
    if getattr(before, "of_gradwire", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(kind, "_render_traceback_", None) is _for_ipython and error.__cause__ is None:
            print(in_one_line(error), file=sys.stderr)
        else:
            before(kind, error, trace)

    hook.of_gradwire = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _for_ipython(error: BaseException) -> list[str]:
    """Return the lines that IPython shows of an exception: its method `_render_traceback_`."""
    if error.__cause__ is not None:
        return traceback.format_exception(error)
    return [in_one_line(error)]
