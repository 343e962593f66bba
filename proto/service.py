"""The methods of gradwire.v4.ParameterServer for both ends, with messages as dataclasses.

Serialisation lives here and nowhere else: handlers and stubs take and give the dataclasses of `messages`.
A message that was encoded before (a broadcast) may be passed as bytes. What arrives and is no message of
the protocol comes out as `Malformed`, so that the receiver can answer with a typed refusal. Every message
is reported to a `Meter` with its size on the wire.
"""

from __future__ import annotations

import logging
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
from .refusal import Reason, Refusal, Refused, refusal, sentence

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
REFUSAL_KEY = "gradwire-refusal-bin"
DETAILS_KEY = "grpc-status-details-bin"  # where gRPC's own tools look for a google.rpc.Status
FRAME_BYTES = 16384  # HTTP/2's default, which gRPC keeps for DATA frames

# The gRPC status under which a call is aborted. Never UNAVAILABLE: a refusal is not worth a retry.
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

# Messages outside of streams that end with a checksum as envelopes do: a changed byte may make another worker
# id or setting of them. What only looks at a job is left to any tool that speaks protobuf.
CHECKED = ("JoinRequest", "JoinResponse", "InitializeResponse", "GetStateRequest", "GetOptimizerRequest")

LINES_PER_S, LINES_AT_ONCE = 2.0, 50

log = logging.getLogger("gradwire.server")

Meter = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are no message of this protocol. damaged: they were one when they were sent."""

    text: str
    damaged: bool = False


def wire_bytes(message_bytes: int) -> int:
    """Bytes that a message takes in the HTTP/2 stream: gRPC's prefix and a header per DATA frame.

    TCP and IP headers come on top and depend on the path.
    """
    framed = message_bytes + 5
    return framed + 9 * -(-framed // FRAME_BYTES)


async def unbatched(stream: AsyncIterator[Any], envelope: str) -> AsyncIterator[Any]:
    """The messages of an Exchange stream one by one; what is left is a batch in a batch, which nobody sends.

    envelope: WorkerMessage or ServerMessage.
    """
    async for message in stream:
        if isinstance(message, m.Batch):
            for each in message.messages:
                yield _read(each, envelope)
        else:
            yield message


def _read(data: bytes, envelope: str) -> Any:
    """A body, or Malformed."""
    try:
        return wire.decode_envelope(data, envelope)
    except MalformedError as error:
        return Malformed(str(error), damaged=isinstance(error, wire.DamagedMessageError))


def _serializer(message: Descriptor, sent: Meter) -> Callable[[Any], bytes]:
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
    return "body" in message.oneofs_by_name


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
    """gRPC handler for all methods. Streams are read and written through the context.

    It refuses calls of any other version of the protocol by name.

    admit: is given the metadata of a call before anything of it is read, and says why it is refused.
    """
    methods: dict[str, Any] = {}
    for method in SERVICE.methods:
        make = getattr(grpc, f"{_shape(method)}_rpc_method_handler")
        methods[_path(method)] = make(
            handlers[method.name],
            request_deserializer=_deserializer(method.input_type, received),
            response_serializer=_serializer(method.output_type, sent),
        )
    return _Methods(methods, admit)


class RefusalLog:
    """Says which calls were refused: a few a second, so that nobody fills a disk with what is refused."""

    def __init__(self) -> None:
        self._rate = Rate(LINES_PER_S, LINES_AT_ONCE)

    def warn(self, peer: str, refusal: Refusal) -> None:
        if self._rate.take(time.monotonic()):
            more = self._rate.put_off()
            log.warning("refused %s: %s%s", peer, sentence(refusal), f" (and {more} others)" if more else "")


class _Methods:
    """A grpc.GenericRpcHandler, which is generic in one set of stubs and not in another."""

    def __init__(self, methods: dict[str, Any], admit: Callable[[Mapping[str, Any]], Refusal | None]) -> None:
        self._methods, self._admit = methods, admit
        self._refused = RefusalLog()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
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
            raise AssertionError("an aborted call goes on")

        untyped: Any = grpc
        return untyped.unary_unary_rpc_method_handler(refuse)


def _another_version(got: str) -> Refusal:
    remedy = "install the same release of gradwire on both sides"
    limit = f"{pb.DESCRIPTOR.package} (gradwire {__version__})"
    return refusal(Reason.PROTOCOL_VERSION, field="protocol", limit=limit, value=got, remedy=remedy)


class Stub:
    """Client side of the methods on a grpc.aio channel, one attribute each."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        sent: Meter,
        received: Meter,
        metadata: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        """metadata: that goes with each call."""

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
    """End the call with the refusal: as the status text, and whole in the trailing metadata, twice.

    Once bare, for our workers; and in a google.rpc.Status, for every other tool.
    """
    code, text, message = STATUS.get(refused.reason, INVALID), sentence(refused), encode(refused)
    metadata = ((REFUSAL_KEY, message), (DETAILS_KEY, _status(int(code.value[0]), text, message)))
    await context.abort(code, text, metadata)


def _status(code: int, text: str, refused: bytes) -> bytes:
    """A google.rpc.Status, by hand: int32 code = 1, string message = 2, repeated Any details = 3."""
    detail = AnyMessage(type_url=f"type.googleapis.com/{pb.Refusal.DESCRIPTOR.full_name}", value=refused)
    fields = ((0x12, text.encode()), (0x1A, detail.SerializeToString()))
    return bytes((0x08, code)) + b"".join(
        bytes((tag,)) + wire.varint(len(value)) + value for tag, value in fields
    )


def refusal_of(error: grpc.aio.AioRpcError) -> Refused | None:
    """The refusal that a server ended a call with, if that is what happened.

    A server that does not have the method speaks another version of the protocol.
    """
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Refused(_another_version("a server that does not speak it"))
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == REFUSAL_KEY and isinstance(value, bytes):
            try:
                return Refused(decode(value, Refusal))
            except MalformedError:  # a newer server's reason: keep the words
                return Refused(Refusal(reason=Reason.UNSPECIFIED, message=error.details() or ""))
    return None
