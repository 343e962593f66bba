"""Deliberate breaks that the tests must notice: `python tests/mutations.py [--list] [--only NAME]`.

Each break, in breaks.toml, replaces a piece of source in a temporary copy of the checkout and names a small
part of the suite that has to fail with it and pass without. That part takes at most 30 s, and longer only
where a break has kernels compiled again. A break that no test notices is said to survive; then the exit
status is 1, as it is if the text of a break is not found exactly once, which a test of the suite checks too.
Keep the pieces short and unmistakable, and renew them with the code.
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
# Where numba keeps compiled kernels. It does not see that a function from another file has changed.
KERNELS = "compressors/kernels"
COMPILED = ("*.nbi", "*.nbc")
LEFT_OUT = (".git", ".venv", ".cache", ".*_cache", "runs", "build", "dist", "*.egg-info")
PASSED, FAILED = 0, 1  # exit codes of pytest; others say that it could not run the tests


@dataclass(frozen=True, kw_only=True)
class Break:
    """
    Attributes:
        name: what goes wrong.
        path: of the source file, from the root.
        old: a piece of it that occurs once.
        new: what it is replaced with.
        tests: arguments of pytest: paths, and -k with its expression in one word.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """How pytest ended, what it said, and after how many seconds."""

    code: int
    output: str
    seconds: float


def occurrences(each: Break) -> int:
    """How often the text that a break replaces occurs; 0 if there is no such file."""
    path = ROOT / each.path
    return path.read_text().count(each.old) if path.is_file() else 0


def run(tests: Iterable[str], broken: Break | None = None) -> Run:
    """Run tests in a copy of the checkout, with this break."""
    with tempfile.TemporaryDirectory(prefix="gradwire-mutation-") as folder:
        copy = Path(folder) / "gradwire"
        in_kernels = broken is not None and broken.path.startswith(KERNELS)
        ignore = shutil.ignore_patterns(*LEFT_OUT, *(COMPILED if in_kernels else ()))
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
        if broken is not None:
            path = copy / broken.path
            path.write_text(path.read_text().replace(broken.old, broken.new))
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
    parser.add_argument("--list", action="store_true", help="names of all breaks")
    parser.add_argument("--only", metavar="NAME", action="append", help="this break; can be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time; default one per core")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for each in BREAKS:
            print(f"{each.name}: {each.path}, {' '.join(each.tests)}")
        return 0
    chosen = [each for each in BREAKS if arguments.only is None or each.name in arguments.only]
    unknown = set(arguments.only or ()) - {each.name for each in chosen}
    lost = [each.name for each in chosen if occurrences(each) != 1]
    for name in sorted(unknown):
        print(f"{name}: no such break; --list shows all")
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
        plain = {pool.submit(run, tests): " ".join(tests) for tests in {each.tests: None for each in chosen}}
        broken = {pool.submit(run, each.tests, each): each.name for each in chosen}
        for future in as_completed([*plain, *broken]):
            done, expected = future.result(), PASSED if future in plain else FAILED
            verdict = (
                "as expected" if done.code == expected else "SURVIVED" if done.code == PASSED else "ERROR"
            )
            what = f"without a break: {plain[future]}" if future in plain else broken[future]
            print(f"{verdict}: {what} ({done.seconds:.0f} s)", flush=True)
            if done.code != expected:
                wrong += 1
                print(done.output, end="")
    print(f"{len(chosen)} breaks, {wrong} wrong")
    return 1 if wrong else 0


def read(path: Path) -> list[Break]:
    """The breaks that a file declares."""
    declared = tomllib.loads(path.read_text())
    parts = {name: tuple(arguments) for name, arguments in declared["tests"].items()}
    return [
        Break(
            name=each["name"], path=each["path"], old=each["old"], new=each["new"], tests=parts[each["tests"]]
        )
        for each in declared["break"]
    ]


BREAKS = read(Path(__file__).with_name("breaks.toml"))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
