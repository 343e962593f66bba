"""A stranger to a job: a program whose calls to the job's server should change nothing.

    python -m gradwire.benchmarks.stranger HOST:PORT FILE RATE SEED

FILE holds the insider's token, valid for a worker id that is no member of the job. Calls have this token, a
wrong one or none. RATE is in calls per second; SEED determines the kind of each call. SIGUSR1 starts and
pauses the calls. At SIGTERM the program prints the number of calls of each kind, and of each status code.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from ..proto import messages as m
from ..proto.channel import AUTHORIZATION, CLIENT_OPTIONS
from ..proto.convert import encode
from ..proto.wire import encode_worker, trailer

PATH = "/gradwire.v4.ParameterServer/"
AT_ONCE = 64  # limit of concurrent calls
OVERSIZED_BYTES = 9 << 20  # larger than any message that a server accepts
NOISE_BYTES = 1 << 12
VICTIM = "worker-0"  # the member whose name and messages are misused
WRONG = "x" * 32  # a wrong token
PATIENCE_S = 30.0  # timeout of a call

# Frequency of each kind of call, in percent.
KINDS = {
    "without a token": 30,
    "a wrong token": 20,
    "a name of another": 10,
    "a member's messages again": 15,
    "messages of no member": 10,
    "noise": 8,
    "a changed byte": 5,
    "silence": 1.9,
    "too large": 0.1,
}


class Stranger:
    """A caller from outside a job, which makes calls of random kinds to one server.

    Attributes:
        made: number of calls, by kind.
        answered: number of calls, by status code of the answer.
    """

    def __init__(self, address: str, insider: str, seed: int) -> None:
        """Args:
        address: host:port of the server.
        insider: token of a worker id that is no member of the job.
        seed: determines the kinds of calls.
        """
        self._channel: Any = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._insider = insider
        self._random = random.Random(seed)
        self.made = collections.Counter[str]()
        self.answered = collections.Counter[str]()
        self._silent: set[asyncio.Task[None]] = set()

    async def call(self) -> None:
        """Make one call of a random kind and wait for its answer, except for a silent call.

        Silent calls continue in the background.
        """
        (kind,) = self._random.choices(list(KINDS), weights=list(KINDS.values()))
        self.made[kind] += 1
        if kind == "silence":
            task = asyncio.create_task(self._stream((), self._insider))
            self._silent.add(task)
            task.add_done_callback(self._silent.discard)
            return
        join = _checked(m.JoinRequest(worker=VICTIM, incarnation=1, software="0", compressor="4bit"))
        match kind:
            case "without a token":
                await self._join(join, "")
            case "a wrong token":
                await self._join(join, WRONG)
            case "a name of another":
                await self._join(join, self._insider)
            case "a member's messages again":
                await self._stream(_pushes(VICTIM), "")
            case "messages of no member":
                await self._stream(_pushes("insider"), self._insider)
            case "noise":
                await self._join(self._random.randbytes(NOISE_BYTES), self._insider)
            case "a changed byte":
                changed = bytearray(
                    _checked(m.JoinRequest(worker="insider", incarnation=1, compressor="none"))
                )
                changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
                await self._join(bytes(changed), self._insider)
            case _:
                await self._join(bytes(OVERSIZED_BYTES), "")

    async def _join(self, data: bytes, token: str) -> None:
        """Call Join with a serialized request and a token; "" for no token."""
        call = self._channel.unary_unary(f"{PATH}Join")
        await self._answer(call(data, metadata=_metadata(token), timeout=PATIENCE_S))

    async def _stream(self, messages: Sequence[bytes], token: str) -> None:
        """Open an Exchange stream and send serialized messages. Without messages it stays open and silent."""

        async def requests() -> AsyncIterator[bytes]:
            for message in messages:
                yield message
            if not messages:
                await asyncio.sleep(PATIENCE_S)

        call = self._channel.stream_stream(f"{PATH}Exchange")
        stream = call(requests(), metadata=_metadata(token), timeout=PATIENCE_S)

        async def end() -> None:
            while await stream.read() is not grpc.aio.EOF:
                pass
            if (code := await stream.code()) is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())

        await self._answer(end())

    async def _answer(self, answer: Any) -> None:
        """Wait for the end of a call and count its status code."""
        try:
            await answer
            self.answered["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.answered[error.code().name] += 1

    async def close(self) -> None:
        """Cancel the silent calls and close the channel."""
        for task in self._silent:
            task.cancel()
        await asyncio.gather(*self._silent, return_exceptions=True)
        await self._channel.close()


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with this token; empty for no token."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def _checked(message: Any) -> bytes:
    """Return a serialized message followed by its checksum."""
    data = encode(message)
    return data + trailer(data)


def _pushes(worker: str) -> tuple[bytes, ...]:
    """Return serialized messages of a member, as an eavesdropper would replay them."""
    said: tuple[m.WorkerMessage, ...] = (
        m.Hello(job="", worker=worker, incarnation=1),
        m.Heartbeat(activity="training"),
        m.Commit(
            seq=1,
            assignment=1,
            plan=1,
            base_version=0,
            samples=16,
            parts=1,
            digest=0,
            loss=1.0,
            exchanged=None,
        ),
        m.Leave(failed=False, reason="gone"),
    )
    return tuple(encode_worker(each) for each in said)


async def _run(address: str, insider: str, rate: float, seed: int) -> dict[str, Any]:
    """Make calls until SIGTERM and return the numbers of calls, by kind and by status code.

    Args:
        address: host:port of the server.
        insider: token of a worker id that is no member of the job.
        rate: calls per second.
        seed: determines the kinds of calls.
    """
    stranger, ending, active = Stranger(address, insider, seed), asyncio.Event(), asyncio.Event()
    loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: active.clear() if active.is_set() else active.set())
    print("ready", flush=True)
    calls: set[asyncio.Task[None]] = set()

    async def one() -> None:
        async with slots:
            await stranger.call()

    at = loop.time()
    while not ending.is_set():
        if not active.is_set() or slots.locked():
            await asyncio.sleep(0.005)
            at = loop.time()
            continue
        while at <= loop.time():
            at += 1 / rate
            task = asyncio.create_task(one())
            calls.add(task)
            task.add_done_callback(calls.discard)
        await asyncio.sleep(max(0.0, at - loop.time()))
    await asyncio.gather(*calls)
    await stranger.close()
    return {"made": dict(stranger.made), "answered": dict(stranger.answered)}


def main(arguments: list[str]) -> int:
    """Run the program with the arguments HOST:PORT, FILE, RATE and SEED; return the exit code."""
    address, insider, rate, seed = arguments
    os.nice(19)  # a real stranger has a machine of its own
    token = Path(insider).read_text(encoding="utf-8").strip()
    print(json.dumps(asyncio.run(_run(address, token, float(rate), int(seed)))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
