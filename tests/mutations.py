"""Check that the tests notice deliberate mistakes: `python tests/mutations.py [--list] [--only NAME]`.

A mutant, declared in mutants.toml, is the source with one mistake. It replaces a piece of a file in a
temporary copy of the checkout. It names a small part of the suite, which must fail with the mistake and pass
without it. That part takes at most 30 s, longer only where the mistake makes numba compile kernels again.
The exit status is 1 if a mutant survives, that is, its tests pass, and if its text does not occur exactly
once, which the suite checks too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# numba keeps compiled kernels there, and does not see that a function from another file has changed.
KERNELS = "compressors/kernels"
COMPILED = ("*.nbi", "*.nbc")
LEFT_OUT = (".git", ".venv", ".cache", ".*_cache", "runs", "build", "dist", "*.egg-info")
PASSED, FAILED = 0, 1  # exit codes of pytest; others say that it could not run the tests


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A deliberate mistake, and the tests that must notice it.

    Attributes:
        name: what goes wrong, as a sentence.
        path: the source file, relative to the root.
        old: a piece of that file that occurs once.
        new: its replacement.
        tests: arguments of pytest: paths, and -k with its expression in one word.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """The exit code of pytest, its output, and the seconds that it took."""

    code: int
    output: str
    seconds: float


def occurrences(mutant: Mutant) -> int:
    """Return how often the text that a mutant replaces occurs; 0 if there is no such file."""
    path = ROOT / mutant.path
    return path.read_text().count(mutant.old) if path.is_file() else 0


def run(tests: Iterable[str], mutant: Mutant | None = None) -> Run:
    """Run `tests` in a copy of the checkout that has the mistake of `mutant`."""
    with tempfile.TemporaryDirectory(prefix="gradwire-mutation-") as folder:
        copy = Path(folder) / "gradwire"
        in_kernels = mutant is not None and mutant.path.startswith(KERNELS)
        ignore = shutil.ignore_patterns(*LEFT_OUT, *(COMPILED if in_kernels else ()))
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
        if mutant is not None:
            path = copy / mutant.path
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n0", "-x", "-q", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy / ".typing")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Run(done.returncode, done.stdout, time.monotonic() - began)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--list", action="store_true", help="print the names of all mutants")
    parser.add_argument("--only", metavar="NAME", action="append", help="run this mutant; can be repeated")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mutants at a time; default one per core"
    )
    arguments = parser.parse_args(argv)
    if arguments.list:
        for mutant in MUTANTS:
            print(f"{mutant.name}: {mutant.path}, {' '.join(mutant.tests)}")
        return 0
    chosen = [mutant for mutant in MUTANTS if arguments.only is None or mutant.name in arguments.only]
    unknown = set(arguments.only or ()) - {mutant.name for mutant in chosen}
    lost = [mutant.name for mutant in chosen if occurrences(mutant) != 1]
    for name in sorted(unknown):
        print(f"{name}: no such mutant; --list shows all")
    for name in lost:
        print(f"{name}: its text does not occur exactly once")
    if unknown or lost or not chosen:
        return 1
    # Once, and not in every copy.
    compiling = "from gradwire.compressors import warm_up; warm_up()"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".typing")}
    subprocess.run([sys.executable, "-c", compiling], env=environ, check=True)
    wrong = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        unchanged = {
            pool.submit(run, tests): " ".join(tests) for tests in {mutant.tests: None for mutant in chosen}
        }
        changed = {pool.submit(run, mutant.tests, mutant): mutant.name for mutant in chosen}
        for future in as_completed([*unchanged, *changed]):
            done, expected = future.result(), PASSED if future in unchanged else FAILED
            verdict = (
                "as expected" if done.code == expected else "SURVIVED" if done.code == PASSED else "ERROR"
            )
            what = f"without a mistake: {unchanged[future]}" if future in unchanged else changed[future]
            print(f"{verdict}: {what} ({done.seconds:.0f} s)", flush=True)
            if done.code != expected:
                wrong += 1
                print(done.output, end="")
    print(f"{len(chosen)} mutants, {wrong} wrong")
    return 1 if wrong else 0


def read(path: Path) -> list[Mutant]:
    """Return the mutants that a file declares."""
    declared = tomllib.loads(path.read_text())
    return [
        Mutant(
            name=name,
            path=fields["path"],
            old=fields["old"],
            new=fields["new"],
            tests=tuple(declared["tests"][fields["tests"]]),
        )
        for name, fields in declared["mutants"].items()
    ]


MUTANTS = read(Path(__file__).with_name("mutants.toml"))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
