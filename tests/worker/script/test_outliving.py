"""State that outlives a script: what it finds when it begins again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from looping import BATCH, DATA, STEPS, Connect, Server, attached, take
from torch.utils.data import DataLoader

from gradwire.compressors.four_bit import RunningMagnitude
from gradwire.storage.backends import BackendError
from gradwire.worker.session.own_state import OwnState


@pytest.mark.parametrize("loop", ["batches", "steps"])
def test_what_a_script_does_at_an_epochs_end_is_not_left_out_when_it_goes_on_there(
    connect: Connect, tmp_path: Path, loop: str
) -> None:
    """A checkpoint there is of the state before that."""

    def trained(server: Server) -> tuple[list[object], object]:
        _, job = connect(server, state=str(tmp_path), worker_id="w0")
        torch.manual_seed(5)
        model, optimizer = attached(job)
        loader = DataLoader(DATA, BATCH, shuffle=True)
        seen: list[object] = []
        for epoch in job.epochs():
            for (inputs,) in job.batches(DATA) if loop == "batches" else job.steps(loader):
                take(model, optimizer, inputs)
                seen.append((epoch, inputs.tolist(), float(torch.rand(()))))
            job.state["ends"] = (*job.state.get("ends", ()), epoch, float(torch.rand(())))
        return seen, job.state["ends"]

    server = Server(saves=STEPS)
    seen, ends = trained(server)
    while not server.saved_at:  # on another thread
        time.sleep(0.01)
    assert server.saved_at == [(STEPS, "")]
    assert trained(Server(begins=STEPS)) == (seen[STEPS:], ends)


@pytest.mark.parametrize(("begins", "epoch"), [(STEPS - 1, 0), (STEPS + 1, 1)])
def test_a_script_that_was_killed_alone_finds_what_it_kept(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture, begins: int, epoch: int
) -> None:
    """The job has gone on meanwhile, in the same epoch or to the next one."""
    server = Server(saves=1)
    _, job = connect(server, state=str(tmp_path), worker_id="w0")
    model, optimizer = attached(job)
    job.state["best"] = 0.5
    loader = DataLoader(DATA, BATCH)
    for inputs, _ in zip(job.steps(loader), range(2), strict=False):
        take(model, optimizer, inputs[0])
    while not server.saved_at:  # on another thread
        time.sleep(0.01)
    job.leave()
    _, job = connect(Server(begins=begins), state=str(tmp_path), worker_id="w0")
    assert job.state["best"] == 0.5
    model, optimizer = attached(job)
    assert next(iter(job.epochs())) == epoch
    (inputs,) = next(iter(job.steps(loader)))
    # One batch of the first epoch had been taken when the state was written.
    assert torch.equal(inputs, DATA.tensors[0][BATCH : 2 * BATCH] if not epoch else DATA.tensors[0][:BATCH])
    assert f"own state of version 1 in a job at version {begins}" in caplog.text
    assert "the residual is dropped" in caplog.text


def test_a_place_that_cannot_be_reached_ends_the_membership(connect: Connect) -> None:
    server = Server()
    with pytest.raises(BackendError, match="Protocol not known: nonsense"):
        connect(server, state="nonsense://bucket", worker_id="w0")
    assert server.ended.startswith("failed: nonsense://bucket/j.w0: Protocol not known")


AGAIN = """
import sys
import scripted, gradwire
from gradwire.common import stored
from gradwire.proto import messages as m
from gradwire.proto.job import job_message
from gradwire.settings import JobTerms
from gradwire.worker.script import membership, part, process
from gradwire.worker.script.schedules import Each
from gradwire.worker.session.own_state import OwnState

class Server(scripted.Script):
    worker = "w0"
    def join(self, *told):
        job = job_message(JobTerms(id="j", work="gradients", script=True))
        return m.JoinResponse(job=job, limits=scripted.LIMITS, rank=0, version=3, initialize=False)

membership.connection_of = lambda settings, metrics: Server()
assert stored.class_of("running-magnitude") is None  # this process has not compressed anything yet
job = gradwire.connect(server="localhost", compressor="4bit", state=sys.argv[1], worker_id="w0")
print(job._member.restored[1]["states"])
"""


def test_a_new_process_reads_the_state_of_its_compressor(tmp_path: Path) -> None:
    own = OwnState(tmp_path, job="j", worker="w0")
    tree = {"states": [RunningMagnitude(total=2.0, elements=4.0)], "owner": {"epoch": 0}}
    own.write(3, tree, lambda error: None)
    assert own.close()
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "RunningMagnitude(total=2.0, elements=4.0)" in done.stdout, done.stderr
