"""The contract of every mode: ours, and the example of another distribution's, found by its entry point."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from jobs import Job
from stepping import copied, core_of

from gradwire.common import plugins
from gradwire.common.configuration import UsageError
from gradwire.common.spec import SpecError
from gradwire.proto.messages import Decision, Phase, StatusResponse
from gradwire.server.checks import check
from gradwire.server.job import events as e
from gradwire.server.job.modes.registry import MODES, describe, parse
from gradwire.server.metrics import ServerMetrics
from gradwire.settings import ServerSettings
from gradwire.worker.training.work import parse_work

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "third_party_mode"
ALL = [*MODES, "turns"]
PUSHING = [*(name for name in MODES if parse(name).pushes_parts), "turns"]


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that distributions with modes are installed."""
    declared = {"turns": "TurnsOptions", "sync": "TurnsOptions", "odd": "Turns", "gone": "gone"}
    points = EntryPoints(
        EntryPoint(name, f"gradwire_turns:{value}", "gradwire.modes") for name, value in declared.items()
    )

    def select(**wanted: Any) -> EntryPoints:
        return points.select(**wanted)

    monkeypatch.setattr(plugins, "entry_points", select)
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.mark.parametrize("name", ALL)
def test_its_options_can_be_told_and_its_work_is_known_to_workers(name: str) -> None:
    options = parse(name)
    check(ServerSettings(mode=name))
    parse_work(options.work)
    assert any(line.strip().partition(":")[0] == name for line in describe().splitlines())
    with pytest.raises(SpecError, match="unknown key 'nothing'"):
        parse(f"{name}:nothing=1")


@pytest.mark.parametrize("name", ALL)
def test_its_values_are_known_to_status_and_metrics(name: str) -> None:
    mode = core_of(name).mode
    assert mode.quiet
    assert mode.pushes_parts is parse(name).pushes_parts
    assert mode.status.keys() <= {each.name for each in fields(StatusResponse)}
    ServerMetrics("none").follow_mode(mode.gauges)


@pytest.mark.parametrize("name", PUSHING)
def test_a_job_trains_to_its_end_from_what_is_saved_and_without_a_member(name: str) -> None:
    workers = ["w0", "w1", "w2"]
    job = Job(3, core=core_of(name, min_workers=3, evaluate_every="9epochs"))
    versions = 0
    for step in range(100):
        if step == 2:
            lost = workers.pop(1)
            job.step(e.Left(worker=lost, incarnation=1, failed=True, reason="lost"))
        for worker in workers:
            work = job.core.state.roster.members[worker].work
            if work is None:
                continue
            late = work.late
            job.push(worker)
            outcome = job.outcome()
            assert (outcome.decision is Decision.REFUSED) == late
            assert late or outcome.version > job.core.state.version
            while job.all(e.Apply):
                assert not job.core.mode.quiet
                job.publish()
                versions += 1
            job.core = copied(job.core, name)
        if job.core.state.phase is not Phase.RUNNING:
            break
    assert job.core.state.phase is Phase.FINISHING
    assert job.core.state.samples.done
    assert job.core.state.version == versions


def test_a_mode_of_another_distribution_is_refused_as_ours_are() -> None:
    with pytest.raises(UsageError, match="--aggregation median: not with --mode turns; use mean"):
        check(ServerSettings(mode="turns", aggregation="median"))
    assert type(parse("sync")) is MODES["sync"]
    assert "odd, which cannot be used: mode 'odd' of gradwire_turns:Turns failed to load" in describe()
    for text, why in {
        "turns:batches=0": "batches: expected at least 1",
        "turn": "known modes: async, coded, gone, local, odd, stale, sync, turns",
        "odd": "mode 'odd' of gradwire_turns:Turns failed to load: TypeError.*derived from ModeOptions",
        "gone": "mode 'gone' of gradwire_turns:gone failed to load: AttributeError",
    }.items():
        with pytest.raises(SpecError, match=why):
            parse(text)
