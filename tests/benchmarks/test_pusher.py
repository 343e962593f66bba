"""The server that the wire benchmarks share ends with them, whatever happens."""

from __future__ import annotations

import contextlib
import socket

import numpy as np
import pytest

from gradwire.benchmarks.arguments import BenchError
from gradwire.benchmarks.pusher import Pusher, start_server
from gradwire.common.parts import divide
from gradwire.compressors import dense_payload, sparse_payload
from gradwire.compressors.payload import DenseFormat


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


def test_a_payload_is_pushed_again_and_again_in_as_many_parts_as_its_model_has() -> None:
    elements = 3 << 19
    assert len(divide([elements]).parts) == 3
    held = np.arange(0, elements, 1000, dtype=np.uint32)
    values = dense_payload(DenseFormat.FLOAT32, np.ones(held.size, np.float32))
    with (
        start_server("--host", "127.0.0.1") as port,
        contextlib.closing(Pusher(f"127.0.0.1:{port}", sparse_payload(elements, held, values))) as pusher,
    ):
        for _ in range(3):
            pusher.push()
            pusher.settle()
