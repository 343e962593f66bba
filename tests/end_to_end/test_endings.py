"""How a server ends, and what it leaves behind (findings F7, U1 and U8)."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from daemons import Daemons, Server, asked, gradient, poll, status, stop, talk
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from safetensors import safe_open
from test_training import get

from gradwire.deploy.daemons import free_port
from gradwire.proto import messages as m
from gradwire.proto.refusal import Refused

SLOW = "small_tasks:regression:slow=0.05,samples=9600"


def job(daemons: Daemons, output: Path, *arguments: str, task: str = "small_tasks:regression") -> Server:
    return daemons.server("--task", task, "--epochs", "1", "--output", str(output), *arguments)


def metadata(path: Path) -> dict[str, str]:
    untyped: Any = safe_open(path, "np")
    with untyped as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            assert np.isfinite(file.get_tensor(name)).all()
        found: dict[str, str] = file.metadata()
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_stop_writes_the_last_version(
    number: signal.Signals, daemons: Daemons, tmp_path: Path
) -> None:
    output = tmp_path / "model.safetensors"
    server = job(daemons, output, task=SLOW)
    # gRPC may lose the reason that the server gives if the worker sends at that moment; it then tries again.
    worker = daemons.worker(server.address, "--give-up-seconds", "10")
    poll(lambda: asked(server).version > 2, "no progress")
    assert stop(server, number) == 128 + number
    assert worker.wait() == 5, worker.log
    (written,) = tmp_path.iterdir()
    version = re.fullmatch(r"model\.unfinished-v(\d+)\.safetensors", written.name)
    assert version
    assert int(version[1]) > 2
    assert metadata(written)["version"] == version[1]
    assert metadata(written)["finished"] == "false"


def test_a_server_ends_by_itself_when_its_job_is_done(daemons: Daemons, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    server = job(daemons, output, "--no-stay")
    worker = daemons.worker(server.address)
    server.wait_for("the server ends in")
    assert asked(server).phase is m.Phase.FINISHED
    assert worker.wait() == 0
    assert server.wait() == 0
    assert metadata(output)["finished"] == "true"
    assert output.stat().st_mode & 0o044 == 0o044, "as the umask has it, not for the owner alone"


def test_a_server_that_stays_ends_with_0_when_it_is_told_to(daemons: Daemons, tmp_path: Path) -> None:
    server = job(daemons, tmp_path / "model.safetensors")
    worker = daemons.worker(server.address)
    server.wait_for("the job is finished")
    assert worker.wait() == 0
    assert stop(server, signal.SIGINT) == 0


def test_standard_tools_learn_what_the_server_offers_and_that_it_serves(daemons: Daemons) -> None:
    server = daemons.server("--task", SLOW, "--reflection")
    service = "gradwire.v4.ParameterServer"
    with grpc.insecure_channel(server.address) as channel:
        described = ProtoReflectionDescriptorDatabase(channel)
        found = DescriptorPool(described).FindServiceByName(service)
        assert {"grpc.health.v1.Health", service} <= set(described.get_services())
        assert {method.name for method in found.methods} >= {"Join", "Initialize", "Exchange", "Fetch"}
        health: Any = health_pb2_grpc.HealthStub(channel)  # its stubs leave out the calls
        for name in ("", service):
            reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_what_was_accepted_is_in_the_file_of_a_server_that_is_told_to_stop(
    daemons: Daemons, tmp_path: Path
) -> None:
    output = tmp_path / "model.safetensors"
    server = job(daemons, output, "--min-workers", "2", "--batch-size", "4")

    async with talk(server.address) as make:
        first, second = make("a"), make("b")
        await first.train()
        await second.train()
        told = await first.receive(m.Assignment)
        messages = await first.push(gradient(), assignment=told.id)
        for message in messages:
            await first.send(message)
        outcome = await first.receive(m.Outcome)
        assert (outcome.decision, outcome.version) == (m.Decision.ACCEPTED, 1)
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        with pytest.raises(Refused, match="told to stop"):
            await second.receive(m.Outcome)
    assert server.wait() == 143
    assert metadata(tmp_path / "model.unfinished-v1.safetensors")["version"] == "1"


def test_a_server_that_stops_is_not_ready_first_and_ends_at_once_when_told_twice(
    daemons: Daemons, tmp_path: Path
) -> None:
    http = free_port()
    server = job(daemons, tmp_path / "model.safetensors", "--http-port", str(http), task=SLOW)
    daemons.worker(server.address)
    poll(lambda: asked(server).version > 1, "no progress")

    async def told_to_stop() -> None:
        async with talk(server.address) as make:
            raw = make()
            raw.call = raw.stub.exchange()  # says nothing, and does not end by itself
            await status(raw)
            assert get(http, "/readyz")[0] == 200
            server.signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for, "parameters of version .* written")
            assert get(http, "/readyz") == (503, "shutting down\n")
            assert get(http, "/livez") == (200, "alive\n")

    asyncio.run(told_to_stop())
    server.signal(signal.SIGTERM)
    assert server.wait() == 143


def test_parameters_that_cannot_be_written_where_they_should_are_kept_elsewhere(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, temporary = tmp_path / "gone", tmp_path / "temporary"
    gone.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    server = job(daemons, gone / "model.safetensors", task=SLOW)
    daemons.worker(server.address)
    poll(lambda: asked(server).version > 1, "no progress")
    gone.rmdir()
    assert stop(server) == 8
    (kept,) = temporary.glob("model.unfinished-v*.safetensors")
    assert metadata(kept)["finished"] == "false"
    server.wait_for(f"could not save the parameters as {gone}/model.unfinished-v.*: .*No such file")
    server.wait_for(f"parameters of version .* written to {kept}")
