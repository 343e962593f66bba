"""Check that constraints.txt can be installed from the package index, or write other lists of versions.

    python tests/packaging/pins.py                     # make check-install
    python tests/packaging/pins.py --renew             # make constraints
    python tests/packaging/pins.py --bill FOLDER       # make dist
    python tests/packaging/pins.py --lowest ENVIRONMENT EXTRA,... [TORCH]    # make check-lowest; or --newest

They run in an environment with uv and a recent pip. The check resolves every extra on each of `PYTHONS` and
`PLATFORMS`, with two builds of torch. The index's brings CUDA. A CPU build asks for neither CUDA nor triton.
uv resolves for all Pythons; pip, which users type, for those that this machine has. Both read metadata alone.

pip's settings that name other sources (folders of wheels, more indexes, constraints) do not count. They can
hide a conflict: with a folder of CPU builds of torch, a pin of triton passes that the default build refuses.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# On the last two Gradwire is not tried (records/2026-11-platforms.md): there are wheels of what it needs.
PLATFORMS = (
    "x86_64-manylinux_2_28",
    "aarch64-manylinux_2_28",
    "aarch64-apple-darwin",
    "x86_64-pc-windows-msvc",
)
# A wheel of everything, so that nobody needs a compiler. `spectral` has none, and is Python alone.
WHEELS = ["--only-binary=:all:", "--no-binary=spectral"]
# What torch's default build for Linux asks for, and a CPU build does not.
CUDA = ("cuda", "nvidia", "triton")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BIN = Path(sys.executable).parent
_OTHER_SOURCES = (
    "PIP_FIND_LINKS",
    "PIP_EXTRA_INDEX_URL",
    "PIP_CONSTRAINT",
    "PIP_REQUIREMENT",
    "PIP_NO_INDEX",
)
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in _OTHER_SOURCES and name not in ("PYTHONPATH", "PYTHONHOME")
} | {"PIP_CONFIG_FILE": os.devnull, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # torch's wheels ask for that macOS


def run(*command: object, text: str | None = None) -> str:
    """Output of `command` for the input `text`. It must succeed; its errors end this program."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT, env=ENVIRONMENT, input=text, text=True, capture_output=True, encoding="utf-8",
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(str(word) for word in command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def compiled(extras: Iterable[str], pins: Path, *more: object) -> str:
    """Lines NAME==VERSION that uv resolves for `extras`, without those that no pin names."""
    index = [f"--default-index={ENVIRONMENT['PIP_INDEX_URL']}"] if "PIP_INDEX_URL" in ENVIRONMENT else []
    return run(
        BIN / "uv", "pip", "compile", "-q", "--no-config", "--no-header", "--no-annotate",
        "--no-emit-package=setuptools", "--no-emit-package=colorama",  # click has the latter on Windows
        *WHEELS, *index, *more, f"--constraint={pins}", *(f"--extra={extra}" for extra in extras),
        "pyproject.toml",
    )  # fmt: skip


def target(python: str, platform: str) -> list[str]:
    """Options of uv that resolve for a Python and a platform."""
    return [f"--python-version={python}", f"--python-platform={platform}"]


def resolved_by_pip(python: str, folder: Path, *more: object) -> dict[str, dict[str, Any]]:
    """Metadata of each package that pip would install for `python`, by name."""
    report = folder / "report.json"
    # fast-deps: where the index offers no metadata, pip reads the end of a wheel instead of gigabytes.
    run(
        BIN / "pip", f"--python={python}", "install", "-q", "--dry-run", "--ignore-installed",
        "--use-feature=fast-deps", f"--report={report}", *WHEELS, *more, f"--constraint={PINS}", ".[dev]",
    )  # fmt: skip
    entries = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {entry["metadata"]["name"].lower(): entry["metadata"] for entry in entries}


def cpu_build(torch: dict[str, Any], folder: Path) -> None:
    """Write into `folder` a wheel without code that has the dependencies of a CPU build of `torch`."""
    version = f"{torch['version']}+cpu"
    needs = [line for line in torch["requires_dist"] if not line.startswith(CUDA)]
    head = [
        "Metadata-Version: 2.1",
        "Name: torch",
        f"Version: {version}",
        *(f"Requires-Dist: {n}" for n in needs),
    ]
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(head) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def resolve_with_uv(python: str, platform: str) -> None:
    """End with an error if an extra does not resolve, or brings a package without a pin."""
    pinned = set(PINS.read_text(encoding="utf-8").splitlines())
    # `dev` holds every other extra; uv then knows their metadata.
    cached: list[str] = []
    for extra in ["dev", None, *PROJECT["optional-dependencies"]]:
        lines = compiled([extra] if extra else [], PINS, *target(python, platform), *cached)
        unpinned = set(lines.splitlines()) - pinned
        if unpinned:
            names = ", ".join(sorted(unpinned))
            sys.exit(f"Python {python}, extra {extra}: no pin for {names}: run `make constraints`")
        cached = ["--offline"]


def resolve_with_pip(python: str) -> str:
    """Say how many packages each build of torch brings; end with an error if one does not resolve."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in [shutil.which(f"python{python}"), *pyenv.glob(f"versions/{python}.*/bin/python")]:
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            break
    else:
        return f"pip, Python {python}: not tried, this machine has none"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        default = resolved_by_pip(str(path), folder)
        cpu_build(default["torch"], folder)
        lean = resolved_by_pip(str(path), folder, f"--find-links={folder}")
    heavy = [package for package in lean if package.startswith(CUDA) and package != "triton"]
    if heavy or "+cpu" not in lean["torch"]["version"]:
        sys.exit(
            f"Python {python}: with a CPU build of torch, pip takes {lean['torch']['version']} and {heavy}"
        )
    return f"pip, Python {python}: {len(default)} packages with CUDA, {len(lean)} with a CPU build of torch"


def check() -> None:
    """End with an error if a combination does not resolve."""
    with ThreadPoolExecutor(4) as pool:  # they wait for the index most of the time
        with_pip = pool.map(resolve_with_pip, PYTHONS)
        pairs = list(product(PYTHONS, PLATFORMS))
        list(pool.map(resolve_with_uv, [each[0] for each in pairs], [each[1] for each in pairs]))
        print(f"uv: every extra resolves on Python {', '.join(PYTHONS)}; {', '.join(PLATFORMS)}")
        print(*with_pip, sep="\n")


def renew() -> None:
    """Write the newest pins, apart from torch's."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as temporary:
        torch = Path(temporary, "torch.txt")
        torch.write_text("\n".join(line for line in lines if re.match("torch==", line)), encoding="utf-8")
        # The oldest Python decides: what it takes has wheels for the newer ones, too, or `check` says so.
        pins = compiled(["dev"], torch, *target(PYTHONS[0], PLATFORMS[0]))
    head = [line for line in lines if line.startswith("#")]
    PINS.write_text("\n".join([*head, pins]), encoding="utf-8")


def write_pins(resolution: str, folder: Path, extras: str, torch: str = "") -> None:
    """Write `pins.txt` into an environment: the lowest of each direct dependency, or the newest versions.

    Args:
        resolution: how uv chooses: lowest-direct or highest.
        folder: environment, whose Python counts.
        extras: names with commas between them.
        torch: version of torch; empty to choose it, too.
    """
    pins = folder / "pins.txt"
    pins.write_text(f"torch=={torch}\n" if torch else "", encoding="utf-8")
    where = f"--python={folder / 'bin' / 'python'}"
    pins.write_text(compiled(extras.split(","), pins, where, f"--resolution={resolution}"), encoding="utf-8")


def write_bill(folder: Path) -> None:
    """Write a CycloneDX list of what `pip install` brings with the pins on Linux, with hashes."""
    needed = compiled((), PINS, *target(PYTHONS[0], PLATFORMS[0]), "--generate-hashes")
    bill = folder / f"{PROJECT['name']}-{PROJECT['version']}.cdx.json"
    run(
        BIN / "cyclonedx-py", "requirements", "--pyproject=pyproject.toml", "--mc-type=application",
        "--output-reproducible", f"--output-file={bill}", "-",
        text=needed,
    )  # fmt: skip


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--lowest", folder, extras, *torch]:
            write_pins("lowest-direct", Path(folder).absolute(), extras, *torch)
        case ["--newest", folder, extras, *torch]:
            write_pins("highest", Path(folder).absolute(), extras, *torch)
        case ["--bill", folder]:
            write_bill(Path(folder).absolute())
        case arguments:
            if arguments == ["--renew"]:
                renew()
            check()
