"""Whether two checkouts of Gradwire train to the same parameters, bit for bit.

    python tests/end_to_end/same_bits.py --against ../other-checkout    # trains with both, and compares
    python tests/end_to_end/same_bits.py --record main.json             # trains with this one
    python tests/end_to_end/same_bits.py --against main.json            # compares with what was recorded
    python tests/end_to_end/same_bits.py --against . --only 'sync/*'    # does a run repeat its own bits?

For a change that must not change what is computed. Real gc-server and gc-worker processes train a small model
in every mode, with several compressors, with and without overlap and --state, and in further ways:
`same_bits_runs.py` lists them all. Each run has to end with the same `parameters_sha256` and the same values
in the file of --output. The exit status is 1 if one does not, or fails. Recordings can be compared only if
they were made on one machine, with one release of torch.

A checkout needs a .venv in which it is installed (`make kernels` makes one). Tasks and scripts are those of
this checkout for both, and so is the list of runs.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from same_bits_runs import RUNS

HERE = Path(__file__).resolve().parent
Recording = dict[str, dict[str, str]]  # by run, what it came to


def recorded(checkout: Path, names: Sequence[str], file: Path) -> Recording:
    """Train with a checkout, and write in a file what the runs came to."""
    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():
        sys.exit(f"same_bits: {checkout} has no .venv/bin/python; run `make kernels` there")
    print(f"{len(names)} runs with {checkout}", file=sys.stderr)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GC_", "PYTHON"))}
    # numpy's and torch's own threads would make forks unsafe.
    environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    environ["PYTHONPATH"] = str(HERE / "programs")
    began = time.monotonic()
    recorder = HERE / "same_bits_recorder.py"
    if subprocess.run([python, recorder, checkout, file, *names], env=environ, check=False).returncode:
        sys.exit(f"same_bits: {checkout} cannot be recorded")
    print(f"{len(names)} runs in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return read(file)


def read(file: Path) -> Recording:
    found: Recording = json.loads(file.read_text())
    return found


def differences(ours: Recording, theirs: Recording, names: Sequence[str]) -> dict[str, str]:
    """Return the runs that failed, are not in both recordings, or did not end alike, and why, by name."""
    found: dict[str, str] = {}
    for name in names:
        here, there = (each.get(name, {"failed": "not in the recording"}) for each in (ours, theirs))
        failed = {
            where: each["failed"] for where, each in (("here", here), ("there", there)) if "failed" in each
        }
        if failed:
            found[name] = "; ".join(f"{where}: {why}" for where, why in failed.items())
        elif here != there:
            keys = [key for key in here if here[key] != there.get(key)]
            found[name] = ", ".join(f"{key} {here[key][:12]} != {there.get(key, '')[:12]}" for key in keys)
    return found


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, or a recording")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="file for what this checkout's runs come to"
    )
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="runs whose names match, as in 'sync/*'"
    )
    parser.add_argument("--quick", action="store_true", help="a few runs of each kind")
    options = parser.parse_args()
    names = [
        run.name
        for run in RUNS
        if fnmatch.fnmatchcase(run.name, options.only) and (run.quick or not options.quick)
    ]
    if not names:
        parser.error(f"no run matches --only {options.only}")
    if options.against is None and options.record is None:
        parser.error("expected --against PATH, --record FILE, or both")
    with tempfile.TemporaryDirectory() as folder:
        ours = recorded(HERE.parents[1], names, (options.record or Path(folder, "ours.json")).resolve())
        theirs = ours
        if options.against is not None:
            against: Path = options.against.resolve()
            theirs = (
                recorded(against, names, Path(folder, "theirs.json")) if against.is_dir() else read(against)
            )
    found = differences(ours, theirs, names)
    for name, why in found.items():
        print(f"{name}\n    {why}")
    wrong = "failed" if options.against is None else "failed or differ"
    print(f"{len(names)} runs, {len(found)} {wrong}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
