"""Refusals of the service itself, before the state machine hears of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gradwire.common.configuration import UsageError
from gradwire.common.version import __version__
from gradwire.compressors.registry import BUILT_IN
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.refusal import Refused
from gradwire.proto.service import Malformed
from gradwire.server import checks, cli
from gradwire.server.calls import service as service_module
from gradwire.server.calls.access import Access
from gradwire.server.calls.service import Service
from gradwire.server.conductor import Conductor
from gradwire.server.job import roster
from gradwire.server.job.core import Core
from gradwire.server.job.modes import registry
from gradwire.server.metrics import ServerMetrics
from gradwire.server.shard.reports import Reported
from gradwire.settings import ServerSettings

from ..compressors.window import WINDOW

MANIFEST = Manifest((m.Tensor(name="weight", shape=(8, 6), dtype="float32"),), 64)


def service_of(mode: str, **rules: Any) -> Service:
    options, parsed = ServerSettings(mode=mode, min_workers=3, **rules), registry.parse(mode)
    shard: Any = SimpleNamespace(reported=Reported())
    return Service(
        Conductor(Core(options, parsed), ServerMetrics("none"), shard=shard),
        options,
        parsed,
        "job",
        Access(options),
    )


def join(service: Service, compressor: str, worker: str = "w0", software: str = "") -> Any:
    """The reply. Raises AssertionError with the text of a refusal."""

    async def abort(code: Any, text: str, metadata: Any = ()) -> None:
        raise AssertionError(text)

    async def call() -> Any:
        context: Any = SimpleNamespace(
            peer=lambda: "ipv4:127.0.0.1:7", abort=abort, invocation_metadata=tuple
        )
        request = m.JoinRequest(worker=worker, incarnation=1, compressor=compressor, software=software)
        return await service.handlers()["Join"](request, context)

    return asyncio.run(call())


@pytest.mark.parametrize("compressor", ["4bit", "bf16", "topk:ratio=10", "one-that-the-server-has-not"])
def test_a_mode_that_multiplies_losses_refuses_lossy_compressors(compressor: str) -> None:
    service = service_of("sync:stragglers=1")
    with pytest.raises(AssertionError, match="--compressor none"):
        join(service, compressor)
    assert join(service, "none").rank == 0, "who was refused has no rank"


def test_a_worker_of_another_release_is_named_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    join(service_of("sync"), "none", software=__version__)
    assert "has gradwire" not in caplog.text
    join(service_of("sync"), "none", software="0.0.9")
    assert f"w0 has gradwire '0.0.9', and this server {__version__}; run the same release" in caplog.text


@pytest.mark.parametrize(("jobs", "own"), [("4bit", "window"), ("window", "4bit")])
def test_a_worker_with_other_bases_than_the_job_is_refused(
    jobs: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "window", WINDOW)
    service = service_of("sync", compressor=jobs)
    with pytest.raises(
        AssertionError, match=f"'w0'.*expected {jobs}, the job's.*got {own}.*without --compre"
    ):
        join(service, own)
    assert join(service, jobs).rank == 0


@pytest.mark.parametrize(
    ("mode", "more", "why"),
    [
        ("stale:bound=2", {}, "--mode stale:bound=2"),
        ("async", {}, "--mode async"),
        ("local", {}, "--mode local"),
        ("coded", {"min_workers": 4}, "--mode coded"),
        ("sync:redundancy=2", {"min_workers": 2}, "--mode sync:redundancy=2"),
        ("sync:stragglers=1", {"min_workers": 2}, "--mode sync:stragglers=1"),
        ("sync", {"aggregation": "median", "min_workers": 3}, "--aggregation median"),
    ],
)
def test_a_job_that_cannot_have_bases_refuses_them_at_the_start(
    mode: str, more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILT_IN, "window", WINDOW)
    with pytest.raises(UsageError, match=f"--compressor window: .* not with {why}: .*; use --.*4bit"):
        checks.check(ServerSettings(compressor="window", mode=mode, **more))
    checks.check(ServerSettings(compressor="window", mode="sync:backup=1", min_workers=2))


@pytest.mark.parametrize(
    "excluding",
    [
        "--optimizer adam",
        "--mode stale",
        "--aggregation median --min-workers 3",
        "--downlink 4bit",
        "--script",
    ],
)
def test_auto_cannot_choose_bases_where_they_are_refused_or_lose(
    excluding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, chosen in ((excluding, "auto:compressor=4bit"), ("--optimizer sgd:momentum=0.9", "auto")):
        assert cli.main([*arguments.split(), "--compressor", "auto", "--print-config"]) == 0
        assert re.search(rf"^compressor += '{chosen}'", capsys.readouterr().out, re.M)


def test_a_worker_of_a_job_whose_auto_may_have_bases_has_no_compressor_of_its_own() -> None:
    service = service_of("sync", compressor="auto")
    join(service, "")
    join(service, "auto")
    with pytest.raises(AssertionError, match=r"expected auto, the job's, .*without --compressor"):
        join(service, "4bit", "w1")


@pytest.mark.parametrize(
    ("named", "used"),
    [("1bit:decay=0.9", "1bit:decay=0.9"), ("auto:compressor=topk/ratio=4", "topk:ratio=4")],
)
def test_a_worker_that_names_no_compressor_has_the_jobs(named: str, used: str) -> None:
    service = service_of("sync", compressor=named, preset="low-communication")
    reply = join(service, "")
    join(service, "8bit", "w1")
    assert reply.job.settings["compressor"] == named
    assert reply.job.settings["preset"] == "low-communication"
    members = service._core.state.roster.members  # pyright: ignore[reportPrivateUsage]
    assert {name: member.compressor for name, member in members.items()} == {"w0": used, "w1": "8bit"}


@pytest.mark.parametrize("mode", ["sync", "sync:backup=1", "stale"])
def test_other_modes_take_them(mode: str) -> None:
    assert join(service_of(mode), "4bit").rank == 0


@pytest.mark.parametrize(
    ("mode", "aggregation", "told"),
    [
        ("sync", "mean", "both"),
        ("sync", "median", "both"),
        ("sync", "krum:wrong=1", "backward"),
        ("sync:backup=1", "mean", "backward"),
        ("sync:redundancy=2", "mean", "backward"),
        ("sync:stragglers=1", "mean", "backward"),
        ("stale", "mean", "backward"),
        ("local", "mean", "both"),
        ("local:delayed=on", "mean", "backward"),
    ],
)
def test_workers_hear_of_overlap_both_only_where_parts_go_down_early(
    mode: str, aggregation: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Elsewhere a step that is not finite is to be abandoned whole, and others may need all of it."""
    service = service_of(mode, overlap="both", aggregation=aggregation)
    assert service.job.overlap == told
    said = [record.getMessage() for record in caplog.records if "--overlap both" in record.getMessage()]
    assert len(said) == (told != "both")
    assert all(mode in text and "replaced by backward" in text for text in said)


def test_the_line_about_a_refused_stream_names_address_and_worker(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC has no address of a peer that has disconnected, as one does after a malformed message."""
    service = service_of("sync")
    peers = ["ipv4:10.0.0.9:7"]

    async def abort(code: Any, text: str, metadata: Any) -> None:
        pass

    async def requests() -> AsyncIterator[Any]:
        yield m.InitializeHeader(job="job", worker="w0", incarnation=1, manifest=MANIFEST.to_message())
        yield Malformed("no message of this protocol")

    async def run() -> None:
        context: Any = SimpleNamespace(
            peer=lambda: peers.pop() if peers else "", abort=abort, invocation_metadata=tuple
        )
        await service.handlers()["Initialize"](requests(), context)

    service._access.remote = True  # pyright: ignore[reportPrivateUsage]
    join(service, "none")
    asyncio.run(run())
    assert caplog.messages[-1].startswith(
        "refused ipv4:10.0.0.9:7, worker 'w0': no message of this protocol (malformed)"
    )


def test_the_worker_of_a_task_names_no_epochs() -> None:
    service, context = service_of("sync"), cast("Any", SimpleNamespace(invocation_metadata=tuple))
    join(service, "none")

    async def requests() -> AsyncIterator[Any]:
        manifest = replace(MANIFEST, epochs=3).to_message()
        yield m.InitializeHeader(job="job", worker="w0", incarnation=1, manifest=manifest)

    with pytest.raises(Refused, match="epochs"):
        asyncio.run(service._initialize(requests(), context))  # pyright: ignore[reportPrivateUsage]


def test_a_stream_that_says_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_MESSAGE_S", 0.01)
    ended: list[str] = []

    async def abort(code: Any, text: str, metadata: Any) -> None:
        ended.append(text)

    async def silence() -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield None

    async def call(name: str) -> None:
        peer, metadata = (lambda: "ipv4:127.0.0.1:7"), tuple
        context: Any = SimpleNamespace(peer=peer, abort=abort, invocation_metadata=metadata)
        await service_of("sync").handlers()[name](silence(), context)

    for name in ("Exchange", "Initialize", "PutState"):
        asyncio.run(call(name))
    assert [text.partition(" within")[0] for text in ended] == [
        f"stream: expected a {what}" for what in ("Hello", "InitializeHeader", "StateHeader")
    ]


def test_a_job_has_so_many_members_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MAX_MEMBERS", 2)
    members = roster.Roster(lease_s=10)
    for worker in ("a", "b"):
        members.join(worker, 1, "none", 0.0)
    with pytest.raises(Refused, match="at most 2 members"):
        members.join("c", 1, "none", 0.0)
    members.join("a", 2, "none", 60.0)  # who replaces itself is none more
    assert set(members.members) == {"a", "b"}


def test_joins_beyond_the_rate_are_put_off_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "JOINS_PER_S", 0.001)
    monkeypatch.setattr(service_module, "JOINS_AT_ONCE", 2)
    service = service_of("sync")
    assert [join(service, "4bit", worker).rank for worker in "ab"] == [0, 1]
    with pytest.raises(AssertionError, match=r"more than 0\.001 workers per second join; try again"):
        join(service, "4bit", "c")
