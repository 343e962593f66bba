"""`gc-bench push`: speed of a push, from the worker's payloads until the server has accepted it.

A push is performed as by gc-worker and gc-server. It is framed, with checksums computed on both ends, and
streamed in chunks over a loopback connection. The server assembles it into the buffer that is reduced, and
scans it for values that a payload must not contain. It ends when the worker has read that the push is
accepted. The payload is dense float32.

There are two peers, in processes of their own like the server. Each is timed alternately with a push, so
that drift of the machine's speed affects all alike:

* raw TCP: the same bytes over one loopback stream into a buffer, until the other side answers one byte;
* a bare stream: the same bytes as ready-made chunks over a grpc.aio stream that only counts them. No use of
  Python's gRPC streams can be faster.

Ratios of medians are printed. The goal is at least 0.60 of raw TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import grpc.aio
import numpy as np
import uvloop

from ..compressors import DenseFormat, DensePayload
from ..proto.channel import CLIENT_OPTIONS, SERVER_OPTIONS
from ..proto.wire import CHUNK_BYTES
from . import output
from .arguments import at_least_one, json_option, option
from .pusher import Pusher, start_server

METHOD = "/peer/Push"
untyped: Any = grpc  # grpc annotates its handlers only in part


def tcp_peer(port: Any, size: int) -> None:
    """Receive `size` bytes again and again on one TCP connection, and answer one byte each time. `port` is a
    queue that receives the port it listens on."""
    listener = socket.create_server(("127.0.0.1", 0))
    port.put(listener.getsockname()[1])
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(size))
    while True:
        filled = 0
        while filled < size:
            got = connection.recv_into(buffer[filled:])
            if not got:
                return
            filled += got
        connection.sendall(b"!")


def stream_peer(port: Any, size: int) -> None:
    """Run a gRPC server that answers each time chunks of `size` bytes in all have arrived on its stream.

    Args:
        port: queue that receives its port.
        size: bytes of a push.
    """

    async def push(requests: Any, context: Any) -> None:
        got = 0
        async for chunk in requests:
            got += len(chunk)
            if got == size:
                await context.write(b"!")
                got = 0

    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        handlers = {"Push": untyped.stream_stream_rpc_method_handler(push)}
        server.add_generic_rpc_handlers((untyped.method_handlers_generic_handler("peer", handlers),))
        port.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


def raw_tcp(port: int, data: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Connect to `tcp_peer` on this port; return a function that sends the data and waits for the answer."""
    connection = socket.create_connection(("127.0.0.1", port))

    def push() -> None:
        connection.sendall(data.data)
        assert connection.recv(1) == b"!"

    return push


def bare_stream(port: int, data: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Connect to `stream_peer` on this port and return a function that streams the data in chunks.

    The returned function also waits for the answer.
    """
    chunks = [data[at : at + CHUNK_BYTES].tobytes() for at in range(0, data.size, CHUNK_BYTES)]
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def connect() -> Any:
        channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS)
        return channel, channel.stream_stream(METHOD)()

    channel, call = asyncio.run_coroutine_threadsafe(connect(), loop).result()

    async def send() -> None:
        for chunk in chunks:
            await call.write(chunk)
        assert await call.read() == b"!"

    def push() -> None:
        assert channel is not None  # this reference keeps the channel open
        asyncio.run_coroutine_threadsafe(send(), loop).result()

    return push


def timed(push: Callable[[], None]) -> float:
    """Return the seconds of one call of `push`."""
    started = time.perf_counter()
    push()
    return time.perf_counter() - started


def measure(size: int, repeats: int) -> dict[str, list[float]]:
    """Time pushes of `size` bytes alternately with the peers, and return the seconds of each repetition, by
    "push" and the names of the peers."""
    data = np.random.default_rng(0).random(size // 4, np.float32).view(np.uint8)
    spawn = get_context("spawn")
    ports = spawn.Queue()
    kinds = {
        "raw TCP": (tcp_peer, raw_tcp),
        "bare stream": (stream_peer, bare_stream),
    }
    peers: list[Any] = []
    pushers: dict[str, Callable[[], None]] = {}
    for name, (serve, connect) in kinds.items():
        peers.append(spawn.Process(target=serve, args=(ports, size), daemon=True))
        peers[-1].start()
        pushers[name] = connect(ports.get(), data)
    payload = DensePayload(format=DenseFormat.FLOAT32, elements=size // 4, data=data)
    seconds: dict[str, list[float]] = {"push": [], **{name: [] for name in pushers}}
    with (
        start_server("--host=127.0.0.1", "--downlink=none") as server_port,
        contextlib.closing(Pusher(f"127.0.0.1:{server_port}", payload)) as pusher,
    ):
        for repeat in range(repeats + 2):
            taken = {"push": timed(pusher.push)}
            pusher.settle()
            taken |= {name: timed(push) for name, push in pushers.items()}
            if repeat >= 2:  # the first repetitions open connections and touch pages
                for name, value in taken.items():
                    seconds[name].append(value)
    for peer in peers:
        peer.terminate()
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--mebibytes", at_least_one, 64, "N", "size of a push in MiB")
    option(parser, "--repeats", at_least_one, 7, "N", "repetitions; their median counts")
    json_option(parser, "the figures")


def run(given: argparse.Namespace) -> None:
    """Time pushes and peers, and print speeds, ratios and goals."""
    size = given.mebibytes << 20
    seconds = measure(size, given.repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:<16}{value * 1e3:9.1f} ms{size / value / 1e9:8.2f} GB/s")
    goals = {"raw TCP": ", goal 0.60", "bare stream": ""}
    ratios = {name: medians[name] / medians["push"] for name in goals}
    for name, ratio in ratios.items():
        print(f"push: {ratio:.2f} of the speed of {name}{goals[name]}")
    print(f"bare stream: {medians['raw TCP'] / medians['bare stream']:.2f} of the speed of raw TCP")
    report = {"bytes": size, "repeats": given.repeats, "seconds": seconds, "ratios": ratios}
    output.write_json(given.json, report)
