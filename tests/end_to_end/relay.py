"""A TCP relay between workers and server whose connections a test can cut, slow down and damage.

What a `Plan` does to a connection depends on its seed, the number of the connection and the bytes that have
gone over it, and on no clock: byte 70,123 of the third connection's way up is flipped, whenever it comes.
`troubled` adds seed and faults to whatever a test fails with.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

SLOW_BUFFER = 1 << 15  # what a slow link holds, or else it would be quick as long as buffers fill
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, with RST

# cut: what came before arrives, then both ends are closed, in the middle of whatever was being sent. reset:
# the same with RST. delay: of this direction. stall: of both. flip: one bit. half-open: one end is closed and
# the other is not told. blackhole: what goes this way from here on is swallowed. After a while either of the
# last two is reset.
KINDS = ("cut", "reset", "delay", "stall", "flip", "half-open", "blackhole")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Faults of connections.

    seed, kinds: what they are drawn with, and from. gap_bytes: between two in one direction of a connection.
    hold_s: how long those last that last, at most. faults: how many in all, and then no more.
    """

    seed: int
    kinds: Sequence[str] = KINDS
    gap_bytes: tuple[int, int] = (2_000, 200_000)
    hold_s: float = 1.0
    faults: int = 1_000_000

    def of(self, connection: int, way: str) -> Iterator[tuple[int, str, float]]:
        """Yield the faults of one direction: bytes before it, kind, and a number in [0, 1) for its
        duration."""
        chance = random.Random(f"{self.seed} {connection} {way}")
        at = 0
        while True:
            at += chance.randint(*self.gap_bytes)
            yield at, chance.choice(self.kinds), chance.random()


class _Ended(Exception):
    """The connection is over."""


@dataclass(eq=False)
class _Connection:
    near: socket.socket
    far: socket.socket
    number: int
    open: threading.Event = field(default_factory=threading.Event)  # set: bytes may pass

    def close(self, *, reset: bool = False) -> None:
        for end in (self.near, self.far):
            self.close_end(end, reset=reset)
        self.open.set()

    def close_end(self, end: socket.socket, *, reset: bool = False) -> None:
        with contextlib.suppress(OSError):
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)  # wakes the thread that reads
        end.close()


class Relay:
    """Listens on `port` of the loopback interface and forwards to a port there.

    up: bytes that have gone to the server. accepted: connections. happened: the faults of the plan so far.
    """

    def __init__(
        self,
        target_port: int,
        up_per_s: float | None = None,
        *,
        down_per_s: float | None = None,
        delay_s: float = 0.0,
        plan: Plan | None = None,
    ) -> None:
        """
        Args:
            up_per_s, down_per_s: bytes that go to the server and from it in a second, if that is limited.
            delay_s: of every byte, in each direction.
        """
        self._target_port = target_port
        self._per_s = {"up": up_per_s, "down": down_per_s}
        self._delay_s = delay_s
        self._plan = plan
        self._listener = socket.create_server(("127.0.0.1", 0))
        if up_per_s is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[_Connection] = []
        self._ways = {"up": threading.Event(), "down": threading.Event()}  # set: not partitioned
        self.heal()
        self.forwarded_bytes = 0
        self.up = 0
        self.accepted = 0
        self.happened: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    # ---- for a test

    def cut(self) -> int:
        """Break every connection that is open; returns how many."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
        return len(connections)

    def partition(self, *ways: str) -> None:
        """Let nothing pass "up", "down" or both, until `heal`: what was sent waits, as TCP has it."""
        for way in ways:
            self._ways[way].clear()

    def heal(self) -> None:
        for way in self._ways.values():
            way.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which holds it open
        self._listener.close()
        self.heal()
        self.cut()

    # ---- its threads

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
            connection = _Connection(near, far, self.accepted)
            connection.open.set()
            self.accepted += 1
            self._connections.append(connection)
            for way in ("up", "down"):
                threading.Thread(target=self._forward, args=(connection, way), daemon=True).start()

    def _forward(self, connection: _Connection, way: str) -> None:
        source, sink = connection.near, connection.far
        if way == "down":
            source, sink = sink, source
        send = self._sender(sink)
        faults = self._plan.of(connection.number, way) if self._plan else iter(())
        at, fault = 0, next(faults, None)
        per_s = self._per_s[way]
        try:
            while data := source.recv(1 << (12 if per_s else 16)):
                self._ways[way].wait()
                connection.open.wait()
                if per_s:
                    time.sleep(len(data) / per_s)
                while fault is not None and fault[0] < at + len(data):
                    before = data[: fault[0] - at]
                    send(before)
                    data, at = data[len(before) :], fault[0]
                    data = self._happen(connection, way, fault, data)
                    fault = next(faults, None)
                send(data)
                at += len(data)
                self.forwarded_bytes += len(data)
                self.up += len(data) if way == "up" else 0
        except (OSError, _Ended):
            pass
        connection.open.wait()  # while the other end must not hear of it
        send(b"")
        if not self._delay_s:
            connection.close()

    def _sender(self, sink: socket.socket) -> _Send:
        if not self._delay_s:
            return _Now(sink)
        return _Later(sink, self._delay_s)

    def _happen(self, connection: _Connection, way: str, fault: tuple[int, str, float], data: bytes) -> bytes:
        """Make one fault happen before `data`; what goes on from here. Raises _Ended."""
        at, kind, number = fault
        plan = self._plan
        assert plan is not None
        if len(self.happened) >= plan.faults:
            return data
        self.happened.append(f"{kind} at byte {at} {way} of connection {connection.number}")
        hold_s = plan.hold_s * number
        match kind:
            case "flip":
                mask = 1 << int(number * 8)
                return bytes((data[0] ^ mask,)) + data[1:]
            case "delay":
                time.sleep(hold_s)
                return data
            case "stall":
                connection.open.clear()
                time.sleep(hold_s)
                connection.open.set()
                return data
            case "half-open":
                connection.open.clear()
                connection.close_end(connection.near if way == "down" else connection.far)
                time.sleep(hold_s)
            case "blackhole":
                source = connection.near if way == "up" else connection.far
                source.settimeout(0.05)
                end = time.monotonic() + hold_s
                while time.monotonic() < end:
                    with contextlib.suppress(TimeoutError):
                        if not source.recv(1 << 16):
                            break
            case "cut":
                connection.close()
                raise _Ended
            case _:
                pass
        connection.close(reset=True)
        raise _Ended


class _Now:
    """Sends at once."""

    def __init__(self, sink: socket.socket) -> None:
        self._sink = sink

    def __call__(self, data: bytes) -> None:
        if data:
            self._sink.sendall(data)


class _Later:
    """Sends what it is given after a delay, in order; empty data end the connection."""

    def __init__(self, sink: socket.socket, delay_s: float) -> None:
        self._sink = sink
        self._delay_s = delay_s
        self._waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, data: bytes) -> None:
        self._waiting.put((time.monotonic() + self._delay_s, data))

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = self._waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    break
                self._sink.sendall(data)
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_RDWR)


_Send = _Now | _Later


@contextlib.contextmanager
def troubled(server_port: int, plan: Plan) -> Generator[Relay]:
    """A relay with faults. What a test fails with meanwhile is told the seed, and what has happened."""
    relay = Relay(server_port, plan=plan)
    try:
        yield relay
    except BaseException as error:
        error.add_note(f"{plan}; {len(relay.happened)} faults: {'; '.join(relay.happened[-20:])}")
        raise
    finally:
        relay.close()
