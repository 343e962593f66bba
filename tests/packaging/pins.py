"""Check that constraints.txt can be installed from the package index, or renew it.

    python tests/packaging/pins.py [--renew]

`make check-install` and `make constraints` run it, in an environment with uv and a recent pip. The check
resolves every extra on each of `PYTHONS`, with two builds of torch. The index's brings CUDA. A CPU build asks
for neither CUDA nor triton. uv resolves for all Pythons; pip, which users type, for those that this machine
has. Both read metadata alone.

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
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
# A wheel of everything, so that nobody needs a compiler. `spectral` has none, and is Python alone.
WHEELS = ["--only-binary=:all:", "--no-binary=spectral"]
# What torch's default build for Linux asks for, and a CPU build does not.
CUDA = ("cuda", "nvidia", "triton")

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
} | {"PIP_CONFIG_FILE": os.devnull}


def run(*command: object) -> str:
    """Output of `command`, which must succeed; its errors end this program."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, encoding="utf-8",
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(str(word) for word in command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def compiled(extra: str | None, python: str, platform: str, pins: Path, *more: object) -> list[str]:
    """Lines NAME==VERSION that uv resolves for `extra`, without setuptools, which no pin names."""
    index = [f"--default-index={ENVIRONMENT['PIP_INDEX_URL']}"] if "PIP_INDEX_URL" in ENVIRONMENT else []
    return run(
        BIN / "uv", "pip", "compile", "-q", "--no-config", "--no-header", "--no-annotate",
        "--no-emit-package=setuptools", f"--python-version={python}", f"--python-platform={platform}",
        *WHEELS, *index, *more, f"--constraint={pins}",
        *([f"--extra={extra}"] if extra else []), "pyproject.toml",
    ).splitlines()  # fmt: skip


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # `dev` holds every other extra; uv then knows their metadata.
    cached: list[str] = []
    for extra in ["dev", None, *project["optional-dependencies"]]:
        unpinned = set(compiled(extra, python, platform, PINS, *cached)) - pinned
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
        print(f"uv: every extra resolves on Python {', '.join(PYTHONS)}, {' and '.join(PLATFORMS)}")
        print(*with_pip, sep="\n")


def renew() -> None:
    """Write the newest pins, apart from torch's."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as temporary:
        torch = Path(temporary, "torch.txt")
        torch.write_text("\n".join(line for line in lines if re.match("torch==", line)), encoding="utf-8")
        # The oldest Python decides: what it takes has wheels for the newer ones, too, or `check` says so.
        pins = compiled("dev", PYTHONS[0], PLATFORMS[0], torch)
    head = [line for line in lines if line.startswith("#")]
    PINS.write_text("\n".join([*head, *pins]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--renew"]:
        renew()
    check()
