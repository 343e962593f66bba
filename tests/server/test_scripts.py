"""The modes by example: each file in scripts/ is the story of a job, with all that the server does in it.

A line that is not indented is something that happens; the indented lines after it are all that follows from
it, in that order. `#` begins a comment. What can happen:

    job mode=stale:bound=2 workers=2 samples=40 batch=4 schedule=…    first
    a joins | a reconnects | a disconnects | a leaves
    a drifts            it has its last work, but not a replica of that version, and asks for a snapshot
    a pushes            for the last work that it was given; `nothing` when its step was skipped
    a pushes again      the same bytes as the last time
    a pushes late       for the work before that
    a pushes seq 7      with a number that is not its next one
    a evaluates
    published           the version that was to be applied is in place
    3 s pass            everyone but `without a b` being heard of
    a hangs 700 s       its heartbeat says that its training thread has made no progress for so long
    a wakes             and is ready, after it has been cut off
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from stepping import Refuse, core_of, step

from gradwire.proto.messages import Assignment, Decision
from gradwire.proto.shares import assigned_samples, share
from gradwire.proto.straggler_code import parts_of
from gradwire.server.job import events as e

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))
MODEL = b"model"


class Story:
    def __init__(self, options: dict[str, str]) -> None:
        self.samples = int(options.pop("samples", "40"))
        workers = int(options.pop("workers", "0"))
        given: dict[str, Any] = {"batch_size": int(options.pop("batch", "4"))}
        for name in {"schedule", "overlap"} & options.keys():
            given[name] = options.pop(name)
        self.core = core_of(options.pop("mode"), min_workers=max(1, workers), **given)
        assert not options, f"no options of a story: {options}"
        self.now = 100.0
        self.told: dict[str, list[Assignment]] = {}
        self.last: dict[str, e.Pushed] = {}
        self.seq: dict[str, int] = {}
        self.incarnations: dict[str, int] = {}
        self.said: list[str] = []
        for name in "abcdef"[:workers]:
            self.happen(f"{name} joins")
            if name != "abcdef"[workers - 1]:
                self.said.clear()

    def step(self, event: e.Event[Any]) -> list[Any]:
        actions: list[Any] = step(self.core, event, self.now)
        self.said += [line for action in actions if (line := self.describe(action, event))]
        return actions

    def describe(self, action: Any, event: Any) -> str:
        match action:
            case e.Assign(worker=worker, assignment=assignment):
                self.told.setdefault(worker, []).append(assignment)
                return f"{worker} {describe_assignment(assignment)}"
            case e.Decided(outcome=outcome):
                worker = event.worker
                if outcome.decision is Decision.ACCEPTED:
                    return f"{worker}'s push {outcome.seq} will be in version {outcome.version}"
                assert outcome.refusal is not None
                return f"{worker}'s push {outcome.seq} is refused: {outcome.refusal.reason.label}"
            case e.Apply():
                names = " ".join(map(label, action.contributions))
                assert action.rate_factor == 1
                weights = [each.weight for each in action.contributions]
                if any(weight is not None for weight in weights):
                    names = " ".join(
                        f"{weight:.3g}*{label(each)}"
                        for weight, each in zip(weights, action.contributions, strict=True)
                    )
                rate = "" if action.weight == 1 else f" with weight {action.weight:.3g}"
                return f"version {action.version} is made of {names}{rate}"
            case Refuse(refusal=refusal):
                return f"refused: {refusal.reason.label}"
            case e.LossReported(name=name):
                return f"{name[-2]} is lost"
            case e.Disconnect(worker=worker, refusal=refusal):
                return f"{worker} is cut off: {refusal.reason.label}"
            case e.Report(text=text):
                return re.sub(r" \([\d.]+ s so far\)|(?<=has waited) [\d.]+ s|, heard [\d.]+ s ago", "", text)
            case e.Finish():
                return "the job is done"
            case e.Note(text=text) if re.search("computes its part|in groups of|progress", text):
                return re.sub(r"rank \d \((\w)\)", r"\1", text)
            case _:
                return ""

    def happen(self, line: str) -> None:
        match line.split():
            case [name, "joins"]:
                self.incarnations[name] = incarnation = self.incarnations.get(name, 0) + 1
                self.seq[name] = 0
                actions = self.step(e.Joined(worker=name, incarnation=incarnation))
                if any(isinstance(action, Refuse) for action in actions):
                    return
                first = any(isinstance(action, e.Admission) and action.initialize for action in actions)
                self.step(e.Attached(worker=name, incarnation=incarnation))
                if first:
                    self.step(
                        e.Initialized(
                            worker=name,
                            incarnation=incarnation,
                            fingerprint=MODEL,
                            train_samples=self.samples,
                        )
                    )
                self.prepare(name, 0)
            case [name, "reconnects"]:
                self.step(e.Attached(worker=name, incarnation=self.incarnations[name]))
                told = self.told.get(name, [])
                last = told[-1] if told else None
                self.prepare(name, last.id if last else 0, last.version if last else 0)
            case [name, "reconnects,", "having", "heard", "nothing"]:
                self.step(e.Attached(worker=name, incarnation=self.incarnations[name]))
                self.prepare(name, 0)
            case [name, "drifts"]:
                self.step(e.Detached(worker=name, incarnation=self.incarnations[name]))
                self.step(e.Attached(worker=name, incarnation=self.incarnations[name]))
                self.prepare(name, self.told[name][-1].id, version=None)
            case [name, "disconnects"]:
                self.step(e.Detached(worker=name, incarnation=self.incarnations[name]))
            case [name, "leaves"]:
                self.step(
                    e.Left(worker=name, incarnation=self.incarnations[name], failed=False, reason="told")
                )
            case [name, "evaluates"]:
                asked = [each for each in self.told[name] if each.evaluate_epoch][-1]
                self.step(
                    e.EvaluationReported(
                        worker=name,
                        incarnation=self.incarnations[name],
                        version=asked.version,
                        epoch=asked.evaluate_epoch,
                        metrics={},
                    )
                )
            case [name, "pushes", "again"]:
                self.step(self.last[name])
            case [name, "pushes", "late"]:
                self.push(name, self.told[name][-2])
            case [name, "pushes", "nothing"]:
                self.push(name, self.told[name][-1], samples=0)
            case [name, "pushes", "seq", seq]:
                self.push(name, self.told[name][-1], seq=int(seq))
            case [name, "pushes", "with", "loss", loss]:
                self.push(name, self.told[name][-1], loss=float(loss))
            case [name, "pushes"]:
                self.push(name, self.told[name][-1])
            case ["a", "part", "is", "final"]:
                self.step(e.ApplyStarted(version=self.core.state.version + 1))
            case ["all", "parts", "are", "final"]:
                self.step(e.ApplyStarted(version=self.core.state.version + 1, whole=True))
            case ["published"]:
                self.step(e.Published(version=self.core.state.version + 1))
            case [seconds, "s", "pass", *rest]:
                silent = rest[1:] if rest[:1] == ["without"] else []
                for _ in range(int(seconds)):
                    self.now += 1
                    for member in self.core.state.roster.by_rank():
                        if member.worker not in silent:
                            self.step(e.KeepAlive(worker=member.worker, incarnation=member.incarnation))
                    self.step(e.Tick())
            case [name, "hangs", seconds, "s"]:
                self.step(
                    e.KeepAlive(
                        worker=name,
                        incarnation=self.incarnations[name],
                        activity="computing",
                        stalled_s=float(seconds),
                    )
                )
                self.step(e.Tick())
            case [name, "is", "cut", "off"]:
                self.step(e.Detached(worker=name, incarnation=self.incarnations[name]))
                self.step(e.Attached(worker=name, incarnation=self.incarnations[name]))
            case [name, "wakes"]:
                self.prepare(name, self.told[name][-1].id)
            case _:
                raise ValueError(f"cannot read {line!r}")

    def prepare(self, name: str, assigned: int, version: int | None = 0) -> None:
        self.step(
            e.Prepared(
                worker=name,
                incarnation=self.incarnations[name],
                fingerprint=MODEL,
                version=version,
                assigned=assigned,
            )
        )

    def push(
        self,
        name: str,
        to: Assignment,
        *,
        samples: int | None = None,
        seq: int | None = None,
        loss: float = 1.0,
    ) -> None:
        if seq is None:
            seq = self.seq[name] = self.seq[name] + 1
        self.last[name] = e.Pushed(
            worker=name,
            incarnation=self.incarnations[name],
            seq=seq,
            assignment=to.id,
            base_version=to.version,
            samples=sum(map(len, samples_behind(to))) if samples is None else samples,
            loss=loss,
        )
        self.step(self.last[name])


def label(contribution: e.Contribution) -> str:
    return f"{contribution.key.worker}{contribution.key.seq}"


def samples_behind(assignment: Assignment) -> list[range]:
    """A push for it."""
    if not assignment.stragglers:
        return [range(assigned_samples(assignment))]
    numbers = parts_of(assignment.position, assignment.world, assignment.stragglers)
    return [range(*share(assigned_samples(assignment), number, assignment.world)) for number in numbers]


def describe_assignment(assignment: Assignment) -> str:
    if assignment.finished:
        return "may go"
    parts: list[str] = []
    if assignment.evaluate_epoch:
        parts.append(f"evaluates version {assignment.version} as epoch {assignment.evaluate_epoch}")
    if assignment.ranges:
        ranges = ", ".join(f"{each.start}-{each.start + each.count - 1}" for each in assignment.ranges)
        epoch = f" of epoch {assignment.epoch}" if assignment.epoch else ""
        slice = f" for slice {assignment.slice} of {assignment.slices}" if assignment.slices else ""
        if assignment.stragglers:
            slice = f" as {assignment.position} of {assignment.world}, but {assignment.stragglers}"
        parts.append(f"gets samples {ranges}{epoch}{slice} at version {assignment.version}")
    return " and ".join(parts)


def read(path: Path) -> list[tuple[int, str, list[str]]]:
    """Number, what happens, and what follows."""
    events: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.partition("#")[0].rstrip()
        if not text:
            continue
        if text.startswith(" "):
            events[-1][2].append(text.strip())
        else:
            events.append((number, text, []))
    return events


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_server_does_what_the_script_says(path: Path) -> None:
    (_, job, expected), *events = read(path)
    kind, *options = job.split()
    assert kind == "job"
    story = Story(dict(option.split("=", 1) for option in options))
    assert story.said == expected, f"{path.name}: {job}"
    for number, event, expected in events:
        story.said.clear()
        story.happen(event)
        assert story.said == expected, f"{path.name}:{number}: {event}"


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 8
