"""The server that the wire benchmarks share ends with them, whatever happens."""

from __future__ import annotations

import socket

import pytest

from gradwire.benchmarks.arguments import BenchError
from gradwire.benchmarks.pusher import start_server


def test_a_server_does_not_outlive_what_raises_beside_it() -> None:
    ports: list[int] = []

    def push() -> None:
        with start_server("--host", "127.0.0.1") as port:
            socket.create_connection(("127.0.0.1", port)).close()
            ports.append(port)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        push()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(BenchError, match=r"unknown mode 'magic'; known modes: async, coded"),
        start_server("--mode", "magic"),
    ):
        pass
