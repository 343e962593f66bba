"""The methods of gradwire.v1.ParameterServer for both ends, with messages as dataclasses.

Serialisation lives here and nowhere else: handlers and stubs take and give the dataclasses of `messages`.
A message that was encoded before (a broadcast) may be passed as bytes. What arrives and is no message of
the protocol comes out as `Malformed`, so that the receiver can answer with a typed refusal. Every message
is reported to a `Meter` with its size on the wire.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from . import gradwire_pb2 as pb
from . import messages as m
from . import wire
from .convert import MalformedError, decode, encode, from_message, to_message
from .refusal import Reason, Refusal, Refused, sentence, status_code

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
REFUSAL_KEY = "gradwire-refusal-bin"
FRAME_BYTES = 16384  # HTTP/2's default, which gRPC keeps for DATA frames

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


@dataclass(frozen=True, slots=True)
class _Codec:
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _plain(cls: type[Any]) -> _Codec:
    return _Codec(encode, lambda data: decode(data, cls))


_CODECS: dict[str, _Codec] = {
    "JoinRequest": _plain(m.JoinRequest),
    "JoinReply": _plain(m.JoinReply),
    "InitializeMessage": _Codec(wire.encode_initialize, wire.decode_initialize),
    "InitializeReply": _plain(m.InitializeReply),
    "FetchRequest": _plain(m.FetchRequest),
    "FetchMessage": _Codec(wire.encode_fetch, wire.decode_fetch),
    "WorkerMessage": _Codec(wire.encode_worker, wire.decode_worker),
    "ServerMessage": _Codec(wire.encode_server, wire.decode_server),
    "StatusRequest": _plain(m.StatusRequest),
    "StatusReply": _plain(m.StatusReply),
}


def _serializer(codec: _Codec, sent: Meter) -> Callable[[Any], bytes]:
    def serialize(value: Any) -> bytes:
        data = value if isinstance(value, bytes) else codec.encode(value)
        sent(wire_bytes(len(data)))
        return data

    return serialize


def _deserializer(codec: _Codec, received: Meter) -> Callable[[bytes], Any]:
    def deserialize(data: bytes) -> Any:
        received(wire_bytes(len(data)))
        try:
            return codec.decode(data)
        except MalformedError as error:
            return Malformed(str(error), damaged=isinstance(error, wire.DamagedError))

    return deserialize


def _shape(method: Any) -> str:
    """What gRPC calls a method with these directions: unary_stream and so on."""
    sides = (method.client_streaming, method.server_streaming)
    return "_".join("stream" if streaming else "unary" for streaming in sides)


def generic_handler(
    handlers: dict[str, Callable[..., Awaitable[Any]]], *, sent: Meter, received: Meter
) -> Any:
    """gRPC handler for the five methods. Streams are read and written through the context."""
    methods: dict[str, Any] = {}
    for method in SERVICE.methods:
        make = getattr(grpc, f"{_shape(method)}_rpc_method_handler")
        methods[method.name] = make(
            handlers[method.name],
            request_deserializer=_deserializer(_CODECS[method.input_type.name], received),
            response_serializer=_serializer(_CODECS[method.output_type.name], sent),
        )
    untyped: Any = grpc
    return untyped.method_handlers_generic_handler(SERVICE.full_name, methods)


class Stub:
    """Client side of the five methods on a grpc.aio channel, one attribute each."""

    def __init__(self, channel: grpc.aio.Channel, *, sent: Meter, received: Meter) -> None:
        def callable_of(name: str) -> Any:
            method = SERVICE.methods_by_name[name]
            make = getattr(channel, _shape(method))
            return make(
                f"/{SERVICE.full_name}/{name}",
                request_serializer=_serializer(_CODECS[method.input_type.name], sent),
                response_deserializer=_deserializer(_CODECS[method.output_type.name], received),
            )

        self.join = callable_of("Join")
        self.initialize = callable_of("Initialize")
        self.fetch = callable_of("Fetch")
        self.exchange = callable_of("Exchange")
        self.status = callable_of("Status")


async def abort(context: grpc.aio.ServicerContext[Any, Any], refused: Refusal) -> None:
    """End the call with the refusal: as the status text, and whole in the trailing metadata."""
    metadata = ((REFUSAL_KEY, to_message(refused).SerializeToString()),)
    await context.abort(status_code(refused.reason), sentence(refused), metadata)


def refusal_of(error: grpc.aio.AioRpcError) -> Refused | None:
    """The refusal that a server ended a call with, if that is what happened."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == REFUSAL_KEY and isinstance(value, bytes):
            message = pb.Refusal()
            message.ParseFromString(value)
            if int(message.reason) not in {
                int(reason) for reason in Reason
            }:  # a newer server's: keep the words
                message.reason = pb.REASON_UNSPECIFIED
            return Refused(from_message(message, Refusal))
    return None
