"""Fuzzing: `python tests/fuzz/run.py [TARGET ...] [--minutes N] [--seed N]`; all targets by default.

With `atheris` (`pip install atheris`; it is optional) code of gradwire is instrumented, and coverage
guides it; otherwise bytes are changed at random. Whatever a target does not expect is written to
tests/fuzz/seeds/TARGET/, where the suite finds it from then on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SEEDS = FOLDER / "seeds"
MAX_BYTES = 4096
INTERESTING = (0, 1, 2, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 254, 255)
NUMBERS = (0, 1, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def mutated(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """It with a few changes: bits, bytes, numbers, pieces left out, doubled, moved, or taken from another."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(out) + 1)
        size = chance.choice((1, 1, 2, 4, 8, 32))
        match chance.randrange(8):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(out):
                out[at] = chance.choice(INTERESTING)
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size]
            case 4:
                out[at:at] = chance.randbytes(size)
            case 5:
                out[at : at + chance.randrange(3)] = varint(chance.choice(NUMBERS))
            case 6:
                other = chance.choice(others)
                begin = chance.randrange(len(other) + 1)
                out[at : at + size] = other[begin : begin + size]
            case _:
                out[at : at + 4] = chance.choice((b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff" * 4, b"\0" * 4))
    return bytes(out[:MAX_BYTES])


def stored(target: str) -> list[bytes]:
    """Return the inputs that were found before."""
    return [path.read_bytes() for path in sorted((SEEDS / target).glob("*.bin"))]


def keep(target: str, data: bytes) -> Path:
    """Write down what a target did not expect."""
    path = SEEDS / target / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def by_chance(name: str, seconds: float, seed: int) -> tuple[int, list[Path]]:
    """How many inputs were tried, and what they found."""
    from targets import TARGETS, valid

    known = [*valid()[name], *stored(name)]
    chance = random.Random(f"{seed} {name}")
    end, tried, found = time.monotonic() + seconds, 0, list[Path]()
    while time.monotonic() < end and len(found) < 10:
        data = mutated(chance.choice(known), known, chance)
        tried += 1
        try:
            TARGETS[name](data)
        except Exception as error:
            found.append(keep(name, data))
            print(f"{name}: {type(error).__name__}: {error}: {found[-1]}", flush=True)
    return tried, found


def guided(name: str, seconds: float, seed: int) -> int:
    """The same with atheris, in a process of its own, which ends with what it finds: its exit status."""
    with tempfile.TemporaryDirectory() as corpus:
        command = [sys.executable, str(FOLDER / "guided.py"), name, corpus, f"-seed={seed}"]
        limits = [
            f"-max_total_time={seconds:.0f}",
            f"-max_len={MAX_BYTES}",
            "-timeout=20",
            "-rss_limit_mb=4096",
        ]
        where = f"-artifact_prefix={SEEDS / name}/found-"
        (SEEDS / name).mkdir(parents=True, exist_ok=True)
        done = subprocess.run([*command, *limits, where, "-print_final_stats=1"])
    for path in (SEEDS / name).glob("found-*"):
        if not path.name.endswith(".bin"):
            path.rename(path.with_name(path.name + ".bin"))
    return done.returncode


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each target; default 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unguided", action="store_true", help="without atheris, though it is installed")
    arguments = parser.parse_args(argv)
    from targets import TARGETS

    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown target {sorted(unknown)[0]!r}; known targets: {', '.join(TARGETS)}")
    coverage = not arguments.unguided and importlib.util.find_spec("atheris") is not None
    wrong = 0
    for name in arguments.targets or TARGETS:
        if coverage:
            code = guided(name, arguments.minutes * 60, arguments.seed)
            wrong += code != 0
            print(f"{name}: guided by coverage, {'nothing' if code == 0 else 'something'} found", flush=True)
        else:
            tried, found = by_chance(name, arguments.minutes * 60, arguments.seed)
            wrong += len(found)
            print(f"{name}: {tried} inputs, {len(found)} found", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
