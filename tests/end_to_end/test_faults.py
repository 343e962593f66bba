"""Faults of the link between real processes: rows of docs/reference/faults.md that other tests do not have.

`--seed` of the relay's plan is in the note of whatever fails. `-m slow` has what takes minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import namespaces
import numpy as np
import pytest
from daemons import (
    ALLOWED,
    MANIFEST,
    Daemon,
    Daemons,
    Raw,
    Server,
    asked,
    beating,
    gradient,
    poll,
    state_of,
    status,
    talk,
)
from namespaces import Namespace
from relay import KINDS, Plan, Relay, troubled
from test_modes import replayed
from test_training import SMALL, finished, small_job

from gradwire.compressors import Payload, decode
from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason
from gradwire.proto.transfer import values_assembly

TASK = f"{SMALL}:width=2000,slow=0.02,samples=128"
JOB = ("--learning-rate", "0.01", "--lease-seconds", "60", "--downlink", "4bit")
WORKER = ("--compressor", "4bit:momentum=0.9", "--give-up-seconds", "60")


def started(daemons: Daemons, address: str) -> list[Daemon]:
    return [daemons.worker(address, "--worker-id", f"w{index}", *WORKER) for index in range(2)]


@pytest.fixture(scope="module")
def calm() -> Iterator[m.StatusResponse]:
    """What the job comes to if nothing happens."""
    daemons = Daemons()
    try:
        server = small_job(daemons, *JOB, workers=2, task=TASK)
        started(daemons, server.address)
        yield finished(server)
    finally:
        daemons.end()


def troubled_run(daemons: Daemons, plan: Plan) -> tuple[m.StatusResponse, list[str]]:
    """What the job comes to over links with these faults; and which happened."""
    server = small_job(daemons, *JOB, workers=2, task=TASK)
    with troubled(server.port, plan) as relay:
        workers = started(daemons, f"127.0.0.1:{relay.port}")
        reply = finished(server)
        assert [worker.wait() for worker in workers] == [0, 0]
        return reply, relay.happened


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_of_a_link_leaves_the_bits_of_a_calm_run(
    daemons: Daemons, calm: m.StatusResponse, kind: str
) -> None:
    """Residuals, momentum and a downlink that loses are in play: whatever counted twice or not would show."""
    plan = Plan(seed=1, kinds=(kind,), gap_bytes=(5_000, 60_000), hold_s=0.5, faults=4)
    reply, happened = troubled_run(daemons, plan)
    assert reply.parameters_sha256 == calm.parameters_sha256, happened
    assert (reply.version, reply.pushes) == (calm.version, calm.pushes)
    assert reply.repeated_samples == 0
    assert len(happened) == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_any_mixture_of_faults_leaves_the_bits_of_a_calm_run(
    daemons: Daemons, calm: m.StatusResponse, seed: int
) -> None:
    reply, happened = troubled_run(daemons, Plan(seed=seed, gap_bytes=(5_000, 120_000), faults=12))
    assert reply.parameters_sha256 == calm.parameters_sha256, happened
    assert (reply.version, reply.pushes) == (calm.version, calm.pushes)


# ---- lost, repeated and late messages


async def parameters(raw: Raw) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """All of them, as the server has them, end to end."""
    call = raw.stub.fetch(m.FetchRequest())
    header = await call.read()
    assembly = values_assembly(header.version, MANIFEST, worker="test")
    while not assembly.complete:
        assembly.add(await call.read())
    return np.concatenate([payload.data.view(np.float32) for payload in assembly.finish()])


def values(payloads: list[Payload]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.concatenate([decode(payload) for payload in payloads])


async def again(raw: Raw) -> None:
    """A new stream for the same worker, after the old one broke: the channel may not have seen that yet."""
    for _ in range(100):
        try:
            await raw.attach()
            await raw.receive(m.Welcome)
            return
        except grpc.aio.AioRpcError as error:
            # INTERNAL: the old connection breaks in the moment in which the hello is written to it.
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
                raise
            await asyncio.sleep(0.05)
    raise AssertionError("the server is not reached again")


async def pushed(raw: Raw, seed: int, given: m.Assignment) -> None:
    for message in await raw.push(
        gradient(seed=seed), seq=given.id, assignment=given.id, base_version=given.version
    ):
        await raw.send(message)


async def until(condition: Callable[[m.StatusResponse], bool], raw: Raw) -> m.StatusResponse:
    for _ in range(600):
        if condition(reply := await status(raw)):
            return reply
        await asyncio.sleep(0.05)
    raise AssertionError(f"it does not come to that: {await status(raw)}")


def test_a_push_whose_answer_is_lost_counts_once_before_and_after_its_round_closes(daemons: Daemons) -> None:
    """Rows 1 to 3: the first copy waits at the barrier, is being applied, or has been: one contribution."""
    server = daemons.server(
        "--task", "digits", "--min-workers", "2", "--learning-rate", "0.5", "--downlink", "none"
    )
    relay = Relay(server.port)

    async def run() -> None:
        async with talk(server.address) as make, talk(f"127.0.0.1:{relay.port}") as make_far:
            steady, far = make("steady"), make_far("far")
            for raw in (steady, far):
                await raw.train()
            given = [await raw.receive(m.Assignment) for raw in (steady, far)]
            async with beating(steady):
                relay.partition("down")
                await pushed(far, 7, given[1])
                await until(lambda reply: reply.pushes == 1, steady)
                relay.cut()  # the outcome was on its way
                relay.heal()
                await again(far)
                await pushed(far, 7, given[1])
                outcome = await far.receive(m.Outcome)
                assert (outcome.seq, outcome.decision, outcome.version) == (
                    given[1].id,
                    m.Decision.ACCEPTED,
                    1,
                )
                assert (await status(steady)).pushes == 1
                await pushed(steady, 8, given[0])
                await until(lambda reply: reply.version == 1, steady)
                await again(far)
                await pushed(far, 7, given[1])
                assert await far.receive(m.Outcome) == outcome, "the original one, with the original version"
                reply = await status(steady)
                assert (reply.version, reply.pushes) == (1, 2)
                expected = -0.5 * (values(gradient(seed=7)) + values(gradient(seed=8))) / 2
                np.testing.assert_allclose(await parameters(steady), expected, rtol=1e-5)

    try:
        asyncio.run(run())
    finally:
        relay.close()


async def test_pushes_that_come_again_much_later_change_nothing_and_little_is_remembered(
    daemons: Daemons,
) -> None:
    """Row 4: the newest outcomes are told again, older ones are forgotten, and neither counts."""
    server = daemons.server("--task", "digits", "--min-workers", "1")

    async with talk(server.address) as make:
        raw = make()
        await raw.train()
        sent: list[tuple[int, m.Assignment, m.Outcome]] = []
        for seed in range(24):
            given = await raw.receive(m.Assignment)
            await pushed(raw, seed, given)
            sent.append((seed, given, await raw.receive(m.Outcome)))
        before = state_of(await until(lambda reply: reply.version == 24, raw))
        held = await parameters(raw)
        for place in (23, 20, 22, 9):
            seed, given, outcome = sent[place]
            await pushed(raw, seed, given)
            assert await raw.receive(m.Outcome) == outcome
        seed, given, _ = sent[0]
        await pushed(raw, seed, given)
        outcome = await raw.receive(m.Outcome)
        assert outcome.decision is m.Decision.REFUSED
        assert "raw" in outcome.refusal.message
        assert state_of(await status(raw)) == before
        assert (await parameters(raw)).tobytes() == held.tobytes()


# ---- partitions


def test_a_partition_one_way_then_both_then_healed(daemons: Daemons, tmp_path: Path) -> None:
    partitioned(daemons, tmp_path, lease_s=1.5, one_way_s=3, full_s=3)


@pytest.mark.slow
def test_a_partition_of_a_minute(daemons: Daemons, tmp_path: Path) -> None:
    partitioned(daemons, tmp_path, lease_s=10, one_way_s=20, full_s=60)


def partitioned(daemons: Daemons, folder: Path, *, lease_s: float, one_way_s: float, full_s: float) -> None:
    """Row 13: the lease ends, the run goes on, the worker comes back, and the log is applied once."""
    record = folder / "record"
    server = daemons.server(
        *("--task", "small_tasks:slow_digits", "--epochs", str(int(2 + full_s / 3)), "--seed", "1"),
        *("--min-workers", "2", "--learning-rate", "0.05"),
        *("--lease-seconds", str(lease_s), "--downlink", "none"),
        program=("recording_server", str(record)),
    )
    relay = Relay(server.port)
    try:
        near = daemons.worker(server.address, "--worker-id", "near")
        far = daemons.worker(f"127.0.0.1:{relay.port}", "--worker-id", "far", "--give-up-seconds", "300")
        poll(lambda: asked(server).version > 3, "no progress")
        relay.partition("up")
        server.wait_for(r"\(far\) is lost: no message for")
        version = asked(server).version
        time.sleep(max(0.0, one_way_s - lease_s))
        relay.partition("up", "down")
        time.sleep(full_s)
        assert asked(server).version > version, "the run goes on without it"
        relay.heal()
        healed = time.monotonic()
        poll(lambda: sum(member.attached for member in asked(server).members) == 2, "it stays away")
        assert time.monotonic() - healed < 45
        reply = finished(server)
        assert [near.wait(), far.wait()] == [0, 0]
    finally:
        relay.close()
    expected, applied = replayed(record, 0.05)
    assert applied == reply.pushes, "every acknowledged push is in the log once"
    digest = hashlib.sha256()
    for value in expected:
        digest.update(value.tobytes())
    assert digest.hexdigest() == reply.parameters_sha256, "what the log comes to, to the bit"


# ---- packets that are lost, between network namespaces; as root


def outside(*arguments: str) -> Server:
    """A server that a namespace may reach."""
    return Server("--insecure", "--no-stay", *arguments, host="0.0.0.0")


def inside(server: Server, ended: Namespace, *arguments: str) -> Daemon:
    first = ("--server", f"{ended.host}:{server.port}", *ALLOWED, "--threads", "1")
    return Daemon("gradwire.worker.cli", (*first, *arguments), start=ended.start)


@pytest.mark.slow
@pytest.mark.skipif(not namespaces.available(), reason="needs root, ip and tc")
def test_a_partition_between_network_namespaces(daemons: Daemons) -> None:
    """Row 13: no packet comes through, one way and then neither, and nobody is told."""
    server = outside(
        *("--task", "small_tasks:slow_digits", "--epochs", "30", "--seed", "1", "--min-workers", "2"),
        *("--lease-seconds", "5"),
    )
    started: list[Daemon] = [server]
    with namespaces.namespace() as ended:
        try:
            near = daemons.worker(server.address, "--worker-id", "near")
            far = inside(server, ended, "--worker-id", "far", "--give-up-seconds", "300")
            started += [near, far]
            server.wait_for("after 1 epoch,")
            ended.drop("up")
            server.wait_for(r"\(far\) is lost: no message for")
            ended.drop("down")
            time.sleep(60)
            ended.heal()
            healed = time.monotonic()
            poll(lambda: sum(member.attached for member in asked(server).members) == 2, "it stays away")
            assert time.monotonic() - healed < 45
            reply = finished(server)
            assert [daemon.wait() for daemon in started] == [0, 0, 0]
            assert reply.epoch == 30
        finally:
            for daemon in started:
                daemon.end()


@pytest.mark.slow
@pytest.mark.skipif(not namespaces.available(), reason="needs root, ip and tc")
def test_packets_that_are_lost_change_nothing() -> None:
    """Row 14: at 1 Mbit/s, with what does not fit in a queue of four packets lost: the same bits."""
    found: list[str] = []
    for narrow in (False, True):
        server = outside(
            *("--task", f"{SMALL}:width=1000", "--min-workers", "2", "--epochs", "2", "--batch-size", "8"),
            *("--seed", "3", "--learning-rate", "0.01"),
        )
        started: list[Daemon] = [server]
        with namespaces.namespace() as ended:
            try:
                if narrow:
                    ended.narrow("1mbit")
                started += [inside(server, ended, "--worker-id", f"w{index}") for index in range(2)]
                reply = finished(server)
                assert [daemon.wait() for daemon in started] == [0, 0, 0]
                found.append(reply.parameters_sha256)
                assert reply.lost == ()
            finally:
                for daemon in started:
                    daemon.end()
    assert found[0] == found[1]


# ---- slow and lossy links


def slow_link(daemons: Daemons, *, bits_per_s: float, delay_s: float, faults: int) -> None:
    """Row 14: the bits are those of a clean link, and nobody dials more often than the link breaks."""
    replies: list[m.StatusResponse] = []
    dialled = 0
    for plan in (None, Plan(seed=3, kinds=("stall", "delay"), gap_bytes=(4_000, 40_000), faults=faults)):
        server = small_job(
            daemons,
            *("--lease-seconds", "10", "--learning-rate", "0.01"),
            workers=2,
            task=f"{SMALL}:width=1000",
        )
        relay = Relay(server.port)
        if plan is not None:
            relay = Relay(server.port, bits_per_s / 8, down_per_s=bits_per_s / 8, delay_s=delay_s, plan=plan)
        workers = [daemons.worker(f"127.0.0.1:{relay.port}", "--worker-id", f"w{i}") for i in range(2)]
        replies.append(finished(server))
        assert [worker.wait() for worker in workers] == [0, 0]
        dialled = relay.accepted
        relay.close()
    clean, slow = replies
    assert slow.parameters_sha256 == clean.parameters_sha256
    assert dialled <= 4, "the connections of two workers do not break because they are slow"


def test_a_slow_link_of_long_delay_changes_nothing(daemons: Daemons) -> None:
    slow_link(daemons, bits_per_s=2e6, delay_s=0.03, faults=6)


@pytest.mark.slow
def test_a_link_of_a_megabit_and_300_ms_changes_nothing(daemons: Daemons) -> None:
    slow_link(daemons, bits_per_s=1e6, delay_s=0.15, faults=40)


# ---- bad input


async def test_a_worker_that_sends_absurd_gradients_does_not_move_the_median(daemons: Daemons) -> None:
    """Row 17 of docs/reference/faults.md, over the wire: the mean is not protected; the median stays among
    the gradients of the other workers."""
    server = daemons.server(
        "--task", "digits", "--min-workers", "3", "--aggregation", "median", "--learning-rate", "1"
    )

    async with talk(server.address) as make:
        raws = [make(f"w{index}") for index in range(3)]
        for raw in raws:
            await raw.train()
        given = [await raw.receive(m.Assignment) for raw in raws]
        right = [gradient("none", seed) for seed in (1, 2)]
        wrong = gradient("none", 3)
        for payload in wrong:
            payload.data.view(np.float32)[:] = 1e30
        for raw, assignment, payloads in zip(raws, given, [*right, wrong], strict=True):
            for message in await raw.push(payloads, assignment=assignment.id):
                await raw.send(message)
        await until(lambda reply: reply.version == 1, raws[0])
        both = np.stack([values(payloads) for payloads in right])
        found = -(await parameters(raws[0]))
        assert (found >= both.min(0)).all()
        assert (found <= both.max(0)).all()


async def test_parts_that_never_end_take_bounded_memory(daemons: Daemons) -> None:
    """Row 21: headers of parts whose bytes never come."""
    server = daemons.server("--task", "digits", "--min-workers", "1")

    async with talk(server.address) as make:
        raw = make()
        await raw.train()
        await raw.receive(m.Assignment)
        before = state_of(await status(raw))
        for seq in range(1, 6):
            await raw.push(gradient(seed=seq), seq=seq)
        outcome = await raw.receive(m.Outcome)
        assert (outcome.seq, outcome.decision) == (5, m.Decision.REFUSED)
        assert outcome.refusal.reason is Reason.SIZE
        assert "worker 'raw'" in outcome.refusal.message
        assert "4 incomplete parts at once" in outcome.refusal.message
        assert state_of(await status(raw)) == before


# ---- endings


def test_a_second_signal_ends_a_server_at_once(daemons: Daemons) -> None:
    """Row 24: where a stream does not end, the first one would wait for it."""
    server = daemons.server("--task", "digits", "--min-workers", "1")
    server.signal(signal.SIGSTOP)
    server.signal(signal.SIGTERM)
    server.signal(signal.SIGINT)
    server.signal(signal.SIGCONT)
    assert server.wait(30) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
