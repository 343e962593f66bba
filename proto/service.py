"""The methods of gradwire.v4.ParameterServer for both ends, with messages as dataclasses.

Only this file serializes messages of calls: handlers and stubs take and return the dataclasses of `messages`.
A message that was encoded before, such as a broadcast, may be passed as bytes. Bytes that are no message of
the protocol arrive as `Malformed`, so that the receiver can answer with a typed refusal. A `Meter` is called
with the size of every message on the wire.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import Descriptor

from ..common.rate import Rate
from ..common.version import __version__
from . import gradwire_pb2 as pb
from . import messages as m
from . import wire
from .convert import MalformedError, decode, encode
from .findings import Finding, proxy_finding
from .refusal import Reason, Refusal, Refused, refusal, sentence

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
REFUSAL_KEY = "gradwire-refusal-bin"
DETAILS_KEY = "grpc-status-details-bin"  # where gRPC's own tools look for a google.rpc.Status
FRAME_BYTES = 16384  # HTTP/2's default, which gRPC keeps for DATA frames

# The gRPC status with which a call is aborted. Never UNAVAILABLE: clients would retry the refused call.
INVALID = grpc.StatusCode.INVALID_ARGUMENT
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
STATUS = {
    Reason.UNKNOWN_JOB: grpc.StatusCode.NOT_FOUND,
    Reason.JOB_FINISHED: _PRECONDITION,
    Reason.PROTOCOL_VERSION: _PRECONDITION,
    Reason.MODEL: _PRECONDITION,
    Reason.FENCED: grpc.StatusCode.ABORTED,
    Reason.DUPLICATE_WORKER: grpc.StatusCode.ALREADY_EXISTS,
    Reason.NOT_A_MEMBER: _PRECONDITION,
    Reason.NOT_INITIALIZED: _PRECONDITION,
    Reason.ALREADY_INITIALIZED: _PRECONDITION,
    Reason.CHECKSUM: grpc.StatusCode.DATA_LOSS,
    Reason.TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    Reason.SIZE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STALE: grpc.StatusCode.ABORTED,
    Reason.PROTECTED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.STOPPING: _PRECONDITION,
}

# Messages outside of streams that end with a checksum, as envelopes do: a changed byte could change a worker
# id or a setting. Calls that only read the state of a job have none, so that any protobuf tool can make them.
CHECKED = ("JoinRequest", "JoinResponse", "InitializeResponse", "GetStateRequest", "GetOptimizerRequest")

LINES_PER_S, LINES_AT_ONCE = 2.0, 50

log = logging.getLogger("gradwire.server")

Meter = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Received bytes that are no message of this protocol.

    Attributes:
        text: description of the fault.
        damaged: True if a checksum shows that the bytes changed in transit.
    """

    text: str
    damaged: bool = False


def wire_bytes(message_bytes: int) -> int:
    """Return the bytes that a message takes in the HTTP/2 stream, gRPC's prefix and DATA frame headers
    included.

    TCP and IP headers are not counted, because they depend on the path.

    Args:
        message_bytes: bytes of the encoded message.
    """
    framed = message_bytes + 5
    return framed + 9 * -(-framed // FRAME_BYTES)


async def unbatched(stream: AsyncIterator[Any], envelope: str) -> AsyncIterator[Any]:
    """Yield the messages of an Exchange stream one by one, with each batch unpacked.

    A batch inside a batch is not unpacked; no Gradwire process sends one.

    Args:
        envelope: WorkerMessage or ServerMessage.
    """
    async for message in stream:
        if isinstance(message, m.Batch):
            for each in message.messages:
                yield _read(each, envelope)
        else:
            yield message


def _read(data: bytes, envelope: str) -> Any:
    """Decode an envelope, and return its body; Malformed if that fails."""
    try:
        return wire.decode_envelope(data, envelope)
    except MalformedError as error:
        return Malformed(str(error), damaged=isinstance(error, wire.DamagedMessageError))


def _serializer(message: Descriptor, sent: Meter) -> Callable[[Any], bytes]:
    """Return the function that encodes a message for gRPC, and reports its size to `sent`."""

    def serialize(value: Any) -> bytes:
        if isinstance(value, bytes):
            data = value
        else:
            data = wire.encode_envelope(value, message.name) if _is_envelope(message) else encode(value)
            data += wire.trailer(data) if message.name in CHECKED else b""
        sent(wire_bytes(len(data)))
        return data

    return serialize


def _deserializer(message: Descriptor, received: Meter) -> Callable[[bytes], Any]:
    """Return the function that decodes a message from gRPC, and reports its size to `received`."""

    def deserialize(data: bytes) -> Any:
        received(wire_bytes(len(data)))
        if _is_envelope(message):
            return _read(data, message.name)
        try:
            if message.name in CHECKED:
                data = wire.without_trailer(data, message.name)
            return decode(data, getattr(m, message.name))
        except MalformedError as error:
            return Malformed(str(error), damaged=isinstance(error, wire.DamagedMessageError))

    return deserialize


def _is_envelope(message: Descriptor) -> bool:
    """Return True if the message is an envelope: its oneof is called `body`."""
    return "body" in message.oneofs_by_name


def ignore(size: int) -> None:
    """Count nothing: the meter of calls that no metric counts."""


def _path(method: Any) -> str:
    return f"/{SERVICE.full_name}/{method.name}"


def _shape(method: Any) -> str:
    """Return gRPC's name for the directions of a method, such as unary_stream."""
    sides = (method.client_streaming, method.server_streaming)
    return "_".join("stream" if streaming else "unary" for streaming in sides)


def generic_handler(
    handlers: dict[str, Callable[..., Awaitable[Any]]],
    *,
    sent: Meter,
    received: Meter,
    admit: Callable[[Mapping[str, Any]], Refusal | None] = lambda _: None,
) -> Any:
    """Return a gRPC handler for all methods; it refuses calls of any other protocol version by name.

    Handlers of streams read and write them through gRPC's context.

    Args:
        handlers: coroutine functions by method name, such as "Join".
        sent, received: called with the wire size of each message, in bytes, except those of Status: these go
            to people and monitors, not to workers.
        admit: called with a call's metadata before the call is read; returns a refusal, or None to admit the
            call.
    """
    methods: dict[str, Any] = {}
    for method in SERVICE.methods:
        make = getattr(grpc, f"{_shape(method)}_rpc_method_handler")
        counts = method.name != "Status"
        methods[_path(method)] = make(
            handlers[method.name],
            request_deserializer=_deserializer(method.input_type, received if counts else ignore),
            response_serializer=_serializer(method.output_type, sent if counts else ignore),
        )
    return _Methods(methods, admit)


class RefusalLog:
    """Log of refused calls, limited to two lines per second after the first 50, so that refusals cannot fill
    a disk.
    """

    def __init__(self) -> None:
        self._rate = Rate(LINES_PER_S, LINES_AT_ONCE)

    def warn(self, peer: str, refusal: Refusal) -> None:
        """Log the refusal of a call from `peer`, with the number of refusals omitted before, unless the limit
        is reached.
        """
        if self._rate.take(time.monotonic()):
            more = self._rate.put_off()
            omitted = f" (and {more} more refusals, not logged)" if more else ""
            name = f"worker {refusal.worker!r}" if refusal.worker else ""
            who = f"{peer}, {name}" if name and name not in refusal.message else peer
            log.warning("refused %s: %s%s", who or "a peer that is gone", sentence(refusal), omitted)


class _Methods:
    """A grpc.GenericRpcHandler; not a subclass, because that class is generic in one set of gRPC's stubs
    only.
    """

    def __init__(self, methods: dict[str, Any], admit: Callable[[Mapping[str, Any]], Refusal | None]) -> None:
        self._methods, self._admit = methods, admit
        self._refused = RefusalLog()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Called by gRPC for each call: return its method's handler, a handler that refuses it, or None if it
        is unknown.
        """
        path = handler_call_details.method
        package, _, service = path.removeprefix("/").partition(f".{SERVICE.name}/")
        if not service:
            return None
        metadata: Any = handler_call_details.invocation_metadata or ()
        why = self._admit(dict(metadata)) or (
            None if package == pb.DESCRIPTOR.package else _another_version(package)
        )
        if why is None:
            return self._methods.get(path)
        refused = why

        async def refuse(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            self._refused.warn(context.peer(), refused)
            await abort(context, refused)
            raise AssertionError("an aborted call continues")

        untyped: Any = grpc
        return untyped.unary_unary_rpc_method_handler(refuse)


def _another_version(got: str) -> Refusal:
    """Return the refusal of a call of the protocol version `got`."""
    remedy = "install the same release of gradwire on both sides"
    limit = f"{pb.DESCRIPTOR.package} (gradwire {__version__})"
    return refusal(Reason.PROTOCOL_VERSION, field="protocol", limit=limit, value=got, remedy=remedy)


class Stub:
    """The client side of the methods on a gRPC channel, with one attribute for each method."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        sent: Meter,
        received: Meter,
        metadata: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        """Args:
        sent, received: called with the wire size of each message, in bytes.
        metadata: returns the metadata of a call; called before each call.
        """

        def callable_of(name: str) -> Any:
            method = SERVICE.methods_by_name[name]
            make = getattr(channel, _shape(method))
            call = make(
                _path(method),
                request_serializer=_serializer(method.input_type, sent),
                response_deserializer=_deserializer(method.output_type, received),
            )

            def calling(*given: Any, **options: Any) -> Any:
                return call(*given, metadata=tuple(metadata()) or None, **options)

            return calling

        self.join = callable_of("Join")
        self.initialize = callable_of("Initialize")
        self.fetch = callable_of("Fetch")
        self.exchange = callable_of("Exchange")
        self.status = callable_of("Status")
        self.put_state = callable_of("PutState")
        self.get_state = callable_of("GetState")
        self.get_optimizer = callable_of("GetOptimizer")


async def abort(context: grpc.aio.ServicerContext[Any, Any], refused: Refusal) -> None:
    """End a call with a refusal: its sentence as the status text, and the whole refusal in the trailing
    metadata.

    The metadata hold it twice: alone, for Gradwire's workers, and in a google.rpc.Status, for all other
    tools.
    """
    code, text, message = STATUS.get(refused.reason, INVALID), sentence(refused), encode(refused)
    metadata = ((REFUSAL_KEY, message), (DETAILS_KEY, _status(int(code.value[0]), text, message)))
    await context.abort(code, text, metadata)


def _status(code: int, text: str, refused: bytes) -> bytes:
    """Return an encoded google.rpc.Status: int32 code = 1, string message = 2, repeated Any details = 3."""
    detail = AnyMessage(type_url=f"type.googleapis.com/{pb.Refusal.DESCRIPTOR.full_name}", value=refused)
    fields = ((0x12, text.encode()), (0x1A, detail.SerializeToString()))
    return bytes((0x08, code)) + b"".join(
        bytes((tag,)) + wire.varint(len(value)) + value for tag, value in fields
    )


def proxy_of(error: grpc.aio.AioRpcError) -> Finding | None:
    """Return the finding about a proxy that answered a call in place of the server; None without one."""
    found = re.search(r"http2 header with status: (\d+)", error.details() or "")
    return proxy_finding(int(found.group(1))) if found else None


def refusal_of(error: grpc.aio.AioRpcError) -> Refused | None:
    """Return the refusal with which a server ended a call; None if the call failed for another reason.

    A server without the method speaks another version of the protocol, and that is the refusal then.
    """
    if error.code() is grpc.StatusCode.UNIMPLEMENTED and proxy_of(error) is None:
        return Refused(_another_version("a server that does not speak it"))
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == REFUSAL_KEY and isinstance(value, bytes):
            try:
                return Refused(decode(value, Refusal))
            except MalformedError:  # a reason that only a newer release knows: keep the text
                return Refused(Refusal(reason=Reason.UNSPECIFIED, message=error.details() or ""))
    return None
