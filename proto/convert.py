"""Conversion between dataclasses and protobuf messages, by field name.

Every dataclass of `messages` corresponds to the protobuf message of its name. Enums are encoded as their
numbers, tuples as repeated fields, and `X | None` as presence. A field with the name of a oneof holds the
member that is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import IntEnum
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from . import gradwire_pb2 as pb
from . import messages as m

T = TypeVar("T")
Read = Callable[[Any], Any]  # returns a field's value from its protobuf message

MAX_REPEATED = 1 << 16  # limit for the messages in one repeated field; no model has as many tensors


class MalformedError(ValueError):
    """Bytes that are not a message of this protocol."""


def encode(value: Any) -> bytes:
    """Return the encoded bytes of a dataclass of `messages`."""
    return to_message(value).SerializeToString()


def decode(data: bytes, cls: type[T]) -> T:
    """Decode bytes as the message `cls`, and return the dataclass.

    Raises:
        MalformedError: the bytes are no such message.
    """
    return from_message(parse(data, cls.__name__), cls)


def parse(data: bytes, name: str) -> Message:
    """Return the protobuf message that the bytes encode.

    Args:
        name: name of the message.

    Raises:
        MalformedError: the bytes are no such message.
    """
    message: Message = getattr(pb, name)()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedError(f"not a {name} message: {error}") from None
    return message


def to_message(value: Any) -> Message:
    """Return the protobuf message with the same contents as a dataclass of `messages`."""
    fields: dict[str, Any] = {}
    make, plan = _WRITE[type(value)]
    for name, members in plan:
        content: Any = getattr(value, name)
        if members is None:
            fields[name] = content
        elif isinstance(content, tuple):
            fields[name] = [to_message(item) for item in content]  # pyright: ignore[reportUnknownVariableType]
        elif content is not None:
            fields[members.get(type(content).__name__, name)] = to_message(content)
    return make(**fields)


def from_message(message: Message, cls: type[T]) -> T:
    """Return the dataclass with the same contents as a protobuf message.

    Raises:
        MalformedError: a required message is missing, a repeated field has too many, or this version does not
            know the number of an enum.
    """
    return cls(**{name: read(message) for name, read in _READ[cls]})


def member_of(message: Any, oneof: str) -> Any:
    """Return the dataclass for the member of a oneof that is set; None if no member known to this
    version is.
    """
    name = message.WhichOneof(oneof)
    if name is None:
        return None
    member = getattr(message, name)
    return from_message(member, getattr(m, member.DESCRIPTOR.name))


def _members(descriptor: Descriptor, name: str) -> dict[str, str] | None:
    """Return the oneof's member fields by message name; an empty dictionary for a field of messages, None for
    others.
    """
    if name in descriptor.oneofs_by_name:
        members = descriptor.oneofs_by_name[name].fields
        return {member.message_type.name: member.name for member in members if member.message_type}
    return {} if _holds_messages(descriptor.fields_by_name[name]) else None


def _reader(descriptor: Descriptor, name: str) -> Read:
    """Return the function that reads a field of a dataclass from the protobuf message."""
    if name in descriptor.oneofs_by_name:
        return lambda message: member_of(message, name)
    if (descriptor.name, name) == ("Chunk", "data"):  # a view, so that the bytes are not copied
        return lambda message: np.frombuffer(message.data, np.uint8)
    field, get = descriptor.fields_by_name[name], attrgetter(name)
    where = f"{descriptor.name}.{name}"
    if _holds_messages(field):
        assert field.message_type is not None
        return _message_reader(where, field, getattr(m, field.message_type.name))
    if field.message_type is not None:
        return lambda message: dict(get(message))
    if field.default_value == []:
        return lambda message: tuple(get(message))
    if field.enum_type is not None:
        return _enum_reader(where, name, getattr(m, field.enum_type.name))
    if field.has_presence:
        return lambda message: get(message) if message.HasField(name) else None
    return get


def _message_reader(where: str, field: FieldDescriptor, cls: type[Any]) -> Read:
    """Return the function that reads a field whose values are messages."""
    name = field.name

    def repeated(message: Any) -> tuple[Any, ...]:
        members = getattr(message, name)
        if len(members) > MAX_REPEATED:  # checked before objects are created
            raise MalformedError(f"{where}: expected at most {MAX_REPEATED} entries, got {len(members)}")
        return tuple(from_message(item, cls) for item in members)

    def single(message: Any) -> Any:
        if message.HasField(name):
            return from_message(getattr(message, name), cls)
        if field.containing_oneof is None:  # protobuf gives one to each `optional` field
            raise MalformedError(f"{message.DESCRIPTOR.name} without {name}")
        return None

    return single if field.has_presence else repeated


def _enum_reader(where: str, name: str, enum: type[IntEnum]) -> Read:
    """Return the function that reads a field whose values are enums."""

    def read(message: Any) -> IntEnum:
        number = getattr(message, name)
        try:
            return enum(number)
        except ValueError:
            raise MalformedError(f"{where}: {number} is not a known {enum.__name__}") from None

    return read


def _holds_messages(field: FieldDescriptor) -> bool:
    """Return True if the field's values are messages; a map's entries do not count."""
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


_DESCRIPTORS: dict[type[Any], Descriptor] = {
    cls: descriptor
    for name, descriptor in pb.DESCRIPTOR.message_types_by_name.items()
    if dataclasses.is_dataclass(cls := getattr(m, name)) and isinstance(cls, type)
}
# For each dataclass, its protobuf class and the members of every field, as `_members` returns them.
_WRITE: dict[type[Any], tuple[Callable[..., Message], tuple[tuple[str, dict[str, str] | None], ...]]] = {
    cls: (
        getattr(pb, cls.__name__),
        tuple((field.name, _members(descriptor, field.name)) for field in dataclasses.fields(cls)),
    )
    for cls, descriptor in _DESCRIPTORS.items()
}
_READ: dict[type[Any], tuple[tuple[str, Read], ...]] = {
    cls: tuple((field.name, _reader(descriptor, field.name)) for field in dataclasses.fields(cls))
    for cls, descriptor in _DESCRIPTORS.items()
}
