"""One target under atheris: `guided.py TARGET CORPUS [libFuzzer options]`. run.py starts it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

atheris: Any = importlib.import_module("atheris")  # optional, so no checker need know it

INSTRUMENTED = [
    "gradwire.proto",
    "gradwire.planning",
    "gradwire.compressors",
    "gradwire.storage.values",
    "gradwire.server.durable",
    "gradwire.server.streams.arriving",
    "gradwire.worker.session.receiving",
]
NAME, CORPUS = sys.argv[1], Path(sys.argv[2])

with atheris.instrument_imports(include=INSTRUMENTED):
    from run import stored
    from targets import TARGETS, valid

for number, data in enumerate([*valid()[NAME], *stored(NAME)]):
    (CORPUS / f"{number:04}").write_bytes(data)
atheris.Setup([sys.argv[0], str(CORPUS), *sys.argv[3:]], TARGETS[NAME])
atheris.Fuzz()
