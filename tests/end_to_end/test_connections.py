"""Many connections of strangers: they end, the log says so, and probes are answered meanwhile."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request

from daemons import Daemons

from gradwire.common.descriptors import RESERVED, most_connections

LIMIT = 2 * RESERVED + 44  # open files of the server


def closed(connected: socket.socket) -> bool:
    connected.setblocking(False)
    try:
        return not connected.recv(1 << 12)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_idle_connections_do_not_silence_the_probes(plain_daemons: Daemons) -> None:
    """1,400 of them silenced a server of 1,024 files until they went, and no line said so."""
    most = most_connections(LIMIT)
    server = plain_daemons.server("--http-port", "0", program=("limited", f"{LIMIT}"))
    port = int(server.wait_for(r"metrics and probes on port (\d+)").group(1))
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(LIMIT)
        ]
        visitors = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(200)]
        server.wait_for(
            rf"\d+ of {LIMIT} file descriptors are in use, and more than {most} connections are refused"
        )
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=10) as response:
            assert response.read() == b"alive\n"
        assert time.monotonic() - began < 5
        assert sum(map(closed, strangers)) >= LIMIT - most
        assert sum(map(closed, visitors)) >= 100
