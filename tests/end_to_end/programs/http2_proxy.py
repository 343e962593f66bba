"""A stand-in for a proxy: an HTTP/2 server that answers every call by a status of HTTP, or resets it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Generator

DATA, HEADERS, RESET, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
LARGE = (1 << 31) - 1
INTERNAL_ERROR = 2
RESETS = 0

Answer = Callable[[int], int]  # from the bytes of a request to a status of HTTP, or RESETS


@contextlib.contextmanager
def proxy(answer: Answer) -> Generator[int]:
    """Yield the port of a proxy, in a with block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connected, _ = listener.accept()
                    threading.Thread(target=_serve, args=(connected, answer), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _serve(connected: socket.socket, answer: Answer) -> None:
    sizes: dict[int, int] = {}
    with contextlib.suppress(OSError), connected, connected.makefile("rb") as stream:
        stream.read(24)  # the preface
        settings = struct.pack(">HI", 4, LARGE)  # the initial window of a stream
        connected.sendall(_frame(SETTINGS, 0, 0, settings))
        connected.sendall(_frame(WINDOW, 0, 0, struct.pack(">I", LARGE - 65535)))
        while head := stream.read(9):
            length = int.from_bytes(head[:3])
            kind, flags, number = struct.unpack(">BBI", head[3:])
            payload = stream.read(length)
            if kind in (SETTINGS, PING) and not flags & ACK:
                connected.sendall(_frame(kind, ACK, 0, payload if kind == PING else b""))
            if kind == DATA:
                sizes[number] = sizes.get(number, 0) + length
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                status = answer(sizes.pop(number, 0))
                if status == RESETS:
                    connected.sendall(_frame(RESET, 0, number, struct.pack(">I", INTERNAL_ERROR)))
                else:
                    block = b"\x08\x03" + str(status).encode()  # :status, as a literal
                    connected.sendall(_frame(HEADERS, END_STREAM | END_HEADERS, number, block))
