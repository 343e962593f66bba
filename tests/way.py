"""List the files of the package that run between a gradient and its applied update: `python tests/way.py`.

`entered` starts a real gc-server and a real gc-worker. In each, a profile function notes the file of every
function that begins while the job takes ordinary steps: no start, no evaluation, no end.
"""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
# The first steps compile kernels and divide the model; the watch begins some time after this file is entered.
FIRST = {"server": "server/streams/push_ledger.py", "worker": "worker/training/gradients.py"}
SETTLED_S, WATCHED_S, LIMIT_S = 8.0, 4.0, 300.0


def entered() -> list[str]:
    """Return the files, relative to the root."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = ["--task", "digits", "--host", "127.0.0.1", "--port", port, "--http-port", "0", "--epochs", "0"]
    server += ["--max-seconds", "600", "--evaluate-every", "1000000steps"]
    worker = ["--server", f"127.0.0.1:{port}", "--compressor", "4bit", "--http-port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        notes = [Path(folder, end) for end in ("server", "worker")]
        log = Path(folder, "log")
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, note, f"gradwire.{note.name}.cli", *arguments],
                stderr=log.open("a"),
            )
            for note, arguments in zip(notes, (server, worker), strict=True)
        ]
        try:
            deadline = time.monotonic() + LIMIT_S
            while not all(note.exists() for note in notes):
                if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                    raise SystemExit(f"way: the job did not take steps\n{log.read_text()}")
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        names = {name for note in notes for name in note.read_text().split()}
    return sorted(names)


def watched(note: Path, module: str) -> None:
    """Run a command, and write the files that it enters in a few seconds of its steps."""
    seen: set[str] = set()
    first = str(ROOT / FIRST[note.name])

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    def watch() -> None:
        while first not in seen:
            time.sleep(0.1)
        time.sleep(SETTLED_S)
        seen.clear()
        time.sleep(WATCHED_S)
        prefix = f"{ROOT}/"
        names = [name.removeprefix(prefix) for name in seen.copy() if name.startswith(prefix)]
        draft = note.with_suffix(".draft")
        draft.write_text("\n".join(name for name in names if not name.startswith((".", "tests/"))))
        draft.rename(note)

    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    if sys.argv[1:]:
        note, module = sys.argv[1:3]
        del sys.argv[1:3]
        watched(Path(note), module)
    print("\n".join(entered()))
