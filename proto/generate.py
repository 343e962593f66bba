"""Generate the protobuf stubs, or check that the committed ones are current.

    python -m gradwire.proto.generate [--check]

The generated code must not be newer than the oldest protobuf runtime that pyproject.toml admits, so
`grpcio-tools` is pinned to `TOOLS_VERSION`, whose protoc writes 5.29 code. Needs the checkout, not a wheel.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS_VERSION = "1.71.2"
ROOT = Path(__file__).resolve().parent.parent
STUBS = ("proto/gradwire_pb2.py", "proto/gradwire_pb2.pyi")


def generate(into: Path) -> None:
    """Write the stubs below `into`/gradwire/proto."""
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / '.typing'}"),
            *(f"--python_out={into}", f"--pyi_out={into}", "gradwire/proto/gradwire.proto"),
        ],
        check=True,
    )


def drifted() -> list[str]:
    """Stubs whose committed text is not what the generator writes today."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return [
            stub
            for stub in STUBS
            if (Path(folder) / "gradwire" / stub).read_text() != (ROOT / stub).read_text()
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate or check the protobuf stubs.")
    parser.add_argument("--check", action="store_true", help="only report drift; exit 1 when there is some")
    arguments = parser.parse_args()
    installed = importlib.metadata.version("grpcio-tools")
    if installed != TOOLS_VERSION:
        print(f"grpcio-tools {installed} is installed, {TOOLS_VERSION} is needed", file=sys.stderr)
        return 2
    if not arguments.check:
        generate(ROOT / ".typing")
        return 0
    stale = drifted()
    for stub in stale:
        print(f"{stub} is out of date: run python -m gradwire.proto.generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
