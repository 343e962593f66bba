"""Generate the Python code from gradwire.proto, or check that the committed files still match it.

    python -m gradwire.proto.generate [--check]

protoc generates gradwire_pb2.py and its stub. This file generates messages.py from the same descriptors:

- a frozen dataclass for each message,
- an IntEnum for each enum,
- a union for each envelope, a message whose oneof is called `body`.

The head of the .proto says which fields may be left out.

Generated code must not be newer than the oldest protobuf runtime that pyproject.toml admits. So
`grpcio-tools` is pinned to `TOOLS_VERSION`, whose protoc generates code for 5.29. It needs the checkout, not
a wheel.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.metadata
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
ROOT = Path(__file__).resolve().parent.parent
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

Server and worker work with these and never see a protobuf class; `convert` maps between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.naming import LabelledEnum
from ..common.stored import stored

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
        return "\n\n".join([*parts, "\n".join(unions) + "\n"])

    def _enum(self, place: int, enum: EnumDescriptorProto) -> Iterator[str]:
        """Yield the lines of an IntEnum."""
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
        yield f'@stored("{enum.name}")'
        yield f"class {enum.name}(LabelledEnum):"
        values = (value.name.removeprefix(prefix) for value in enum.value)
        yield from self._docstring(
            (5, place), [(name, self._comments.get((5, place, 2, j), "")) for j, name in enumerate(values)]
        )
        for value in enum.value:
            yield f"    {value.name.removeprefix(prefix)} = {value.number}"
        yield ""

    def _message(self, place: int, message: DescriptorProto) -> Iterator[str]:
        """Yield the lines of a dataclass."""
        yield f'@stored("{STORED.get(message.name, message.name)}")'
        equality = ", eq=False" if message.name in VIEWS else ""
        yield f"@dataclass(frozen=True, kw_only=True, slots=True{equality})"
        yield f"class {message.name}:"
        fields = list(self._fields(place, message))
        body = [*self._docstring((4, place), [(name, comment) for name, _, comment in fields])]
        body += [line for _, line, _ in fields]
        yield from body or ["    pass"]
        yield ""

    def _fields(self, place: int, message: DescriptorProto) -> Iterator[tuple[str, str, str]]:
        """Yield name, declaration and comment of each of a dataclass's fields."""
        oneofs: set[int] = set()
        for j, field in enumerate(message.field):
            comment = self._comments.get((4, place, 2, j), "")
            if not field.HasField("oneof_index") or field.proto3_optional:
                required = comment.removeprefix(MAY_BE_LEFT_OUT) == comment
                hint, default = self._type(message, field, required=required)
                given = f" = {default}" if default else ""
                line = f"    {field.name}: {hint}{given}"
                yield field.name, line, comment.removeprefix(MAY_BE_LEFT_OUT).strip()
            elif field.oneof_index not in oneofs:  # at its first member
                oneofs.add(field.oneof_index)
                comment = self._comments.get((4, place, 8, field.oneof_index), "")
                name = message.oneof_decl[field.oneof_index].name
                line = f"    {name}: {_members(message, field.oneof_index)} | None"
                yield name, line, comment

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

    def _docstring(self, path: Sequence[int], attributes: Sequence[tuple[str, str]]) -> Iterator[str]:
        """Yield the lines of the docstring for the declaration at `path`, with its fields or values."""
        comment = self._comments.get(tuple(path), "")
        described = [(name, text) for name, text in attributes if text]
        if comment:
            *lines, last = textwrap.wrap(f'"""{comment}', WIDTH - 7)
            yield from (f"    {line}" for line in lines)
            if described:
                yield from (f"    {last}", "", "    Attributes:")
                for name, text in described:
                    entry = text if text[1:2].isupper() else text[0].lower() + text[1:]  # not "CRC-32C"
                    yield from textwrap.wrap(
                        f"{name}: {entry.removesuffix('.')}.",
                        WIDTH,
                        initial_indent=" " * 8,
                        subsequent_indent=" " * 12,
                    )
                yield '    """'
            else:
                yield from (f"    {last}", '    """') if lines else (f'    {last}"""',)
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
    (into / SOURCE).with_name("messages.py").write_text(Messages(file).text(), encoding="utf-8")


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
