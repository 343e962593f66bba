"""The cells of examples/notebook.ipynb, as a user runs them: `script_notebook run --server ...`. The one that
trains is interrupted, and runs again; later the one that connects does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook.ipynb"
INTERRUPTED = 10  # step before whose push Ctrl-C arrives


def say(message: str, **more: Any) -> None:
    print(json.dumps({"message": message, **more}), file=sys.stderr, flush=True)


def main(_: str, *options: str) -> None:
    mpl.use("agg")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    torch.set_num_threads(1)
    for option, value in zip(options[::2], options[1::2], strict=True):
        os.environ[f"GC_{option[2:].replace('-', '_').upper()}"] = value
    cells = {
        each["metadata"]["tags"][0]: compile("".join(each["source"]), f"cell {number}", "exec")
        for number, each in enumerate(json.loads(NOTEBOOK.read_text())["cells"])
        if each["cell_type"] == "code"
    }
    space: dict[str, Any] = {}
    steps = 0

    def run(tag: str) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            exec(cells[tag], space)

    def interrupt(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == INTERRUPTED:
            signal.raise_signal(signal.SIGINT)

    run("data")
    run("connect")
    space["optimizer"].register_step_pre_hook(interrupt)
    try:
        run("train")
    except KeyboardInterrupt as error:
        sys.last_value = error  # as IPython does: it keeps the frames
        say("interrupted", version=space["job"].version)
    for tag in ("train", "look", "rate", "continue"):
        run(tag)
        say(tag, version=space["job"].version, accuracy=space["accuracy"](), steps=steps)
    run("connect")
    say("connected", version=space["job"].version)
    run("continue")
    say("again", version=space["job"].version, accuracy=space["accuracy"]())
    run("leave")


if __name__ == "__main__":
    main(*sys.argv[1:])
