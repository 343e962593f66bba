"""Whole jobs with real processes: the same bits, the same mathematics, and goings and comings."""

from __future__ import annotations

import asyncio
import hashlib
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from daemons import Daemon, Daemons, Server, asked, beating, gradient, poll, status, stop, talk
from relay import Relay
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from gradwire import __version__
from gradwire.deploy.daemons import free_port
from gradwire.proto import messages as m
from gradwire.proto.refusal import Refused
from gradwire.proto.transfer import values_assembly
from gradwire.proto.wire import CHUNK_BYTES
from gradwire.worker.tasks import load
from gradwire.worker.training.sharding import epoch_order

SMALL = "small_tasks:regression"


def finished(server: Server) -> m.StatusResponse:
    server.wait_for("the job is finished")
    poll(lambda: asked(server).phase is m.Phase.FINISHED, "the job is not finished")
    return asked(server)


def small_job(daemons: Daemons, *arguments: str, workers: int, task: str = SMALL) -> Server:
    return daemons.server(
        *("--task", task, "--min-workers", str(workers), "--epochs", "2", "--batch-size", "8", "--seed", "3"),
        *arguments,
    )


# ---- the same bits, the same mathematics


@pytest.mark.parametrize(
    ("compressor", "downlink"),
    [
        ("4bit", "auto"),
        ("qsgd:bits=2", "topk:ratio=4"),
        ("krngc:ratio=4,delay=2", "auto"),
        ("randk:ratio=4", "qsgd"),
        ("1bit:block=32,decay=0.9", "auto"),
    ],
)
def test_two_runs_with_one_seed_end_with_the_same_bits_whatever_the_order(
    daemons: Daemons, compressor: str, downlink: str
) -> None:
    """Workers start in another order and are delayed at random; dropout, residuals and draws are in play. One
    run packs its payloads, the other does not."""
    replies: list[m.StatusResponse] = []
    for entropy, order in (("on", (0, 1, 2)), ("off", (2, 0, 1))):
        options = ("--downlink", downlink, "--entropy", entropy)
        server = small_job(daemons, *options, workers=3, task=f"{SMALL}:jitter=0.02,width=256")
        workers: list[Daemon] = []
        for index in order:
            arguments = ("--worker-id", f"w{index}", "--compressor", compressor)
            workers.append(daemons.worker(server.address, *arguments))
        replies.append(finished(server))
        assert [worker.wait() for worker in workers] == [0, 0, 0]
        stop(server)
    first, second = replies
    assert first.parameters_sha256 == second.parameters_sha256
    assert [done.metrics for done in first.evaluations] == [done.metrics for done in second.evaluations]
    assert first.version == 8
    assert first.pushes == 24
    assert first.refused_pushes == 0


def test_uncompressed_training_with_four_workers_is_sgd_on_the_union_batch(
    daemons: Daemons, tmp_path: Path
) -> None:
    output = tmp_path / "model.safetensors"
    server = daemons.server(
        *("--task", "digits", "--min-workers", "4", "--epochs", "1", "--seed", "5", "--output", str(output)),
        *("--optimizer", "sgd:momentum=0.9,weight_decay=0.001", "--learning-rate", "0.05"),
    )
    workers = daemons.workers(server, 4, "--compressor", "none")
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0] * 4

    task = load("digits")
    torch.manual_seed(5)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.001)
    order = epoch_order(5, 0, task.train_samples)
    for start in range(0, task.train_samples, 4 * 32):
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model, task.batch(order[start : start + 4 * 32])))
        optimizer.step()
    digest = hashlib.sha256()
    trained = load_file(output)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-4, atol=1e-6)
        digest.update(trained[name].numpy().tobytes())
    assert digest.hexdigest() == reply.parameters_sha256


def test_the_trained_parameters_can_be_fetched(daemons: Daemons) -> None:
    server = small_job(daemons, workers=1)
    daemons.worker(server.address)
    reply = finished(server)

    async def fetch() -> bytes:
        from gradwire.proto.manifest import Manifest

        async with talk(server.address) as make:
            call = make().stub.fetch(m.FetchRequest())
            header = await call.read()
            assert isinstance(header, m.FetchHeader)
            manifest = Manifest.from_message(header.manifest, worker="me", max_bytes=1 << 30)
            assert header.chunk_bytes == CHUNK_BYTES
            assembly = values_assembly(header.version, manifest, worker="me")
            while not assembly.complete:
                assembly.add(await call.read())
            return b"".join(payload.data.tobytes() for payload in assembly.finish())

    assert hashlib.sha256(asyncio.run(fetch())).hexdigest() == reply.parameters_sha256


# ---- comings and goings


async def test_a_partial_push_of_a_worker_that_dies_changes_nothing_and_the_round_goes_on(
    daemons: Daemons,
) -> None:
    server = daemons.server("--task", "digits", "--min-workers", "2", "--lease-seconds", "2")
    partial, whole = gradient(seed=9), gradient()  # the first one loads kernels, which takes part of a lease

    async with talk(server.address) as make:
        steady = make("steady")
        await steady.train()
        async with beating(steady):
            async with talk(server.address) as make_other:
                dying = make_other("dying")
                await dying.train()
                await dying.receive(m.Assignment)
                await dying.push(partial)  # its chunks are never sent
            died = time.monotonic()
            for chunk in await steady.push(whole):
                await steady.send(chunk)
            assert (await steady.receive(m.Outcome)).decision is m.Decision.ACCEPTED
            began = time.monotonic()
            waiting = await steady.receive(m.Waiting)
            assert time.monotonic() - began < 2.0
            assert "rank 1 (dying, disconnected" in waiting.text
            assignment = await steady.receive(m.Assignment)
            while assignment.version == 0:
                assignment = await steady.receive(m.Assignment)
            assert (assignment.version, assignment.world) == (1, 1)
            assert 1.5 < time.monotonic() - died < 8
            reply = await status(steady)
            assert (reply.version, reply.pushes) == (1, 1)
            assert [(lost.worker, lost.rank) for lost in reply.lost] == [("dying", 1)]
    server.wait_for(r"rank 1 \(dying\) is lost: no message for")


def test_when_the_last_evaluator_is_killed_another_evaluates(daemons: Daemons) -> None:
    task = f"{SMALL}:evaluation=1.5"
    server = small_job(daemons, "--lease-seconds", "2", "--epochs", "1", workers=2, task=task)
    workers = daemons.workers(server, 2)
    by = server.wait_for(r"the job has waited .* rank \d \((w\d)\) to evaluate the last version").group(1)
    workers[int(by[1])].signal(signal.SIGKILL)
    reply = finished(server)
    assert workers[1 - int(by[1])].wait() == 0
    assert [done.epoch for done in reply.evaluations] == [1]
    assert [lost.worker for lost in reply.lost] == [by]


def test_a_worker_that_is_ready_only_when_the_job_is_over_may_go(daemons: Daemons) -> None:
    server = small_job(daemons, workers=1, task=f"{SMALL}:load=2,samples=16")
    quick = daemons.worker(server.address, "--worker-id", "quick")
    server.wait_for(r"\(quick\) joined")
    time.sleep(1.5)
    slow = daemons.worker(server.address, "--worker-id", "slow")
    server.wait_for(r"\(slow\) joined")
    finished(server)
    assert quick.wait() == 0
    assert slow.wait() == 0


def test_after_the_job_a_worker_has_nothing_to_do(daemons: Daemons) -> None:
    server = small_job(daemons, workers=1)
    daemons.worker(server.address)
    finished(server)
    late = daemons.worker(server.address)
    assert late.wait() == 0
    late.wait_for(
        "this worker has trained nothing: the job has finished: all of its 2 epochs are done. "
        "To train again, start"
    )


def test_connections_that_break_cost_nothing(daemons: Daemons) -> None:
    """Every connection is cut again and again, in pushes of several chunks; the bits are the same."""
    task = f"{SMALL}:width=20000,slow=0.02,samples=160"
    replies: list[m.StatusResponse] = []
    for disturbed in (False, True):
        server = small_job(daemons, "--learning-rate", "0.01", workers=2, task=task)
        relay = Relay(server.port)
        arguments = ("--give-up-seconds", "60", "--compressor", "none")
        workers = [
            daemons.worker(f"127.0.0.1:{relay.port}", "--worker-id", f"w{i}", *arguments) for i in range(2)
        ]
        server.wait_for("training samples from")
        cuts = 0
        while disturbed and not any("the job is finished" in text for text in server.messages):
            time.sleep(0.4)
            cuts += relay.cut()
        replies.append(finished(server))
        assert [worker.wait() for worker in workers] == [0, 0]
        assert cuts >= 4 or not disturbed
        relay.close()
        stop(server)
    calm, broken = replies
    assert broken.parameters_sha256 == calm.parameters_sha256
    assert [done.metrics for done in broken.evaluations] == [done.metrics for done in calm.evaluations]
    assert len(broken.evaluations) == 2


def test_a_server_that_was_paused_past_the_leases_goes_on_with_its_workers(daemons: Daemons) -> None:
    server = small_job(daemons, "--lease-seconds", "1", workers=2, task=f"{SMALL}:slow=0.05,samples=480")
    workers = daemons.workers(server, 2)
    poll(lambda: asked(server).version > 3, "no progress")
    server.signal(signal.SIGSTOP)
    time.sleep(3)
    server.signal(signal.SIGCONT)
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0]
    assert reply.epoch == 2


def test_a_frozen_worker_is_fenced_by_its_lease_and_comes_back(daemons: Daemons) -> None:
    server = small_job(daemons, "--lease-seconds", "1", workers=2, task=f"{SMALL}:slow=0.05,samples=800")
    workers = daemons.workers(server, 2)
    server.wait_for("training samples from")
    poll(lambda: asked(server).version > 5, "no progress")
    workers[1].signal(signal.SIGSTOP)
    server.wait_for(r"\(w1\) is lost: no message for")
    version = asked(server).version
    poll(lambda: asked(server).version > version + 3, "the run does not go on")
    workers[1].signal(signal.SIGCONT)
    poll(lambda: len([x for x in asked(server).members if x.attached]) == 2, "it does not come back")
    reply = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0]
    assert reply.epoch == 2


# ---- endings


def test_sigterm_ends_server_and_workers_in_good_order(daemons: Daemons) -> None:
    server = small_job(daemons, workers=2, task=f"{SMALL}:slow=0.05,samples=9600")
    workers = daemons.workers(server, 2)
    server.wait_for("training samples from")
    poll(lambda: asked(server).version > 2, "no progress")
    assert stop(server) == 143
    assert [worker.wait() for worker in workers] == [5, 5]
    workers[0].wait_for("the server is shutting down: it was told to stop .*; start gc-server again")


def test_a_worker_that_is_told_to_stop_leaves_and_is_not_waited_for(daemons: Daemons) -> None:
    server = small_job(daemons, "--lease-seconds", "60", workers=2, task=f"{SMALL}:slow=0.05,samples=160")
    workers = daemons.workers(server, 2)
    server.wait_for("training samples from")
    # Before the first round, the job would go on waiting for two workers.
    poll(lambda: asked(server).version > 0, "no progress")
    workers[1].signal(signal.SIGTERM)
    assert workers[1].wait() == 143
    server.wait_for(r"rank \d \(w1\) left: stopped by SIGTERM")
    reply = finished(server)
    assert workers[0].wait() == 0
    assert reply.epoch == 2


def test_when_the_server_is_gone_a_worker_gives_up_with_a_reason(daemons: Daemons) -> None:
    server = small_job(daemons, workers=1, task=f"{SMALL}:slow=0.05,samples=9600")
    worker = daemons.worker(server.address, "--give-up-seconds", "2")
    worker.wait_for("connected as rank 0")
    server.signal(signal.SIGKILL)
    assert worker.wait() == 4
    worker.wait_for(r"cannot reach 127\.0\.0\.1:\d+ after 2 s and \d attempts: .*is gc-server running")


def test_a_diverged_job_ends_with_a_reason(daemons: Daemons) -> None:
    arguments = ("--learning-rate", "3e38", "--optimizer", "sgd:weight_decay=100")
    server = small_job(daemons, *arguments, workers=1)
    worker = daemons.worker(server.address, "--compressor", "none")
    assert server.wait() == 7
    server.wait_for("no longer finite at version .*lower --learning-rate")
    assert worker.wait() == 5


# ---- what can be wrong with the commands


def test_a_port_in_use_is_said(daemons: Daemons) -> None:
    server = daemons.server()
    second = Daemon("gradwire.server.cli", ("--host", "127.0.0.1", "--port", str(server.port)))
    assert second.wait() == 2
    assert f"--port {server.port}: cannot listen on 127.0.0.1:{server.port}" in second.log


def test_an_output_that_cannot_be_written_is_said_at_once() -> None:
    server = Daemon("gradwire.server.cli", ("--port", "0", "--output", "/no/such/folder/model.safetensors"))
    assert server.wait() == 2
    assert "expected a file in a folder that exists and can be written to, got '/no/such/folder" in server.log


def test_too_few_workers_for_the_aggregation_are_said_at_once() -> None:
    server = Daemon("gradwire.server.cli", ("--aggregation", "krum:wrong=2", "--min-workers", "6"))
    assert server.wait() == 2
    assert "--min-workers 6: --mode sync with --aggregation krum:wrong=2 needs at least 7" in server.log


def test_an_http_port_in_use_is_said_if_it_was_chosen() -> None:
    taken = Relay(1)
    arguments = ("--host", "127.0.0.1", "--port", "0", "--http-port", str(taken.port))
    server = Daemon("gradwire.server.cli", arguments)
    assert server.wait() == 2
    assert f"--http-port {taken.port} on 127.0.0.1: Address already in use; choose another port" in server.log
    taken.close()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "--server is required"),
        (("--server", "127.0.0.1:1", "--connect-seconds", "0.5"), 4, "cannot reach 127.0.0.1:1 after 0.5 s"),
        (("--server", "no.such.host.invalid", "--connect-seconds", "0"), 4, "no.such.host.invalid:50051"),
        (("--server", "127.0.0.1:99999"), 2, "a port from 1 to 65535"),
        (
            ("--server", "x", "--compressor", "5bit"),
            2,
            "known compressors: 1bit, 2bit, 4bit, 8bit, bf16, dgc, fp16",
        ),
        (("--server", "x", "--compressor", "4bit:depth=3"), 2, "unknown key 'depth'"),
        (("--server", "x", "--device", "cuda"), 2, "no usable CUDA device"),
    ],
)
def test_what_is_wrong_with_a_workers_command_is_said(
    arguments: tuple[str, ...], code: int, words: str
) -> None:
    worker = Daemon("gradwire.worker.cli", arguments)
    assert worker.wait() == code
    assert words in worker.log


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("no_such_module:task", "there is no module 'no_such_module'"),
        ("small_tasks:raises_while_loading", "OSError: the data set is not here"),
        ("small_tasks:raises_while_training", "ZeroDivisionError: no such loss"),
        ("small_tasks:not_finite", "in 10 steps in a row"),
        ("small_tasks:doubles", "expected float32, got torch.float64; convert the model with .float()"),
    ],
)
def test_a_task_that_cannot_be_trained_ends_the_worker_and_the_server_hears_why(
    daemons: Daemons, task: str, words: str
) -> None:
    server = daemons.server("--task", task)
    worker = daemons.worker(server.address, "--allow-task", "small_tasks,no_such_module", "--worker-id", "w0")
    assert worker.wait() == 6
    assert words in worker.log
    server.wait_for("is lost: ")
    assert words in server.log
    job = server.wait_for("; job ([0-9a-f]+): ").group(1)
    for line in (worker.fields(re.escape(words)), server.fields("is lost: ")):
        assert (line["job"], line["worker"], line["rank"]) == (job, "w0", 0)


# ---- what operators see


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def sample(text: str, name: str) -> float:
    text = re.sub(r'job_id="\w+",?', "", text).replace(",}", "}").replace("{}", "")
    return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name + " ")))


def test_probes_and_metrics_of_server_and_worker(daemons: Daemons) -> None:
    http, worker_http = free_port(), free_port()
    server = small_job(daemons, "--http-port", str(http), workers=1, task=f"{SMALL}:slow=0.1,samples=480")
    assert get(http, "/livez") == (200, "alive\n")
    assert get(http, "/readyz") == (200, "empty\n")
    assert get(http, "/nothing")[0] == 404
    worker = daemons.worker(server.address, "--http-port", str(worker_http))
    server.wait_for("after 1 epoch, version 60")
    text = server_text = get(http, "/metrics")[1]
    assert sample(text, 'gradwire_server_wire_bytes_total{compressor="4bit",direction="up"}') > 1000
    assert sample(text, 'gradwire_server_raw_bytes_total{compressor="auto",direction="down"}') > 1000
    assert sample(text, 'gradwire_server_pushes_total{compressor="4bit"}') >= 60
    assert sample(text, "gradwire_server_members") == sample(text, "gradwire_server_min_workers") == 1
    assert sample(text, "gradwire_server_target_epoch") >= sample(text, "gradwire_server_epoch") > 0
    assert sample(text, 'gradwire_server_phase{phase="running"}') == 1
    assert sample(text, "gradwire_server_round_seconds_count") >= 60
    assert sample(text, 'gradwire_server_validation{metric="accuracy"}') == 0.5
    text = get(worker_http, "/metrics")[1]
    assert sample(text, 'gradwire_worker_pushes_total{decision="accepted"}') >= 55
    assert sample(text, "gradwire_worker_residual_norm") > 0
    assert sample(text, 'gradwire_worker_seconds_total{activity="computing"}') > 1
    assert get(worker_http, "/readyz")[0] == 200
    worker.signal(signal.SIGTERM)
    worker.wait()
    stop(server)
    leaving = worker.fields("SIGTERM: leaving")
    assert leaving["version"] >= 60
    labels = f'{{mode="sync",version="{__version__}"}}'
    assert sample(server_text, f"gradwire_server_info{labels}") == 1
    assert sample(text, f"gradwire_worker_info{labels}") == 1
    named = [
        line for each in (text, server_text) for line in each.splitlines() if line.startswith("gradwire_")
    ]
    assert all(f'job_id="{leaving["job"]}"' in line for line in named)
    assert server.fields("after 1 epoch, version 60")["version"] >= 60


def test_protected_mode_answers_only_this_machine(daemons: Daemons) -> None:
    """Over an address of this machine that is not a loopback one, the server sees a remote peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; chooses the address that packets would leave from
        mine = str(probe.getsockname()[0])
    for insecure in (False, True):
        server = Daemon(
            "gradwire.server.cli",
            ("--port", "0", "--host", "0.0.0.0", *(("--insecure",) if insecure else ())),
        )
        try:
            port = int(server.wait_for(r"listening on 0\.0\.0\.0:(\d+)").group(1))

            async def join(address: str) -> None:
                async with talk(address) as make:
                    await make().join()

            asyncio.run(join(f"127.0.0.1:{port}"))
            if insecure:
                asyncio.run(join(f"{mine}:{port}"))
            else:
                with pytest.raises(
                    Refused, match=r"protected mode.*start gc-server with --tls-cert.*--insecure"
                ):
                    asyncio.run(join(f"{mine}:{port}"))
        finally:
            server.end()


def test_traffic_is_counted_with_what_it_would_be_uncompressed(daemons: Daemons) -> None:
    server = daemons.server(*("--task", "digits", "--min-workers", "2", "--epochs", "2", "--entropy", "on"))
    daemons.workers(server, 2)
    reply = finished(server)
    traffic = reply.traffic
    elements = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    assert traffic.raw_bytes_up == (reply.pushes + 1) * elements * 4  # and the initial parameters
    assert traffic.compressed_raw_bytes_up == reply.pushes * (elements - 394) * 4
    assert np.isclose(traffic.compressed_raw_bytes_up / traffic.compressed_payload_bytes_up, 8.0, rtol=0.03)
    assert traffic.wire_bytes_up < 0.8 * traffic.payload_bytes_up  # packed
    # One snapshot for the second worker, then one update per version for both.
    assert traffic.raw_bytes_down == (1 + 2 * reply.version) * elements * 4
    assert np.isclose(traffic.payload_bytes_down, (4 + reply.version) * elements, rtol=0.03)
    assert traffic.wire_bytes_down < 0.8 * traffic.payload_bytes_down
