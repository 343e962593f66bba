"""The methods on a channel: both sides name the version of the protocol where the other speaks another."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal
from gradwire.proto.service import Stub, generic_handler, refusal_of

METHODS = ("Join", "Initialize", "Fetch", "Exchange", "Status", "PutState", "GetState")


def ignore(_: int) -> None:
    pass


async def unused(*_: Any) -> None:
    raise AssertionError("no call of another version reaches a handler")


def refused(call: Callable[[grpc.aio.Channel], Awaitable[Any]], *handlers: Any) -> Refusal:
    """What a server with these handlers says to a call."""

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


@pytest.mark.parametrize("package", ["gradwire.v2", "gradwire.v4"])
def test_a_worker_of_another_version_is_refused_naming_both(package: str) -> None:
    def join(channel: grpc.aio.Channel) -> Awaitable[Any]:
        untyped: Any = channel
        call: Awaitable[Any] = untyped.unary_unary(f"/{package}.ParameterServer/Join")(b"\x08\x01")
        return call

    handler = generic_handler(dict.fromkeys(METHODS, unused), sent=ignore, received=ignore)
    refusal = refused(join, handler)
    assert refusal.reason is Reason.PROTOCOL_VERSION
    assert "expected gradwire.v3 (gradwire " in refusal.message
    assert f"got {package}" in refusal.message
    assert "install the same release" in refusal.remedy


def test_a_server_of_another_version_is_named_too() -> None:
    def join(channel: grpc.aio.Channel) -> Awaitable[Any]:
        request = m.JoinRequest(worker="w", incarnation=1)
        call: Awaitable[Any] = Stub(channel, sent=ignore, received=ignore).join(request)
        return call

    refusal = refused(join)
    assert refusal.reason is Reason.PROTOCOL_VERSION
    assert "expected gradwire.v3" in refusal.message
