"""How a client finds its server: by the system's resolver, directly, and again when the server has moved."""

from __future__ import annotations

import socket
from typing import Any

import grpc.aio
import pytest

from gradwire.proto.channel import SERVER_OPTIONS
from gradwire.proto.client import Client
from gradwire.proto.findings import Target, UnreachedError
from gradwire.proto.messages import StatusRequest
from gradwire.proto.service import SERVICE, generic_handler, ignore
from gradwire.worker.session.attempts import UnreachableError
from gradwire.worker.session.connection import Connection


class Names:
    """Stand-in for the system's resolver, which knows more names than DNS does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, str] = {}
        self._resolve: Any = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, *arguments: Any, **named: Any) -> Any:
        return self._resolve(self.addresses.get(host, host), *arguments, **named)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


async def serve(where: str, heard: list[str]) -> tuple[grpc.aio.Server, int]:
    """A server that refuses every call, and notes its own address then."""

    async def refuse(request: Any, context: Any) -> None:
        heard.append(where)
        await context.abort(grpc.StatusCode.NOT_FOUND, "as agreed")

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: dict[str, Any] = dict.fromkeys((each.name for each in SERVICE.methods), refuse)
    server.add_generic_rpc_handlers(
        (generic_handler(handlers, sent=lambda _: None, received=lambda _: None),)
    )
    port = server.add_insecure_port(where)
    await server.start()
    return server, port


async def call(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="as agreed"):
        await (await client.stub()).status(StatusRequest(), timeout=10)


async def until_refused(client: Client) -> None:
    for _ in range(100):  # until the client notices that the connection has ended
        with pytest.raises(grpc.aio.AioRpcError):
            await (await client.stub()).status(StatusRequest(), timeout=10)


@pytest.mark.parametrize("name", ["trainer.lan", "dns", "unix", "ipv4", "trainer.lan."])
async def test_the_system_finds_a_name_that_dns_does_not_know(names: Names, name: str) -> None:
    names.addresses[name] = "127.0.0.1"
    server, port = await serve("127.0.0.1:0", [])
    client = Client(Target(host=name, port=port))
    await call(client)
    await client.close()
    await server.stop(None)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy", "HTTPS_PROXY", "all_proxy"])
async def test_a_proxy_for_web_pages_is_not_asked(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    server, port = await serve("127.0.0.1:0", [])
    client = Client(Target(host="127.0.0.1", port=port))
    await call(client)
    await client.close()
    await server.stop(None)


async def test_a_server_that_has_moved_to_another_address_is_found_again(names: Names) -> None:
    heard: list[str] = []
    names.addresses["moving"] = "127.0.0.1"
    first, port = await serve("127.0.0.1:0", heard)
    client = Client(Target(host="moving", port=port))
    await call(client)
    await first.stop(None)
    with pytest.raises(UnreachedError, match="Connection refused; nothing listens there"):
        await until_refused(client)
    names.addresses["moving"] = "127.0.0.2"
    second, _ = await serve(f"127.0.0.2:{port}", heard)
    await call(client)
    await client.close()
    await second.stop(None)
    assert heard == ["127.0.0.1:0", f"127.0.0.2:{port}"]


@pytest.mark.parametrize("host", ["no-such-host.invalid", "no..host", "x" * 64 + ".invalid"])
def test_a_worker_says_that_a_name_is_not_found(host: str) -> None:
    connection = Connection(
        f"{host}:1", worker="w0", incarnation=1, connect_s=0.0, give_up_s=0.0, sent=ignore, received=ignore
    )
    try:
        with pytest.raises(UnreachableError, match=f"'{host}' is not found: .*; check the spelling"):
            connection.join("0", "", ())
    finally:
        connection.close()
