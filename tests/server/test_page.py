"""The page at the HTTP port: its policy, its data, and the bounds of both."""

from __future__ import annotations

import asyncio
import json
import re
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest
from stepping import core_of

from gradwire.proto.refusal import Reason
from gradwire.server.calls import page as page_file
from gradwire.server.calls.page import Page, Seen, look
from gradwire.server.conductor import Conductor
from gradwire.server.history import POINTS, History
from gradwire.server.job import events as e
from gradwire.server.job.roster import MAX_MEMBERS
from gradwire.server.metrics import SENDER, Sender, ServerMetrics
from gradwire.server.shard.reports import Reported
from gradwire.settings import JobTerms

# Each of these could load something, or make markup of a text.
NEVER = r"[nr]HTML|insertAdjacent|document\.write|eval\(|Function\(|src=|href=|url\(|@import|style=|\bon\w+="


async def test_the_page_loads_nothing_and_makes_no_markup_of_texts() -> None:
    answer = Page(str, lambda: pytest.fail("it needs no state")).html()
    text = answer.body.decode()
    assert re.findall(r"\w+://[^\"'\s]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.findall(NEVER, text)
    policy = dict(answer.headers)["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


async def test_many_readers_of_a_busy_server_cost_it_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def see() -> Any:
        looks.append(1)
        return SimpleNamespace(to_json=lambda: "{}")

    starting = ["--state x is being read"]
    monkeypatch.setattr(page_file, "FRESH_S", 0.0)
    page = Page(lambda: starting[0], see)
    assert page.data()[0::2] == ("503 Service Unavailable", b"--state x is being read\n")
    starting[0] = ""
    monkeypatch.setattr(page_file, "PATIENCE_S", 0.01)
    assert b"too busy" in page.data().body  # the loop is here
    monkeypatch.setattr(page_file, "PATIENCE_S", 60.0)
    monkeypatch.setattr(page_file, "FRESH_S", 600.0)
    answers = await asyncio.gather(*(asyncio.to_thread(page.data) for _ in range(3)))
    assert [(each.status, each.body) for each in answers] == [("200 OK", b"{}")] * 3
    assert len(looks) == 1


def test_what_is_unknown_is_null() -> None:
    shard: Any = SimpleNamespace(reported=Reported(), start=lambda: None, close=lambda: None)
    conductor = Conductor(core_of(min_workers=2), ServerMetrics("none"), shard=shard)
    conductor.happen(e.Joined(worker="</script>", incarnation=1, compressor="none"))
    shown: Seen = look(conductor, JobTerms(id="j", work="gradients"))
    found = json.loads(shown.to_json())
    (member,) = found["members"]
    assert (member["worker"], member["lag_versions"], member["wire_bytes_up"]) == ("</script>", None, None)
    assert (found["train_loss"], found["checkpoint"], found["min_workers"]) == (None, None, 2)
    assert "job" not in found  # its options may name files


def test_the_history_of_a_long_job_has_evenly_spaced_points() -> None:
    history = History()
    for version in range(1, 10_001):
        history.add(version, version / 2, version * 10, version * 20)
    versions = [point[0] for point in history.points]
    assert POINTS // 2 <= len(versions) < POINTS
    assert versions == [*range(history.each, 10_001, history.each)]
    assert history.points[0] == (history.each, history.each / 2, history.each * 10, history.each * 20)


def test_each_worker_has_its_own_bytes_and_refusals_and_their_number_is_bounded() -> None:
    metrics = ServerMetrics("none")

    def of_stream(worker: str, received: int) -> None:
        SENDER.set(metrics.sender(worker, "4bit:block=8"))
        metrics.received(received)
        metrics.sent(2 * received)
        metrics.received_raw(3 * received)
        metrics.push_refused(Reason.STALE)

    for worker, received in (("a", 5), ("b", 7), ("a", 10)):
        copy_context().run(of_stream, worker, received)
    metrics.received(1)  # of no stream
    assert metrics.senders["a"] == Sender("4bit", 15, 30, 45, refused_pushes=2)
    assert (metrics.senders["b"].wire_bytes_up, metrics.refusals()) == (7, {"stale": 3})
    for number in range(MAX_MEMBERS):
        metrics.sender(f"w{number}", "none", {"a"})
    assert len(metrics.senders) == MAX_MEMBERS
    assert "a" in metrics.senders, "it has a stream"
