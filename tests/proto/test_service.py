"""The methods on a channel: both sides name the version of the protocol where the other speaks another."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from gradwire.proto import messages as m
from gradwire.proto.convert import encode
from gradwire.proto.refusal import Reason, Refusal
from gradwire.proto.service import Malformed, Stub, generic_handler, refusal_of
from gradwire.proto.wire import trailer

METHODS = ("Join", "Initialize", "Fetch", "Exchange", "Status", "PutState", "GetState", "GetOptimizer")


def ignore(_: int) -> None:
    pass


async def unused(*_: Any) -> None:
    raise AssertionError("no call of another version reaches a handler")


def refused(call: Callable[[grpc.aio.Channel], Awaitable[Any]], *handlers: Any) -> Refusal:
    """Return the refusal of a call by a server with these handlers."""

    async def run() -> Refusal:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel)
        finally:
            await server.stop(None)
        found = refusal_of(caught.value)
        assert found is not None
        return found.refusal

    return asyncio.run(run())


@pytest.mark.parametrize("package", ["gradwire.v3", "gradwire.v5"])
def test_a_worker_of_another_version_is_refused_naming_both(package: str) -> None:
    def join(channel: grpc.aio.Channel) -> Awaitable[Any]:
        untyped: Any = channel
        call: Awaitable[Any] = untyped.unary_unary(f"/{package}.ParameterServer/Join")(b"\x08\x01")
        return call

    handler = generic_handler(dict.fromkeys(METHODS, unused), sent=ignore, received=ignore)
    refusal = refused(join, handler)
    assert refusal.reason is Reason.PROTOCOL_VERSION
    assert "expected gradwire.v4 (gradwire " in refusal.message
    assert f"got {package}" in refusal.message
    assert "install the same release" in refusal.remedy


def test_a_server_of_another_version_is_named_too() -> None:
    def join(channel: grpc.aio.Channel) -> Awaitable[Any]:
        request = m.JoinRequest(worker="w", incarnation=1)
        call: Awaitable[Any] = Stub(channel, sent=ignore, received=ignore).join(request)
        return call

    refusal = refused(join)
    assert refusal.reason is Reason.PROTOCOL_VERSION
    assert "expected gradwire.v4" in refusal.message


REQUEST = m.JoinRequest(worker="w", incarnation=1, compressor="4bit")
RESPONSE = m.JoinResponse(
    job=m.JobDescription(id="j", settings={"learning_rate": "0.1"}),
    limits=m.Limits(chunk_bytes=1, lease_seconds=10, heartbeat_seconds=2),
    rank=0,
    version=0,
    initialize=True,
)


def damaged(message: Any) -> list[bytes]:
    """It with one bit changed, at each place; and without its end."""
    data = encode(message)
    data += trailer(data)
    changed = [bytearray(data) for _ in data]
    for place, each in enumerate(changed):
        each[place] ^= 1 << place % 8
    return [*map(bytes, changed), data[:-1], data[:-5], b""]


async def test_no_changed_byte_of_a_join_goes_unnoticed() -> None:
    """With another worker id it would be as good as before."""
    heard: list[Any] = []

    async def join(request: Any, context: Any) -> Any:
        heard.append(request)
        return RESPONSE

    server = grpc.aio.server()
    handlers: dict[str, Any] = {**dict.fromkeys(METHODS, unused), "Join": join}
    server.add_generic_rpc_handlers([generic_handler(handlers, sent=ignore, received=ignore)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await Stub(channel, sent=ignore, received=ignore).join(REQUEST) == RESPONSE
        untyped: Any = channel
        bare = untyped.unary_unary("/gradwire.v4.ParameterServer/Join")
        for data in damaged(REQUEST):
            await bare(data)
    await server.stop(None)
    assert heard[0] == REQUEST
    assert all(isinstance(each, Malformed) and each.damaged for each in heard[1:])


async def test_status_is_not_counted_as_bytes_of_the_job() -> None:
    sizes: list[int] = []

    async def status(request: Any, context: Any) -> Any:
        return b""

    async def join(request: Any, context: Any) -> Any:
        return RESPONSE

    server = grpc.aio.server()
    handlers: dict[str, Any] = {**dict.fromkeys(METHODS, unused), "Join": join, "Status": status}
    server.add_generic_rpc_handlers([generic_handler(handlers, sent=sizes.append, received=sizes.append)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = Stub(channel, sent=ignore, received=ignore)
        await stub.status(m.StatusRequest())
        assert not sizes
        await stub.join(REQUEST)
        assert len(sizes) == 2
    await server.stop(None)


def test_no_changed_byte_of_the_answer_to_a_join_goes_unnoticed() -> None:
    """With another learning rate it would be as good as before."""

    async def run() -> list[Any]:
        answers = iter(damaged(RESPONSE))

        async def answer(_: bytes, context: Any) -> bytes:
            return next(answers)

        untyped: Any = grpc
        method = untyped.unary_unary_rpc_method_handler(answer)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            [untyped.method_handlers_generic_handler("gradwire.v4.ParameterServer", {"Join": method})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = Stub(channel, sent=ignore, received=ignore)
            found = [await stub.join(REQUEST) for _ in damaged(RESPONSE)]
        await server.stop(None)
        return found

    assert all(isinstance(each, Malformed) and each.damaged for each in asyncio.run(run()))
