"""Generate the Python code from gradwire.proto, or check that the committed files still match it.

    python tests/proto/generate.py [--check]

protoc generates gradwire_pb2.py and its stub. This file generates messages.py from the same descriptors:

- a frozen dataclass for each message,
- an IntEnum for each enum,
- a union for each envelope, a message whose oneof is called `body`.

The head of the .proto says which fields may be left out.

Generated code must not be newer than the oldest protobuf runtime that pyproject.toml admits. So
`grpcio-tools` is pinned to `TOOLS_VERSION`, whose protoc generates code for 5.29.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

TOOLS_VERSION = "1.71.2"
ROOT = Path(__file__).resolve().parents[2]
SOURCE = "gradwire/proto/gradwire.proto"
GENERATED = ("proto/gradwire_pb2.py", "proto/gradwire_pb2.pyi", "proto/messages.py")

WIDTH = 110
ENVELOPE = "body"  # name of an envelope's oneof
MAY_BE_LEFT_OUT = "Optional."  # first word in the comment of a field with a default
STORED = {"ModelManifest": "Manifest"}  # names in stored files of messages that have another one here
VIEWS = {
    "Chunk"
}  # messages whose bytes are a view of the received ones, as an array; `wire` frames them by hand

_HEAD = '''\
"""The messages of {package} as plain dataclasses. Made from gradwire.proto by `make stubs`: do not edit.

gradwire.proto describes each field and value. Server and worker work with these classes and never see one of
protobuf's; `convert` maps between the two. All may be in stored files, under their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.naming import LabelledEnum
from ..common.stored import stored_all

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
'''

_INTEGERS = [f"{sort}{bits}" for sort in ("INT", "UINT", "SINT", "FIXED", "SFIXED") for bits in (32, 64)]
_SCALARS = {
    **{f"TYPE_{name}": ("int", "0") for name in _INTEGERS},
    "TYPE_FLOAT": ("float", "0.0"),
    "TYPE_DOUBLE": ("float", "0.0"),
    "TYPE_BOOL": ("bool", "False"),
    "TYPE_STRING": ("str", '""'),
    "TYPE_BYTES": ("bytes", 'b""'),
}


class Messages:
    """The text of messages.py for one .proto file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(place.path): " ".join((place.leading_comments + place.trailing_comments).split())
            for place in file.source_code_info.location
        }

    def text(self) -> str:
        """Return the text of messages.py."""
        parts = [_HEAD.format(package=self._file.package)]
        parts += ["\n".join(self._enum(i, enum)) for i, enum in enumerate(self._file.enum_type)]
        unions: list[str] = []
        for i, message in enumerate(self._file.message_type):
            if message.oneof_decl and message.oneof_decl[0].name == ENVELOPE:
                unions.append(self._union(message))
            else:
                parts.append("\n".join(self._message(i, message)))
        named = f"stored_all(globals(), {json.dumps(STORED)})\n"
        return "\n\n".join([*parts, "\n".join(unions), named])

    def _enum(self, place: int, enum: EnumDescriptorProto) -> Iterator[str]:
        """Yield the lines of an IntEnum."""
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
        yield f"class {enum.name}(LabelledEnum):"
        yield from self._docstring((5, place))
        for value in enum.value:
            yield f"    {value.name.removeprefix(prefix)} = {value.number}"
        yield ""

    def _message(self, place: int, message: DescriptorProto) -> Iterator[str]:
        """Yield the lines of a dataclass."""
        equality = ", eq=False" if message.name in VIEWS else ""
        yield f"@dataclass(frozen=True, kw_only=True, slots=True{equality})"
        yield f"class {message.name}:"
        body = [*self._docstring((4, place)), *self._fields(place, message)]
        yield from body or ["    pass"]
        yield ""

    def _fields(self, place: int, message: DescriptorProto) -> Iterator[str]:
        """Yield the declaration of each of a dataclass's fields."""
        oneofs: set[int] = set()
        for j, field in enumerate(message.field):
            if not field.HasField("oneof_index") or field.proto3_optional:
                required = not self._comments.get((4, place, 2, j), "").startswith(MAY_BE_LEFT_OUT)
                hint, default = self._type(message, field, required=required)
                yield f"    {field.name}: {hint}" + (f" = {default}" if default else "")
            elif field.oneof_index not in oneofs:  # at its first member
                oneofs.add(field.oneof_index)
                name = message.oneof_decl[field.oneof_index].name
                yield f"    {name}: {_members(message, field.oneof_index)} | None"

    def _type(
        self, message: DescriptorProto, field: FieldDescriptorProto, *, required: bool
    ) -> tuple[str, str]:
        """Return the annotation of a field, and its default value or an empty string."""
        kind = FieldDescriptorProto.Type.Name(field.type)
        hint, default = _SCALARS.get(kind, (field.type_name.rpartition(".")[2], ""))
        if kind == "TYPE_ENUM":
            default = f"{hint}.UNSPECIFIED"
        if message.name in VIEWS and kind == "TYPE_BYTES":
            hint = "npt.NDArray[np.uint8]"
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            entries = [each for each in message.nested_type if each.name == hint]
            if entries:
                key, value = (self._type(entries[0], each, required=True)[0] for each in entries[0].field)
                hint = f"Mapping[{key}, {value}]"
            else:
                hint, default = f"tuple[{hint}, ...]", "()"
        if field.proto3_optional:
            return f"{hint} | None", "None"
        return hint, "" if required else default

    def _union(self, message: DescriptorProto) -> str:
        """Return the definition of an envelope's union."""
        line = f"{message.name} = {_members(message, 0)}"
        if len(line) > WIDTH:
            line = line.replace(" = ", " = (\n    ") + "\n)"
        return line

    def _docstring(self, path: Sequence[int]) -> Iterator[str]:
        """Yield the lines of the docstring for the declaration at `path`."""
        if comment := self._comments.get(tuple(path), ""):
            lines = textwrap.wrap(f'"""{comment}', WIDTH - 7)
            yield from (f"    {line}" for line in lines[:-1])
            yield f'    {lines[-1]}"""' if len(lines) == 1 else f"    {lines[-1]}"
            yield from ['    """'] if len(lines) > 1 else []
            yield ""


def _members(message: DescriptorProto, oneof: int) -> str:
    """Return the union of a oneof's members."""
    inside = [each for each in message.field if each.HasField("oneof_index") and each.oneof_index == oneof]
    return " | ".join(each.type_name.rpartition(".")[2] for each in inside)


def generate(into: Path) -> None:
    """Write the generated files to the folder `into`/gradwire/proto."""
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "descriptors"
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / '.typing'}"),
                *(f"--python_out={into}", f"--pyi_out={into}"),
                *("--include_source_info", f"--descriptor_set_out={described}", SOURCE),
            ],
            check=True,
        )
        file = FileDescriptorSet.FromString(described.read_bytes()).file[0]
    # Offsets in the descriptor, which change with each field, and which nothing here reads.
    stubs = (into / SOURCE).with_name("gradwire_pb2.py")
    stubs.write_text(re.sub(r"  _globals\['\w+'\]\._serialized_(start|end)=\d+\n", "", stubs.read_text()))
    stubs.with_name("messages.py").write_text(Messages(file).text(), encoding="utf-8")


def drifted() -> list[str]:
    """Return the generated files whose committed text differs from the generator's present output."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        _, stale, missing = filecmp.cmpfiles(Path(folder) / "gradwire", ROOT, GENERATED, shallow=False)
        return stale + missing


def main() -> int:
    """Run the command, and return its exit code: 0, 1 if a checked file is out of date, 2 without the right
    tools.
    """
    parser = argparse.ArgumentParser(description="Generate or check what is made from gradwire.proto.")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only report generated files that are out of date; exit with 1 if any is",
    )
    arguments = parser.parse_args()
    installed = importlib.metadata.version("grpcio-tools")
    if installed != TOOLS_VERSION:
        print(
            f"grpcio-tools: expected release {TOOLS_VERSION}, got {installed}; run make stubs",
            file=sys.stderr,
        )
        return 2
    if not arguments.check:
        generate(ROOT / ".typing")
        return 0
    stale = drifted()
    for file in stale:
        print(f"{file} is out of date: run make stubs", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
