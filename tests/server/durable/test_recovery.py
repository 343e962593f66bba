"""A server that is killed at any moment: another one reads what it had written down, and is as it was."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pushes import MANIFEST, assembly, build, cut_plan
from stepping import core_of
from wired import ONES, PLAN, Message, Wired

from gradwire.common import failpoints
from gradwire.common.parts import Plan
from gradwire.common.spec import parse_length
from gradwire.proto import messages as m
from gradwire.proto import plans
from gradwire.server.calls.exchange import WorkerCall
from gradwire.server.conductor import Conductor
from gradwire.server.durable import folder
from gradwire.server.durable.folder import StateError, StateFolder
from gradwire.server.durable.journal import JournalError
from gradwire.server.durable.recorder import Recorder
from gradwire.server.job import events as e
from gradwire.server.metrics import ServerMetrics
from gradwire.server.recovery.checkpoints import checkpoint, first_checkpoint, pause
from gradwire.server.recovery.recovery import recover
from gradwire.server.shard.local import LocalShard
from gradwire.server.shard.model_state import Deposit
from gradwire.storage.checkpoint import FORMAT

MODES: list[tuple[str, dict[str, Any]]] = [
    ("sync", {}),
    ("sync", {"overlap": "both"}),
    ("sync:backup=1", {}),
    ("sync:redundancy=2", {}),
    ("stale:bound=1", {}),
    ("async", {}),
    ("local:steps=2", {}),
]


@pytest.fixture(autouse=True)
def parts_of_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "ALIGNMENT", 1)


# With something to remember: moments, norms, and a replica that is apart from the parameters.
remembering = partial(build, optimizer="adam", learning_rate=0.1, downlink="bf16", takes_norms=True)


class Kept(Wired):
    """A job whose server may be killed."""

    def __init__(
        self, folder: Path, mode: str, workers: str, every: str, *, recorded: bool = True, **rules: Any
    ) -> None:
        super().__init__(mode, workers, **rules)
        self.mode, self.rules, self.every, self.recorded = mode, rules, every, recorded
        self.seqs = dict.fromkeys(workers, 1)
        self.begin(folder)

    def begin(self, folder: Path) -> None:
        """Start like a new process, before it reads anything."""
        self.folder = StateFolder(folder, syncs=False)
        every = parse_length(self.every)
        self.recorder = Recorder(self.folder, every, job="job", recorded=self.recorded)
        self.core = core_of(self.mode, min_workers=len(self.workers), epochs=100, **self.rules)
        self.shard = LocalShard(remembering)
        self.conductor = Conductor(
            self.core, ServerMetrics("none"), shard=self.shard, recorder=self.recorder, checkpoint=checkpoint
        )
        self.call = WorkerCall(self.conductor)

    async def open(self) -> None:
        for worker in self.workers:
            self.conductor.happen(e.Joined(worker, 1, compressor="none"))
            self.attach(worker)
        opened = e.Initialized("a", 1, fingerprint=b"m", train_samples=400, epochs=90)
        conductor = self.conductor

        async def keep(image: Any, plan: Plan) -> None:
            await first_checkpoint(conductor, MANIFEST, image, plan, {})

        values = assembly(0, 0, 0)
        await self.shard.open(MANIFEST, values, PLAN, lambda: conductor.happen(opened), keep)
        for worker in self.workers:
            conductor.happen(e.Prepared(worker, 1, fingerprint=b"m", version=0))

    async def settle(self) -> None:
        """Let everything happen that follows."""
        for _ in range(1000):
            if not self.conductor.tasks.working:
                return
            await asyncio.sleep(0.002)
        raise AssertionError("it does not come to rest")

    async def state(self) -> dict[str, Any]:
        """All that matters, but when members were heard of."""
        await self.settle()
        image: Any = await self.shard.image()
        moments = image["optimizer"]["runs"]
        return {
            "core": without(self.core.save(), "heard_at"),
            "epochs": self.core.state.rules.epochs,
            "stored": sorted(
                (*member, part.seq, part.part) for member, part, _, _ in self.conductor.ledger.stored_parts(0)
            ),
            "plan": self.shard.reported.plan,
            "pushes": {
                name: (each["through"], {seq: push[1] for seq, push in each["pushes"].items()})
                for name, each in self.conductor.ledger.image()["members"].items()
            },
            "counted": self.conductor.ledger.image()["counted"],
            "norms": (image["norms"], self.shard.reported.square_norms),
            "tensors": [
                image["parameters"].tolist(),
                image["downlink"]["replica"].tolist(),
                [[each.tolist() for each in run[2].values()] for runs in moments for run in runs],
            ],
        }

    async def killed(self, folder: Path) -> None:
        """Go on as another process, on a copy of the folder."""
        while True:  # as it is at one moment
            try:
                shutil.copytree(self.folder.path, folder)
                break
            except (shutil.Error, OSError):
                shutil.rmtree(folder, ignore_errors=True)
        self.shard.close()
        self.begin(folder)
        assert await recover(self.conductor, self.folder) is True


def without(plain: Any, name: str) -> Any:
    if plain.__class__ is dict:
        return {key: without(each, name) for key, each in plain.items() if key != name}
    return [without(each, name) for each in plain] if plain.__class__ is list else plain


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two plain values differ."""
    kinds = one.__class__, other.__class__
    if kinds == (dict, dict) and one.keys() == other.keys():
        return [each for key in one for each in differences(one[key], other[key], f"{at}/{key}")]
    if kinds == (list, list) and len(one) == len(other):
        return [
            each
            for place in range(len(one))
            for each in differences(one[place], other[place], f"{at}/{place}")
        ]
    return [] if one == other or repr(one) == repr(other) else [f"{at}: {one!r:.200} is not {other!r:.200}"]


def restarted(job: Kept, state: dict[str, Any]) -> dict[str, Any]:
    """The state, once control has heard that the server was away."""
    core = core_of(job.mode, min_workers=len(job.workers), epochs=100, **job.rules)
    core.load(job.core.save())
    core.step(e.Restarted(), job.conductor.now())
    return {**state, "core": without(core.save(), "heard_at")}


class Story:
    """Random actions of workers and of time."""

    def __init__(self, job: Kept, seed: int) -> None:
        self.job, self.random = job, random.Random(seed)
        self.sent: dict[str, list[Message]] = {}
        self.last: dict[str, list[Message]] = {}

    async def act(self) -> None:
        job, worker = self.job, self.random.choice(self.job.workers)
        member = job.core.state.roster.members.get(worker)
        acts = [self.push, self.push, self.push, self.some, self.again, self.abandon, self.tick]
        if member is None or not member.listening:
            self.back(worker)
        elif self.random.random() < 0.1:
            self.cut(worker)
        else:
            self.random.choice(acts)(worker)
        if self.random.random() < 0.5:
            await job.settle()

    def values(self) -> Sequence[float]:
        return [self.random.choice((-1.0, 0.5, 2.0)) for _ in ONES]

    def made(self, worker: str) -> list[Message] | None:
        """The push that a worker has made and not had decided on; a new one if it has work."""
        if worker not in self.sent:
            if self.job.core.state.roster.members[worker].work is None:
                return None
            self.sent[worker] = self.job.push(worker, self.values(), seq=self.job.seqs[worker])
        return self.sent[worker]

    def push(self, worker: str) -> None:
        messages = self.made(worker)
        if messages is not None:
            self.job.arrive(worker, messages)
            self.over(worker)

    def over(self, worker: str) -> None:
        self.last[worker] = self.sent.pop(worker)
        self.job.seqs[worker] += 1

    def some(self, worker: str) -> None:
        """Parts, and no commit yet."""
        messages = self.made(worker)
        if messages is not None:
            self.job.arrive(worker, messages[: 2 * self.random.randint(1, 3)])

    def again(self, worker: str) -> None:
        if worker in self.last:
            self.job.arrive(worker, self.last[worker])

    def abandon(self, worker: str) -> None:
        if "both" not in self.job.rules.values() and worker in self.sent:
            self.job.arrive(worker, [m.Abandon(seq=self.job.seqs[worker])])
            self.over(worker)
            del self.last[worker]

    def tick(self, worker: str) -> None:
        self.job.conductor.happen(e.Tick())
        self.job.conductor.forget_gone()

    def cut(self, worker: str) -> None:
        self.job.conductor.streams.pop(worker, None)
        self.job.conductor.happen(e.Detached(worker, 1))

    def back(self, worker: str) -> None:
        job = self.job
        job.attach(worker)
        member = job.core.state.roster.members[worker]
        job.conductor.happen(
            e.Prepared(
                *(worker, 1),
                fingerprint=b"m",
                version=job.core.state.version,
                assigned=member.work.id if member.work else 0,
            )
        )


@pytest.mark.parametrize(("mode", "rules"), MODES, ids=lambda each: str(each))
@pytest.mark.parametrize("every", ["100000steps", "3steps"])
async def test_a_server_that_is_killed_goes_on_as_it_was(
    tmp_path: Path, mode: str, rules: dict[str, Any], every: str
) -> None:
    job = Kept(tmp_path / "0", mode, "abcd" if "redundancy" in mode else "abc", every, **rules)
    await job.open()
    story, kills = Story(job, seed=1), 0
    for step in range(100):
        await story.act()
        assert not job.conductor.tasks.failed.is_set(), job.conductor.tasks.failure
        if step % 20 == 19:
            expected = restarted(job, await job.state())
            kills += 1
            await job.killed(tmp_path / str(kills))
            assert differences(await job.state(), expected) == []
    assert job.core.state.version > 1
    job.shard.close()


async def one_version(job: Kept) -> None:
    """Everybody pushes."""
    for worker in job.workers:
        job.arrive(worker, job.push(worker, ONES, seq=job.seqs[worker]))
        job.seqs[worker] += 1
    await job.settle()
    await job.recorder.idle()


async def test_a_checkpoint_that_is_there_already_stays_and_its_segment_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is told to stop at the version of its last checkpoint, and killed while it stops: what has
    happened since then is in the segment alone."""

    def killed_meanwhile(*_: Any) -> int:
        raise OSError("no room")

    job = Kept(tmp_path / "0", "sync", "abc", "1steps")
    await job.open()
    for kill in (1, 2, 3):
        if kill != 2:  # that time it is the checkpoint with which the server has begun
            await one_version(job)
        job.conductor.happen(e.Joined(f"late{kill}", 1, compressor="none"))
        with monkeypatch.context() as patch:
            patch.setattr(StateFolder, "write", killed_meanwhile)
            await (await checkpoint(job.conductor, announced=True))
        await job.killed(tmp_path / str(kill))
        assert f"late{kill}" in job.core.state.roster.members
        for worker in "abc":
            Story(job, 0).back(worker)
    job.shard.close()


async def test_a_checkpoint_that_is_begun_twice_costs_nothing_that_was_promised_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is killed while it writes the checkpoint of a version that nobody was told of. The next one
    goes on at that version, where a checkpoint is due, accepts pushes, and is killed before that is whole."""

    def killed_meanwhile(*_: Any) -> int:
        raise OSError("no room")

    job = Kept(tmp_path / "0", "sync", "abc", "1steps")
    await job.open()
    monkeypatch.setattr(StateFolder, "write", killed_meanwhile)
    failpoints.arm("version.announced=eio")
    try:
        await one_version(job)
    finally:
        failpoints.arm("")
    assert job.conductor.tasks.failed.is_set()
    assert job.core.state.version == 0
    await job.killed(tmp_path / "1")
    await job.settle()
    for worker in "abc":
        Story(job, 0).back(worker)
    await one_version(job)
    expected = restarted(job, await job.state())
    assert job.core.state.version == 2
    await job.killed(tmp_path / "2")
    assert differences(await job.state(), expected) == []
    job.shard.close()


async def test_a_server_gets_a_journal_that_the_one_before_did_without(tmp_path: Path) -> None:
    """--durability may change."""
    job = Kept(tmp_path / "0", "sync", "abc", "2steps", recorded=False)
    await job.open()
    for _ in range(3):
        await one_version(job)
    job.recorded = True
    await job.killed(tmp_path / "1")
    assert job.core.state.version == 2
    for worker in "abc":
        Story(job, 0).back(worker)
    await one_version(job)
    await job.killed(tmp_path / "2")
    assert job.core.state.version == 3
    job.shard.close()


def bytes_of(folder: Path, prefix: str) -> list[int]:
    """Return the sizes of its checkpoints or segments."""
    found = [
        [each] if each.is_file() else [*each.iterdir()] for each in folder.iterdir() if prefix in each.name
    ]
    return [sum(file.stat().st_size for file in files) for files in found]


async def test_the_folder_stays_within_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long until a checkpoint is due by time: two checkpoints and one that is being written, two
    segments as large as their limit, and what comes until the next version."""
    monkeypatch.setattr(folder, "LEAST_SEGMENT_BYTES", 20_000)

    job = Kept(tmp_path, "sync", "abc", "100000steps")
    await job.open()
    most_segments = 0
    for version in range(1, 61):
        await one_version(job)
        assert job.core.state.version == version
        checkpoints, segments = bytes_of(tmp_path, folder.CHECKPOINT), bytes_of(tmp_path, folder.SEGMENT)
        most_segments = max(most_segments, len(segments))
        each = sum(segments) / version  # a segment may be more than its limit by what a version takes
        assert len(checkpoints) <= 2
        assert max(segments) <= folder.segment_limit(max(checkpoints)) + max(8_000.0, 2 * each)
        assert len(segments) <= 2
    assert most_segments == 2
    job.shard.close()


async def test_a_server_whose_checkpoints_fail_ends_when_the_journal_is_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost: the next one reads all of it, and goes on."""
    monkeypatch.setattr(folder, "LEAST_SEGMENT_BYTES", 20_000)

    def full(*_: Any) -> int:
        raise OSError("no room")

    job = Kept(tmp_path / "0", "sync", "abc", "100000steps")
    await job.open()
    limit, version = folder.journal_limit(job.recorder.bytes), 0
    write, each = StateFolder.write, 0
    monkeypatch.setattr(StateFolder, "write", full)
    while not job.conductor.tasks.failed.is_set():
        before = job.recorder.journal_bytes
        await one_version(job)
        version, each = version + 1, max(each, job.recorder.journal_bytes - before)
        assert version < 1000
    assert sum(bytes_of(tmp_path / "0", folder.SEGMENT)) == job.recorder.journal_bytes
    assert limit < job.recorder.journal_bytes <= limit + each
    assert job.conductor.tasks.unwritten
    assert "no room, and the journal since the last checkpoint has" in job.conductor.tasks.failure
    for restart, works in enumerate((False, True), 1):
        if works:
            monkeypatch.setattr(StateFolder, "write", write)
        bytes_then = job.recorder.journal_bytes
        await job.killed(tmp_path / str(restart))
        assert job.recorder.journal_bytes >= bytes_then
        assert job.core.state.version >= version - 1
        for worker in "abc":
            Story(job, 0).back(worker)
        for _ in range(100):
            if not job.conductor.tasks.failed.is_set() and job.recorder.version is None:
                await one_version(job)
        assert job.conductor.tasks.failed.is_set() != works
    assert job.recorder.journal_bytes < limit
    job.shard.close()


@pytest.mark.parametrize("every", ["1steps", "100000steps"])
async def test_a_plan_that_waits_for_its_round_outlives_the_server(tmp_path: Path, every: str) -> None:
    """A checkpoint may come between the plan and the round whose end it waits for."""
    job = Kept(tmp_path / "0", "sync", "ab", every)
    await job.open()
    job.arrive("a", job.push("a", seq=1))
    job.conductor.replan(cut_plan((1, 2)))
    job.arrive("b", job.push("b", seq=1))
    await job.reach(1)
    await job.settle()
    await job.recorder.idle()
    assert job.shard.reported.plan.number == 2
    divided = job.shard.reported.plan
    await job.killed(tmp_path / "1")
    assert job.shard.reported.plan == divided
    assert job.core.state.version == 1
    job.shard.close()


async def test_a_server_that_stops_takes_nothing_in_that_the_next_would_not_know(tmp_path: Path) -> None:
    """A round did not end in time; workers come back while the parameters are still being written."""
    job = Kept(tmp_path / "0", "sync", "ab", "100000steps")
    await job.open()
    await pause(job.conductor, 0.05)
    await job.conductor.stop("it was told to", resumable=True)
    with pytest.raises(JournalError, match="try again"):
        job.conductor.happen(e.Attached("a", 1))
    with pytest.raises(JournalError):
        job.conductor.happen(e.Joined("c", 1, compressor="none"))
    key = e.PushKey("a", 1, 1)
    with pytest.raises(JournalError):
        job.conductor.put_buffers(key, Deposit(collection=1, values={}))
    assert not job.conductor.tasks.failed.is_set()


async def test_a_server_that_stops_does_not_wait_for_who_is_gone_meanwhile(tmp_path: Path) -> None:
    job = Kept(tmp_path / "0", "sync", "ab", "100000steps")
    await job.open()
    pausing = asyncio.create_task(pause(job.conductor, 60.0))
    await asyncio.sleep(0)
    await one_version(job)
    while job.recorder.version != 1:
        await asyncio.sleep(0.01)
    job.conductor.streams["a"].saved = 1
    await asyncio.sleep(0.1)
    assert not pausing.done()
    Story(job, 0).cut("b")
    await asyncio.wait_for(pausing, 5)
    await job.conductor.stop("it was told to", resumable=True)


async def test_a_checkpoint_that_cannot_be_begun_is_not_tried_at_every_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError("no room")

    job = Kept(tmp_path / "0", "sync", "abc", "1steps")
    await job.open()
    monkeypatch.setattr(StateFolder, "segment", full)
    for _ in range(3):
        await one_version(job)
    assert job.core.state.version == 3
    assert job.recorder.failures == 1
    assert "no room" in job.recorder.failing
    await job.killed(tmp_path / "1")
    assert job.core.state.version == 3, "the segment before has gone on"
    job.shard.close()


async def test_checkpoints_of_which_none_is_whole_stay_where_they_are_and_are_refused_each_time(
    tmp_path: Path,
) -> None:
    """A second start, as by a supervisor, must not begin the job anew."""
    job = Kept(tmp_path / "0", "sync", "abc", "2steps")
    await job.open()
    for _ in range(5):
        await one_version(job)
    job.shard.close()
    folder = tmp_path / "1"
    shutil.copytree(tmp_path / "0", folder, ignore=shutil.ignore_patterns("lock"))
    manifests = sorted(folder.glob("checkpoint-*/manifest.json"))
    assert len(manifests) == 2
    kept = [each.read_text() for each in manifests]
    for damage, why in (
        ("", "none of its 2 checkpoints is whole"),
        ('"format": 99', f"format 99, and this release reads {FORMAT}"),
    ):
        for manifest, text in zip(manifests, kept, strict=True):
            manifest.write_text(text.replace(f'"format": {FORMAT}', damage))
        for _ in range(2):
            found = StateFolder(folder, syncs=False)
            with pytest.raises(StateError, match=why):
                found.newest()
            found.close()
        assert sorted(folder.glob("checkpoint-*/manifest.json")) == manifests
    for manifest in manifests:
        shutil.rmtree(manifest.parent)
    with pytest.raises(StateError, match="none of its 0 checkpoints"):
        StateFolder(folder, syncs=False).newest()


async def test_a_segment_without_the_one_before_is_refused_by_name(tmp_path: Path) -> None:
    job = Kept(tmp_path / "0", "sync", "abc", "2steps")
    await job.open()
    for _ in range(5):
        await one_version(job)
    shutil.rmtree(tmp_path / "0" / "checkpoint-0000000004")
    (tmp_path / "0" / "journal-0000000002.log").unlink()
    with pytest.raises(
        StateError, match=r"journal-0000000002.log is missing.*journal-0000000004.log continues"
    ):
        await job.killed(tmp_path / "1")
    job.shard.close()
