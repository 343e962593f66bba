"""The full example of docs/how-to/scripts.md, in a forked process: `script_full FOLDER --server ...`, where
what the daemons' tests add goes to it as `GC_` variables, as from a shell. It says which of its lines ran."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "full_training.py")
RAN: set[int] = set()


def traced(frame: FrameType, event: str, _: Any) -> Any:
    if frame.f_code.co_filename != EXAMPLE:
        return None
    RAN.add(frame.f_lineno)
    return traced


def main(folder: str, *options: str) -> None:
    torch.set_num_threads(1)
    for option, value in zip(options[::2], options[1::2], strict=True):
        os.environ[f"GC_{option[2:].replace('-', '_').upper()}"] = value
    sys.argv[1:] = ["--folder", folder]
    sys.settrace(traced)
    with contextlib.redirect_stdout(sys.stderr):
        runpy.run_path(EXAMPLE, run_name="__main__")
    sys.settrace(None)
    print(json.dumps({"message": "lines", "ran": sorted(RAN)}), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
