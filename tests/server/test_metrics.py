"""Metrics of the server: counted cheaply, and only what deserves an alert."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
from stepping import core_of

from gradwire.proto.messages import Phase
from gradwire.server import reporting
from gradwire.server.conductor import TICK_S, Conductor
from gradwire.server.job import events as e
from gradwire.server.job.loss_history import POINTS, LossHistory
from gradwire.server.job.waiting import Awaited
from gradwire.server.metrics import NAMES, ServerMetrics
from gradwire.server.reporting import LINE_CHARACTERS, count_waiting, shortened, update_gauges
from gradwire.server.shard.reports import Reported


def conductor(core: Any) -> Conductor:
    shard: Any = SimpleNamespace(reported=Reported(), start=lambda: None, close=lambda: None)
    return Conductor(core, ServerMetrics("none"), shard=shard)


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"gradwire_server_{name}", labels)
    assert found is not None, name
    return found


async def test_what_a_worker_sends_updates_no_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk did, at a cost that grows with the members: 17 ms of the event loop at 256 (finding F8)."""
    core = core_of(min_workers=2)
    asked: list[int] = []

    def waiting(now: float) -> Awaited:
        asked.append(1)
        return Awaited()

    monkeypatch.setattr(core.mode, "waiting", waiting)

    shell = conductor(core)
    shell.happen(e.Joined(worker="a", incarnation=1, compressor="none"))
    shell.happen(e.Attached(worker="a", incarnation=1))
    for _ in range(100):
        shell.happen(e.KeepAlive(worker="a", incarnation=1))
    assert not asked
    shell.start()
    await asyncio.sleep(TICK_S * 1.5)
    assert 1 <= len(asked) < 5
    assert value(shell.metrics, "members") == 1
    await shell.stop("it was told to stop")


def test_the_target_is_the_number_of_epochs_that_the_script_names() -> None:
    metrics, core = ServerMetrics("none"), core_of(epochs=30)
    assert math.isnan(value(metrics, "target_epoch"))
    assert math.isnan(value(metrics, "certificate_expiry_seconds"))
    core.step(e.Joined(worker="a", incarnation=1, compressor="none"), 0.0)
    update_gauges(metrics, core, 0, 0.0)
    core.step(e.Initialized("a", 1, fingerprint=b"m", train_samples=8, epochs=3), 0.0)
    update_gauges(metrics, core, 0, 0.0)
    assert value(metrics, "target_epoch") == 3


async def test_free_space_is_unknown_while_the_disk_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []
    metrics: Any = SimpleNamespace(state_free_bytes=SimpleNamespace(set=found.append))
    answers = [OSError(), SimpleNamespace(f_bavail=2, f_frsize=512), asyncio.CancelledError()]

    async def look(*_: object) -> Any:
        if isinstance(answer := answers.pop(0), BaseException):
            raise answer
        return answer

    monkeypatch.setattr(reporting, "run_on_daemon_thread", look)
    monkeypatch.setattr(reporting, "SPACE_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await reporting.watch_space("", metrics)
    assert math.isnan(found[0])
    assert found[1:] == [1024]


def waited(metrics: ServerMetrics, seconds: float) -> float:
    """Return the seconds that are counted while a round waits for so long."""
    since = 100.0
    waiting = SimpleNamespace(text="waiting for rank 1", for_others=True, seconds=None)

    def waits(now: float) -> SimpleNamespace:
        return waiting

    core: Any = SimpleNamespace(
        state=SimpleNamespace(phase=Phase.RUNNING, waiting_since=since), waiting=waits
    )
    before = value(metrics, "waiting_seconds_total")
    for tick in range(1, int(seconds / TICK_S) + 1):
        count_waiting(metrics, core, since + tick * TICK_S, TICK_S)
    return value(metrics, "waiting_seconds_total") - before


def test_healthy_waiting_is_not_counted_and_a_lost_member_is() -> None:
    metrics = ServerMetrics("none")
    assert waited(metrics, 60.0) == 0  # nobody knows yet how long a round takes
    for seconds in (0.4, 0.5, 3.0):
        metrics.round_closed(seconds, 8, 0.5, 1)
    assert waited(metrics, 0.9) == 0
    lease_s = 10.0
    assert waited(metrics, lease_s) > 5  # what docs/reference/metrics.md alerts on
    for _ in range(32):
        metrics.round_closed(30.0, 8, 0.5, 1)
    assert waited(metrics, 59.0) == 0


def test_what_is_counted_elsewhere_is_a_counter_and_staleness_has_one_unit() -> None:
    metrics = ServerMetrics("none")
    for total in (0, 4, 4, 9):
        metrics.follow(metrics.repeated_samples, total)
    assert value(metrics, "repeated_samples_total") == 9
    metrics.push_accepted([], 7)
    metrics.push_accepted([], 2)
    metrics.clocks_stale(3)
    assert value(metrics, "staleness_largest_versions") == 7
    assert value(metrics, "staleness_largest_clocks") == 3
    assert math.isnan(value(metrics, "staleness_bound_clocks"))


def test_waiting_is_said_in_short_lines_and_only_when_it_is_longer_than_usual(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """13 lines of 285 characters stood beside 5 epoch lines in a healthy run (finding U10)."""
    names = [f"rank {rank} (worker-{rank}, connected, heard 0.{rank} s ago, computing)" for rank in range(32)]
    one, many = (
        f"version 7 has waited 3.1 s for {names[0]}",
        f"version 7 has waited 3.1 s for {', '.join(names)}",
    )
    assert shortened(one) == one
    assert len(shortened(many)) <= LINE_CHARACTERS
    assert shortened(many).startswith(
        "version 7 has waited 3.1 s for rank 0 (worker-0), rank 1 (worker-1), rank 2"
    )
    assert shortened(many).endswith(" and others")
    lost = f" is lost: refused: model: {'parameter ' * 20}"
    assert shortened(many + lost) == shortened(many) + lost
    shell = conductor(SimpleNamespace(state=SimpleNamespace(phase=Phase.RUNNING)))
    report = e.Report(ranks=(0,), seconds=3.1, text=one)
    for _ in range(5):
        shell.metrics.round_closed(2.0, 8, 0.5, 1)
    shell.perform([report])
    assert not caplog.records, "healthy rounds take as long"
    for _ in range(32):
        shell.metrics.round_closed(0.2, 8, 0.5, 1)
    shell.perform([report, e.Report(ranks=(0,), seconds=3.1, text=many)])
    assert [record.getMessage() for record in caplog.records] == [one, shortened(many)]


def test_whatever_an_evaluation_measures_is_a_label_up_to_a_limit() -> None:
    metrics = ServerMetrics("none")
    metrics.evaluated({"perplexity": 3.5, "loss": 1.25})
    assert value(metrics, "validation", metric="perplexity") == 3.5
    for number in range(2 * NAMES):
        metrics.evaluated({f"metric {number}": 1.0})
    metrics.evaluated({"loss": 0.5})
    assert value(metrics, "validation", metric="loss") == 0.5
    labels = [
        sample.labels["metric"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "gradwire_server_validation"
    ]
    assert len(labels) == NAMES


@pytest.mark.parametrize("steps", [1, POINTS - 1, POINTS, 3 * POINTS + 5, 20_000])
def test_the_curve_of_the_loss_keeps_a_bounded_number_of_true_means(steps: int) -> None:
    curve = LossHistory()
    curve.add(1, 0, 5.0)
    curve.add(1, 4, math.nan)
    for version in range(1, steps + 1):
        curve.add(version, 1 + version % 3, float(version))
    points = curve.messages()
    assert min(steps, POINTS // 2) <= len(points) <= POINTS
    assert points[-1].version > steps - curve.each
    before = 0
    for point in points:
        versions = range(before + 1, point.version + 1)
        samples = [1 + version % 3 for version in versions]
        mean = sum(v * n for v, n in zip(versions, samples, strict=True)) / sum(samples)
        assert point.loss == pytest.approx(mean)
        before = point.version
