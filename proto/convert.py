"""Dataclass <-> protobuf message, by field name.

Every dataclass of `messages` has the fields of one protobuf message under the same names. Enums travel as
their numbers, tuples as repeated fields, `X | None` as presence, and a field named like a oneof holds
whichever of its members is set. The mapping is checked for every message when this module is imported, so a
field that was added on one side only is an ImportError and not a silent loss.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor, OneofDescriptor
from google.protobuf.message import DecodeError, Message

from . import gradwire_pb2 as pb
from . import messages as m
from .refusal import Refusal

T = TypeVar("T")

MAX_REPEATED = 1 << 14  # messages in one repeated field; more tensors than any model has


class MalformedError(ValueError):
    """Bytes that are not a message of this protocol."""


MESSAGES: dict[type[Any], type[Message]] = {
    Refusal: pb.Refusal,
    m.Job: pb.Job,
    m.Limits: pb.Limits,
    m.Tensor: pb.Tensor,
    m.ManifestMessage: pb.Manifest,
    m.JoinRequest: pb.JoinRequest,
    m.JoinReply: pb.JoinReply,
    m.InitializeHeader: pb.InitializeHeader,
    m.InitializeReply: pb.InitializeReply,
    m.FetchRequest: pb.FetchRequest,
    m.FetchHeader: pb.FetchHeader,
    m.DenseHeader: pb.DenseHeader,
    m.QuantizedHeader: pb.QuantizedHeader,
    m.LinearHeader: pb.LinearHeader,
    m.SparseHeader: pb.SparseHeader,
    m.TensorHeader: pb.TensorHeader,
    m.Hello: pb.Hello,
    m.Ready: pb.Ready,
    m.Push: pb.Push,
    m.Exchanged: pb.Exchanged,
    m.Packet: pb.Packet,
    m.Snapshot: pb.Snapshot,
    m.Heartbeat: pb.Heartbeat,
    m.Evaluation: pb.Evaluation,
    m.Leave: pb.Leave,
    m.Welcome: pb.Welcome,
    m.Update: pb.Update,
    m.Range: pb.Range,
    m.Assignment: pb.Assignment,
    m.Coding: pb.Coding,
    m.Outcome: pb.Outcome,
    m.Waiting: pb.Waiting,
    m.SnapshotRequest: pb.SnapshotRequest,
    m.InitializeRequest: pb.InitializeRequest,
    m.StatusRequest: pb.StatusRequest,
    m.MemberStatus: pb.MemberStatus,
    m.LostStatus: pb.LostStatus,
    m.EpochStatus: pb.EpochStatus,
    m.Traffic: pb.Traffic,
    m.StatusReply: pb.StatusReply,
}
_CLASS_OF: dict[str, type[Any]] = {message.DESCRIPTOR.full_name: cls for cls, message in MESSAGES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    write: Callable[[Any, Any], None]  # (message, value)
    read: Callable[[Any], Any]  # (message) -> value


def to_message(value: Any) -> Message:
    """The protobuf message that says the same as a dataclass of `messages`."""
    message = MESSAGES[type(value)]()
    for field in _PLANS[type(value)]:
        field.write(message, getattr(value, field.name))
    return message


def from_message(message: Message, cls: type[T]) -> T:
    """The dataclass that says the same as a protobuf message.

    Raises:
        MalformedError: an enum number that this version does not know.
    """
    return cls(**{field.name: field.read(message) for field in _PLANS[cls]})


def encode(value: Any) -> bytes:
    return to_message(value).SerializeToString()


def decode(data: bytes, cls: type[T]) -> T:
    """Raises MalformedError where `data` is not a `cls`."""
    message = MESSAGES[cls]()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedError(f"not a {message.DESCRIPTOR.name} message: {error}") from None
    return from_message(message, cls)


def member_of(message: Any, oneof: str) -> Any:
    """The dataclass for whichever member of the oneof is set.

    Raises:
        MalformedError: none is set, or only one that this version does not know.
    """
    name = message.WhichOneof(oneof)
    if name is None:
        raise MalformedError(f"{message.DESCRIPTOR.name} without a {oneof} that this version knows")
    member = getattr(message, name)
    return from_message(member, _CLASS_OF[member.DESCRIPTOR.full_name])


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType)


def _oneof_field(oneof: OneofDescriptor) -> _Field:
    name = oneof.name
    members: Any = oneof.fields
    by_type = {member.message_type.full_name: member.name for member in members}

    def write(message: Any, value: Any) -> None:
        if value is not None:
            member = to_message(value)
            getattr(message, by_type[member.DESCRIPTOR.full_name]).CopyFrom(member)

    def read(message: Any) -> Any:
        return None if message.WhichOneof(name) is None else member_of(message, name)

    return _Field(name, write, read)


def _message_field(name: str, cls: type[Any], optional: bool, repeated: bool) -> _Field:
    if repeated:
        return _Field(
            name,
            lambda message, value: getattr(message, name).extend([to_message(item) for item in value]),
            lambda message: tuple(from_message(item, cls) for item in _bounded(message, name)),
        )

    def write(message: Any, value: Any) -> None:
        if value is not None:
            getattr(message, name).CopyFrom(to_message(value))

    def read(message: Any) -> Any:
        if message.HasField(name):
            return from_message(getattr(message, name), cls)
        if optional:
            return None
        raise MalformedError(f"{message.DESCRIPTOR.name} without {name}")

    return _Field(name, write, read)


def _bounded(message: Any, name: str) -> Any:
    """A repeated field, refused before its members are turned into objects if there are too many."""
    members = getattr(message, name)
    if len(members) > MAX_REPEATED:
        kind = message.DESCRIPTOR.name
        raise MalformedError(f"{kind}.{name}: expected up to {MAX_REPEATED} members, got {len(members)}")
    return members


def _scalar_field(name: str, hint: Any) -> _Field:
    origin = typing.get_origin(hint)
    if origin is Mapping:
        return _Field(
            name,
            lambda message, value: getattr(message, name).update(value),
            lambda message: dict(getattr(message, name)),
        )
    if origin is tuple:
        return _Field(
            name,
            lambda message, value: getattr(message, name).extend(value),
            lambda message: tuple(getattr(message, name)),
        )
    if _is_union(hint):  # X | None: an optional scalar

        def write(message: Any, value: Any) -> None:
            if value is not None:
                setattr(message, name, value)

        return _Field(name, write, lambda message: getattr(message, name) if message.HasField(name) else None)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        enum = hint

        def read(message: Any) -> Any:
            number = getattr(message, name)
            try:
                return enum(number)
            except ValueError:
                raise MalformedError(
                    f"{message.DESCRIPTOR.name}.{name}: {number} is not a known {enum.__name__}"
                ) from None

        return _Field(name, lambda message, value: setattr(message, name, int(value)), read)
    return _Field(
        name, lambda message, value: setattr(message, name, value), lambda message: getattr(message, name)
    )


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _plan(cls: type[Any], descriptor: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    real_oneofs = {
        name: oneof
        for name, oneof in descriptor.oneofs_by_name.items()
        if not (len(oneof.fields) == 1 and name.startswith("_"))  # proto3 optional makes one of its own
    }
    in_oneof = {field.name for oneof in real_oneofs.values() for field in oneof.fields}
    on_wire = set(real_oneofs) | (set(descriptor.fields_by_name) - in_oneof)
    if on_wire != set(hints):
        raise ImportError(
            f"{cls.__name__} and {descriptor.full_name} differ in {sorted(on_wire ^ set(hints))}"
        )
    plan: list[_Field] = []
    for name, hint in hints.items():
        if name in real_oneofs:
            plan.append(_oneof_field(real_oneofs[name]))
            continue
        field = descriptor.fields_by_name[name]
        if field.message_type is not None and not _is_map(field):
            repeated = typing.get_origin(hint) is tuple
            inner = _CLASS_OF[field.message_type.full_name]
            plan.append(_message_field(name, inner, _is_union(hint), repeated))
        else:
            plan.append(_scalar_field(name, hint))
    return tuple(plan)


_PLANS: dict[type[Any], tuple[_Field, ...]] = {
    cls: _plan(cls, message.DESCRIPTOR) for cls, message in MESSAGES.items()
}
