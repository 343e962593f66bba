"""The oracle of `kills`: what a job comes to, computed anew from its first checkpoint and its journal.

The journal says what has happened. Which pushes that makes count, in which version and in which order, is
decided by the state machine (`job.core`), to which the random histories hold an oracle of its own. All
the rest is done again in the plainest way: a push is decoded, whole tensors are summed in rank order, torch's
SGD takes the step, and each tensor of the update is compressed by itself. Conductor, shard, store, downlink
and recovery have no part in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

# The classes that are in a checkpoint are to be known.
import gradwire.server.conductor  # noqa: F401  # pyright: ignore[reportUnusedImport]
from gradwire.common.parts import Plan
from gradwire.compressors import (
    DenseFormat,
    LayerRule,
    Payload,
    Random,
    StepContext,
    create_bare,
    decode,
    dense_payload,
)
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.proto.plans import plan_of
from gradwire.proto.transfer import received_payloads
from gradwire.proto.wire import decode_envelope
from gradwire.server.durable import recorder as r
from gradwire.server.durable.folder import CHECKPOINT, SEGMENT
from gradwire.server.durable.journal import Record, read
from gradwire.server.job import events as e
from gradwire.server.job.core import Core
from gradwire.server.job.modes.registry import parse
from gradwire.settings import ServerSettings
from gradwire.storage.checkpoint import read_folder

FIRST = f"{CHECKPOINT}{0:010d}"
LOOK_S = 0.02
RULE = LayerRule()


class Archive:
    """Keeps all that a server writes into its --state and removes later: the first checkpoint, and every
    segment of the journal, as a link, so that it grows with the original.

    Attributes:
        largest: bytes that the folder had at most, and of its checkpoints and segments.
        shrunk: segments that have lost records which they once had.
    """

    def __init__(self, state: Path, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.largest = 0
        self.largest_of = {CHECKPOINT: 0, SEGMENT: 0}
        self.shrunk: list[str] = []
        self._ends: dict[str, int] = {}
        self._over = threading.Event()
        self.folder.mkdir()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        for path in self.state.glob(f"{SEGMENT}*.log"):
            kept = self.folder / path.name
            with contextlib.suppress(FileNotFoundError):
                if not kept.exists():
                    os.link(path, kept)
                if path.stat().st_size < self._ends.get(path.name, 0):
                    self.shrunk.append(path.name)
        first, kept = self.state / FIRST, self.folder / FIRST
        if first.exists() and not kept.exists():
            shutil.copytree(first, kept)
        self._measure()

    def _measure(self) -> None:
        total = 0
        for path in self.state.glob("*"):
            with contextlib.suppress(OSError):  # it is gone meanwhile
                files = path.iterdir() if path.is_dir() else [path]
                size = sum(each.stat().st_size for each in files)
                total += size
                for prefix, most in self.largest_of.items():
                    if path.name.removeprefix(".").startswith(prefix):
                        self.largest_of[prefix] = max(most, size)
        self.largest = max(self.largest, total)

    def note(self) -> None:
        """The server is not running: what it has written whole has to stay."""
        for path in sorted(self.state.glob(f"{SEGMENT}*.log"))[-2:]:
            end = 0
            for _, end in read(path):  # noqa: B007 - where the last one ends
                pass
            self._ends[path.name] = end

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self._look()


@dataclass
class Reference:
    """The parameters as the documentation has it, whole tensor by whole tensor.

    values: of the server, float32, all tensors end to end. replica: what the workers have. downlink: spec of
    the compressor of updates.
    """

    manifest: Manifest
    values: torch.Tensor
    replica: torch.Tensor
    rate: float
    momentum: float
    downlink: str
    version: int = 0
    states: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.compressor = create_bare(self.downlink)
        self.states = [self.compressor.init(spec) for spec in self.manifest.specs]
        self.optimizer = torch.optim.SGD([self.values], lr=self.rate, momentum=self.momentum, foreach=False)

    def step(self, shares: Sequence[tuple[int, np.ndarray[Any, Any]]], rate_factor: float) -> None:
        """One version. shares: samples and gradient of each push, in rank order."""
        total = sum(samples for samples, _ in shares)
        gradient = np.zeros(self.values.numel(), np.float32)
        for samples, values in shares:
            gradient += np.float32(samples / total) * values
        if shares:
            self.values.grad = torch.from_numpy(gradient)
            self.optimizer.param_groups[0]["lr"] = self.rate * rate_factor
            self.optimizer.step()
        self.version += 1
        self._send_down()

    def _send_down(self) -> None:
        """Compress the difference between parameters and replica, and add the decoded update to the
        replica."""
        borders = pairwise([0, *self.manifest.ends])
        for place, (spec, (start, end)) in enumerate(zip(self.manifest.specs, borders, strict=True)):
            difference = self.values[start:end] - self.replica[start:end]
            if RULE.compresses(spec):
                context = StepContext(samples=1, version=self.version, random=Random((0,)))
                payload, self.states[place] = self.compressor.compress(
                    difference, self.states[place], context
                )
            else:
                payload = dense_payload(DenseFormat.BFLOAT16, difference.numpy())
            self.replica[start:end] += torch.from_numpy(decode(payload))

    def sha256(self) -> str:
        return hashlib.sha256(self.replica.numpy().tobytes()).hexdigest()


class Replay:
    """A job that happens again by its log.

    Attributes:
        decided: by push, the version that it is in; 0 if it was refused.
        applied: the same, as it came to be.
    """

    def __init__(
        self, archive: Path, rules: ServerSettings, *, rate: float, momentum: float, downlink: str
    ) -> None:
        """
        Args:
            archive: the folder of an `Archive`.
            rules: options of the job, whose members push for every version.
            rate, momentum: of the server's SGD.
            downlink: spec of the compressor of updates.
        """
        tree, _ = read_folder(archive / FIRST)
        self.manifest = Manifest.from_message(tree["manifest"], worker="", max_bytes=rules.max_model_bytes)
        assert not any(tensor.state for tensor in self.manifest.tensors), "no buffers here"
        self.plan: Plan = plan_of(tree["plan"], self.manifest)
        self._next: Plan | None = None
        self.core = Core(rules, parse(rules.mode))
        self.core.load(tree["core"])
        image = tree["shard"]
        self.reference = Reference(
            *(self.manifest, image["parameters"], image["downlink"]["replica"]),
            rate=rate,
            momentum=momentum,
            downlink=downlink,
        )
        self.decided: dict[e.PushKey, int] = {}
        self.applied: dict[e.PushKey, int] = {}
        self._stored: dict[e.PushKey, dict[int, list[Payload]]] = {}
        for path in sorted(archive.glob(f"{SEGMENT}*.log")):
            for record, _ in read(path):
                self._again(record)
        accepted = {key: version for key, version in self.decided.items() if version}
        assert self.applied == accepted, "a push is not in the version that it was promised"

    def _again(self, record: Record) -> None:
        fields = record.fields
        match record.kind:
            case r.EVENT:
                self._happen(fields)
            case r.PART:
                self._store(record)
            case r.CLOSED | r.UNWANTED:
                worker, incarnation = fields["member"]
                self._stored.pop(e.PushKey(worker, incarnation, fields["seq"]), None)
            case r.PLAN:
                message: m.PlanAnnouncement = decode_envelope(fields["plan"], "ServerMessage")
                self._next = plan_of(message, self.manifest)
            case _:
                pass  # buffers

    def _store(self, record: Record) -> None:
        worker, incarnation = record.fields["member"]
        part: m.PartHeader = decode_envelope(record.fields["header"], "WorkerMessage")
        if part.plan != self.plan.number:
            return
        key, bounds = e.PushKey(worker, incarnation, part.seq), self.plan.parts[part.part]
        payloads = received_payloads(part.payloads, record.data, bounds, self.manifest, worker=worker)
        parts = self._stored.setdefault(key, {})
        if record.fields["carried"]:
            before = parts.get(part.part)
            assert before is not None, f"part {part.part} of {key} comes from nowhere"
            same = [(each.data == other.data).all() for each, other in zip(before, payloads, strict=True)]
            assert all(same), f"part {part.part} of {key} has become another"
        parts[part.part] = payloads

    def _happen(self, fields: Mapping[str, Any]) -> None:
        event = fields["event"]
        self.core.state.roster.hear(fields.get("heard", {}))
        result = self.core.step(event, fields["now"])
        if isinstance(event, e.Pushed):
            assert event.key not in self.decided, f"{event.key} is decided on twice"
            outcome = result.reply.outcome
            self.decided[event.key] = outcome.version if outcome.decision is m.Decision.ACCEPTED else 0
        for action in result.actions:
            match action:
                case e.Apply():
                    self._apply(action)
                case e.Drop(key=e.PushKey() as key):
                    self._stored.pop(key, None)
                case e.Adopt():
                    assert self._next is not None
                    self.plan, self._next = self._next, None
                    assert self.plan.number == action.plan
                    self._stored.clear()
                case _:
                    pass

    def _apply(self, action: e.Apply) -> None:
        assert action.version == self.reference.version + 1, "a version is missing"
        shares: list[tuple[int, np.ndarray[Any, Any]]] = []
        for each in action.contributions:
            assert each.key not in self.applied, f"{each.key} counts twice"
            self.applied[each.key] = action.version
            if each.samples:
                parts = self._stored.pop(each.key)
                assert sorted(parts) == [*range(len(self.plan.parts))], f"{each.key} is not whole"
                in_order = sorted(parts, key=lambda part: self.plan.parts[part].start)
                values = [decode(payload) for part in in_order for payload in parts[part]]
                shares.append((each.samples, np.concatenate(values)))
        self.reference.step(shares, action.rate_factor)

    def check_told(self, path: Path) -> int:
        """Check that outcomes, by the notes of `noting_worker`, agree with the log. Returns the
        number of outcomes."""
        told = [json.loads(line) for line in path.read_text().splitlines()]
        for worker, incarnation, seq, version in told:
            key = e.PushKey(worker, incarnation, seq)
            assert key in self.decided, f"{key} was acknowledged, and is lost"
            found = self.decided[key]
            assert found == version, f"{key} was said to be in version {version}, and is in {found}"
        return len(told)
