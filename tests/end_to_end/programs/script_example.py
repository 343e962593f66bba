"""The example of docs/how-to/scripts.md, in a forked process: `script_example ARGUMENTS --server ...`, where
what the daemons' tests add goes to it as `GC_` variables, as from a shell."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[3] / "examples"


def main(*arguments: str) -> None:
    torch.set_num_threads(1)
    at = arguments.index("--server")
    for option, value in zip(arguments[at::2], arguments[at + 1 :: 2], strict=True):
        os.environ[f"GC_{option[2:].replace('-', '_').upper()}"] = value
    sys.argv[1:] = arguments[:at]
    with contextlib.redirect_stdout(sys.stderr):
        runpy.run_path(str(EXAMPLES / "gradwire_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
