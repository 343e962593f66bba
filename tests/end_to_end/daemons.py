"""Real gc-server and gc-worker processes, and a client that says what it likes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from forkserver import Forked

import gradwire
from gradwire.compressors import LayerRule, ModelCompressor, Payload
from gradwire.proto import messages as m
from gradwire.proto.channel import CLIENT_OPTIONS
from gradwire.proto.entries import entry_bytes, of_kind
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Reason, Refused
from gradwire.proto.service import Stub, refusal_of
from gradwire.proto.transfer import digest, encode_chunks, part_transfer, payload_header
from gradwire.proto.wire import crc32c, decode_envelope, encode_worker
from gradwire.settings import WorkerSettings

PATIENCE_S = 120.0  # on a busy machine
TASKS = Path(__file__).parent / "programs"
ALLOWED = ("--allow-task", "small_tasks")

Start = Callable[[str, Sequence[str], Mapping[str, str], int], Forked | subprocess.Popen[bytes]]


def split_for_script(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a script's arguments, and as variables the options that `gradwire.connect` does not take."""
    taken = inspect.signature(gradwire.connect).parameters
    of_worker = {each.name for each in dataclasses.fields(WorkerSettings)} - taken.keys()
    left, variables, rest = list[str](), dict[str, str](), list(arguments)
    while rest:
        each = rest.pop(0)
        name = each[2:].replace("-", "_") if each.startswith("--") else ""
        if name in of_worker:
            variables[f"GC_{name.upper()}"] = rest.pop(0)
        else:
            left.append(each)
    return left, variables


class Daemon:
    """A process whose log is read as it comes."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
        start: Start = Forked,
    ) -> None:
        http = () if "--http-port" in arguments else ("--http-port", "-1")
        arguments = (*arguments, *http, "--log-format", "json")
        if module.startswith("script_"):
            arguments, variables = split_for_script(arguments)
            environ = {**variables, **(environ or {})}
        paths = [str(TASKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environ or {})}
        self.lines: list[str] = []
        self._messages: list[str] = []
        ours, theirs = os.pipe()
        try:
            self.process = start(module, arguments, environ, theirs)
        finally:
            os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, pipe: int) -> None:
        with open(pipe) as stream:
            for line in iter(stream.readline, ""):
                self.lines.append(line)
                with contextlib.suppress(ValueError):
                    line = json.loads(line)["message"]
                self._messages.append(line)

    @property
    def messages(self) -> list[str]:
        """Log lines without time and level; other lines as they are."""
        return self._messages.copy()

    def wait_for(self, pattern: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """The first log message that matches."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        while True:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            for text in self.messages[seen:]:
                seen += 1
                if found := re.search(pattern, text):
                    return found
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.log}"
            if ended:
                raise AssertionError(f"ended with {self.process.returncode} without {pattern!r}:\n{self.log}")
            time.sleep(0.02)

    def fields(self, pattern: str) -> dict[str, Any]:
        """All that the first JSON line says whose message matches. It has to be there."""
        self.wait_for(pattern)
        for line in list(self.lines):
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(line)
                if re.search(pattern, found["message"]):
                    return found
        raise AssertionError(f"no JSON line has {pattern!r}:\n{self.log}")

    @property
    def log(self) -> str:
        return "\n".join(self.messages)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.log}") from None
        self._reader.join(5)
        return code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)


class Server(Daemon):
    def __init__(
        self,
        *arguments: str,
        program: Sequence[str] = ("gradwire.server.cli",),
        start: Start = Forked,
        host: str = "127.0.0.1",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        module, *first = program
        # It stays to be asked what the job came to, unless a test is about its end.
        super().__init__(
            module, (*first, "--port", "0", "--host", host, "--stay", *arguments), environ, start
        )
        self.port = int(self.wait_for(rf"listening on {re.escape(host)}:(\d+)").group(1))
        self.address = f"127.0.0.1:{self.port}"


class Daemons:
    """Starts processes and ends them all.

    start: how, see forkserver.py.
    """

    def __init__(self, start: Start = Forked) -> None:
        self._start = start
        self._all: list[Daemon] = []

    def server(
        self,
        *arguments: str,
        program: Sequence[str] = ("gradwire.server.cli",),
        environ: Mapping[str, str] | None = None,
    ) -> Server:
        """program: a module to run instead of gc-server, and its own arguments, which come first."""
        server = Server(*arguments, program=program, start=self._start, environ=environ)
        self._all.append(server)
        return server

    def worker(self, address: str, *arguments: str, environ: Mapping[str, str] | None = None) -> Daemon:
        arguments = ("--server", address, *ALLOWED, "--threads", "1", *arguments)
        worker = Daemon("gradwire.worker.cli", arguments, environ, self._start)
        self._all.append(worker)
        return worker

    def program(
        self, module: str, first: str, address: str, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> Daemon:
        """A worker of another make: a module of `programs`, and its own arguments, which come first."""
        arguments = (*first.split(), "--server", address, *ALLOWED, "--threads", "1", *arguments)
        worker = Daemon(module, arguments, environ, self._start)
        self._all.append(worker)
        return worker

    def programs(
        self, module: str, first: str, *more: str, count: int, environ: Mapping[str, str] | None = None
    ) -> list[Daemon]:
        """Start `count` of them, `w0` and on. more: addresses of servers, then options."""
        return [
            self.program(module, first, *more, "--worker-id", f"w{number}", environ=environ)
            for number in range(count)
        ]

    def plain(self, module: str, *arguments: str, environ: Mapping[str, str] | None = None) -> Daemon:
        """Any command."""
        daemon = Daemon(module, arguments, environ, self._start)
        self._all.append(daemon)
        return daemon

    def workers(self, server: Server, count: int, *arguments: str) -> list[Daemon]:
        return [self.worker(server.address, "--worker-id", f"w{i}", *arguments) for i in range(count)]

    def end(self) -> None:
        for daemon in self._all:
            daemon.end()


TENSORS = (
    m.Tensor(name="weight", shape=(8, 6), dtype="float32"),
    m.Tensor(name="bias", shape=(8,), dtype="float32"),
)
MANIFEST = Manifest(TENSORS, 64)


@dataclass
class Raw:
    """A worker that sends exactly what a test tells it to."""

    stub: Stub
    worker: str = "raw"
    incarnation: int = 1
    job: str = ""
    call: Any = None
    rank: int = -1
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # grpc takes one message at a time

    async def join(self, **changes: Any) -> m.JoinResponse:
        fields: dict[str, Any] = {
            "worker": self.worker,
            "incarnation": self.incarnation,
            "compressor": "4bit",
        }
        reply: m.JoinResponse = await refusing(
            self.stub.join(m.JoinRequest(**{**fields, **changes}), timeout=20)
        )
        self.job, self.rank = reply.job.id, reply.rank
        return reply

    async def initialize(self, manifest: Manifest = MANIFEST, **changes: Any) -> m.InitializeResponse:
        values = [np.zeros(spec.elements * 4, np.uint8) for spec in manifest.specs]
        state = [np.zeros(entry_bytes(entry), np.uint8) for entry in of_kind(manifest.entries, frozen=True)]
        fields: dict[str, Any] = {
            "job": self.job,
            "worker": self.worker,
            "incarnation": self.incarnation,
            "manifest": manifest.to_message(),
        }
        header = m.InitializeHeader(**{**fields, **changes})

        async def stream() -> AsyncIterator[Any]:
            yield header
            for message in (*encode_chunks(0, values), *encode_chunks(1, state)):
                yield message

        reply: m.InitializeResponse = await refusing(self.stub.initialize(stream(), timeout=20))
        return reply

    async def attach(self, **changes: Any) -> None:
        """Open the stream and say hello."""
        self.call = self.stub.exchange()
        self.batch: list[Any] = []  # that came together, and are still to be looked at
        fields: dict[str, Any] = {"job": self.job, "worker": self.worker, "incarnation": self.incarnation}
        await self.send(m.Hello(**{**fields, **changes}))

    async def ready(
        self,
        fingerprint: bytes = MANIFEST.fingerprint,
        version: int | None = 0,
        model: m.ModelManifest | None = None,
    ) -> None:
        await self.send(m.Ready(fingerprint=fingerprint, version=version, model=model))

    async def send(self, message: Any) -> None:
        async with self.writing:
            await self.call.write(message)

    async def receive(self, kind: type[Any], timeout_s: float = 20) -> Any:
        """The next message of this kind; others are passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.batch:
                read = self.call.read()
                message = await refusing(_within(read, deadline - time.monotonic()))
                several = message.messages if isinstance(message, m.Batch) else None
                self.batch = [decode_envelope(each, "ServerMessage") for each in several or ()] or [message]
            message = self.batch.pop(0)
            if not message:  # the end of the stream
                await refusing(_raise_status(self.call))
            if isinstance(message, kind):
                return message

    async def train(self) -> None:
        """Join, initialize if asked, and be ready for work."""
        reply = await self.join()
        await self.attach()
        await self.receive(m.Welcome)
        if reply.initialize:
            await self.initialize()
        await self.ready(version=0 if reply.initialize else None)

    async def push(self, payloads: Sequence[Payload], /, **changes: Any) -> list[bytes]:
        """Send the header of a push of one part; returns its chunks and its commit, which are sent by whoever
        calls. Without payloads there is only that. changes: to fields of either."""
        data = [payload.data for payload in payloads]
        fields: dict[str, Any] = {
            "seq": 1,
            "assignment": 1,
            "part": 0,
            "plan": 1,
            "payloads": tuple(map(payload_header, payloads)),
            "base_version": 0,
            "samples": 4,
            "parts": 1 if payloads else 0,
            "digest": digest({0: crc32c(data)} if payloads else {}),
            "loss": 0.0,
        }
        fields |= changes
        of_part = {field.name for field in dataclasses.fields(m.PartHeader)}
        header = m.PartHeader(**{name: value for name, value in fields.items() if name in of_part})
        of_commit = {field.name for field in dataclasses.fields(m.Commit)}
        commit = m.Commit(**{name: value for name, value in fields.items() if name in of_commit})
        if payloads:
            await self.send(header)
        return [*encode_chunks(part_transfer(header.seq, header.part), data), encode_worker(commit)]


@contextlib.asynccontextmanager
async def beating(raw: Raw) -> AsyncGenerator[None]:
    """Send heartbeats meanwhile."""

    async def beat() -> None:
        while True:
            await raw.send(m.Heartbeat(activity="testing"))
            await asyncio.sleep(0.2)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _within(awaitable: Any, timeout_s: float) -> Any:
    return await asyncio.wait_for(awaitable, max(0.01, timeout_s))


async def _raise_status(call: Any) -> None:
    if await call.code() is not grpc.StatusCode.OK:
        await call  # raises it
    raise AssertionError("the stream ended")


async def refusing(awaitable: Any) -> Any:
    """Await a call; a typed refusal is raised as Refused."""
    try:
        return await awaitable
    except grpc.aio.AioRpcError as error:
        refused = refusal_of(error)
        raise refused if isinstance(refused, Refused) else error from None


@contextlib.asynccontextmanager
async def talk(address: str) -> AsyncGenerator[Callable[..., Raw]]:
    """Makes raw workers that share a channel to the server."""

    def nothing(size: int) -> None:
        pass

    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        stub = Stub(channel, sent=nothing, received=nothing)

        def make(worker: str = "raw", incarnation: int = 1) -> Raw:
            return Raw(stub, worker, incarnation)

        yield make


async def status(raw: Raw) -> m.StatusResponse:
    reply: m.StatusResponse = await raw.stub.status(m.StatusRequest(), timeout=20)
    return reply


def state_of(reply: m.StatusResponse) -> tuple[Any, ...]:
    """Return the part of the state that a refusal must not change."""
    members = tuple((member.worker, member.rank, member.pushes) for member in reply.members)
    return reply.phase, reply.version, reply.epoch, reply.pushes, members, reply.evaluations


@contextlib.asynccontextmanager
async def refusal_without_effect(
    raw: Raw, reason: Reason | None = None, match: str | None = None
) -> AsyncGenerator[pytest.ExceptionInfo[Refused]]:
    """The body is refused, and nothing changes."""
    before = state_of(await status(raw))
    with pytest.raises(Refused, match=match) as caught:
        yield caught
    assert reason in (None, caught.value.refusal.reason)
    assert state_of(await status(raw)) == before


def gradient(spec: str = "4bit", seed: int = 0) -> list[Payload]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    compressor = ModelCompressor(MANIFEST.specs, spec, LayerRule(), 1, 0)
    return compressor.compress([torch.randn(t.shape, generator=generator) for t in TENSORS], 4, version=0)


def poll(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def stop(server: Daemon, number: int = signal.SIGTERM) -> int:
    server.signal(number)
    return server.wait()


def asked(server: Server) -> m.StatusResponse:
    """The server's status, now."""

    async def ask() -> m.StatusResponse:
        async with talk(server.address) as make:
            return await status(make())

    return asyncio.run(ask())
