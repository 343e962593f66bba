"""A TCP relay between workers and server whose connections a test can cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

SLOW_BUFFER = 1 << 15  # what a slow link holds, or else it would be quick as long as buffers fill


class Relay:
    """Listens on `port` of the loopback interface and forwards to a port there.

    up_per_s: bytes that go to the server in a second, if that is limited. up: how many have gone.
    """

    def __init__(self, target_port: int, up_per_s: float | None = None) -> None:
        self._target_port = target_port
        self._up_per_s = up_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        if up_per_s is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.forwarded_bytes = 0
        self.up = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                near.close()
                continue
            self._pairs.append((near, far))
            for ends in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        slow = self._up_per_s if up else None
        with contextlib.suppress(OSError):
            while data := source.recv(1 << (12 if slow else 16)):
                if slow:
                    time.sleep(len(data) / slow)
                sink.sendall(data)
                self.forwarded_bytes += len(data)
                self.up += len(data) if up else 0
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> int:
        """Break every connection that is open; returns how many."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        return len(pairs)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which holds it open
        self._listener.close()
        self.cut()
