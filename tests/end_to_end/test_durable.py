"""A job outlives its server, and its workers: real processes are killed and stopped, and the parameters that
come out are those of a run that nobody disturbed, bit for bit."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from daemons import Daemon, Daemons, Server, asked, poll, stop
from test_training import get

from gradwire.common.exits import Exit
from gradwire.common.failpoints import VARIABLE

TASK = "small_tasks:regression:slow=0.02,samples=1920"
MOMENTUM = (
    "--optimizer",
    "sgd:momentum=0.9",
    "--learning-rate",
    "0.02",
    "--min-workers",
    "2",
    "--epochs",
    "1",
)
# Where a member is lost the bits are others, and a machine that is busy enough loses one.
LEASE = ("--lease-seconds", "60")
LOSSY = ("--downlink", "4bit", "--overlap", "both")


def begun(
    daemons: Daemons, state: Path | None, *arguments: str, port: int = 0, failpoints: str = ""
) -> Server:
    kept = () if state is None else ("--state", str(state))
    options = ("--task", TASK, *MOMENTUM, *LEASE, "--port", str(port), *kept, *arguments)
    return daemons.server(*options, environ={VARIABLE: failpoints})


def joined(
    daemons: Daemons,
    server: Server,
    *arguments: str,
    states: Path | None = None,
    names: tuple[str, str] = ("w0", "w1"),
) -> list[Daemon]:
    """Two workers, whose ranks are in the order of their names."""
    workers: list[Daemon] = []
    for name in names:
        kept = () if states is None else ("--state", str(states / name))
        workers.append(daemons.worker(server.address, "--worker-id", name, *kept, *arguments))
        server.wait_for(rf"\({name}\) joined|resuming at version")
    return workers


def reach(server: Server, version: int) -> None:
    poll(lambda: asked(server).version >= version, "no progress")


def result(server: Server, workers: Sequence[Daemon]) -> str:
    """The SHA-256 of the parameters, at the end of the job."""
    assert [worker.wait() for worker in workers] == [0] * len(workers)
    return asked(server).parameters_sha256


_CALM: dict[tuple[str, ...], str] = {}


def calm(daemons: Daemons, *options: str) -> str:
    """Return the parameters' checksum of a job without faults."""
    if options not in _CALM:
        server = begun(daemons, None, *options)
        _CALM[options] = result(server, joined(daemons, server, "--compressor", "4bit"))
    return _CALM[options]


@pytest.mark.parametrize("options", [(), LOSSY], ids=["defaults", "lossy down, parts count at once"])
@pytest.mark.parametrize("every", ["1000steps", "3steps"])
def test_a_job_whose_server_is_killed_ends_with_the_same_bits(
    daemons: Daemons, tmp_path: Path, options: tuple[str, ...], every: str
) -> None:
    server = begun(daemons, tmp_path, "--checkpoint-every", every, *options)
    workers = joined(daemons, server, "--compressor", "4bit")
    port = server.port
    for version, grace_s in ((3, None), (9, 0.05), (14, None)):
        reach(server, version)
        if grace_s is not None:  # it is told to stop, and has too little time for that
            server.signal(signal.SIGTERM)
            time.sleep(grace_s)
        server.signal(signal.SIGKILL)
        server.wait()
        server = begun(daemons, tmp_path, "--checkpoint-every", every, *options, port=port)
        server.wait_for("resuming at version")
    assert result(server, workers) == calm(daemons, *options)
    assert len(list(tmp_path.glob("checkpoint-*"))) <= 2


def test_a_job_that_measures_norms_ends_with_the_same_bits(daemons: Daemons, tmp_path: Path) -> None:
    """The server is killed while it measures. One tensor is sparse, so that no plan changes the bits."""
    options = ("--fusion", "seamgs", "--replan", "10", "--checkpoint-every", "3steps")
    compressor = ("--compressor", "randk:ratio=4", "--dense-layers", "0.*")
    calm = begun(daemons, None, *options[:4])
    expected = result(calm, joined(daemons, calm, *compressor))
    server = begun(daemons, tmp_path, *options)
    workers = joined(daemons, server, *compressor)
    for version in (3, 6, 12):
        reach(server, version)
        server.signal(signal.SIGKILL)
        server.wait()
        server = begun(daemons, tmp_path, *options, port=server.port)
        server.wait_for("resuming at version")
    assert result(server, workers) == expected


def test_a_job_that_is_stopped_goes_on_elsewhere_with_the_same_bits(daemons: Daemons, tmp_path: Path) -> None:
    state = tmp_path / "server"
    for stops in range(2):
        server = begun(daemons, state)
        workers = joined(daemons, server, "--compressor", "4bit", states=tmp_path)
        reach(server, 5 + 8 * stops)
        assert stop(server) == 143
        server.wait_for(r"paused at version \d+")
        for worker in workers:
            worker.wait_for(r"state of version \d+ written")
            worker.end()
    server = begun(daemons, state)
    workers = joined(daemons, server, "--compressor", "4bit", states=tmp_path)
    for worker in workers:
        worker.wait_for("continuing from this worker's own state at version")
    assert result(server, workers) == calm(daemons)


def test_without_a_journal_the_job_goes_on_from_its_last_checkpoint(daemons: Daemons, tmp_path: Path) -> None:
    options = ("--checkpoint-every", "1000steps", "--durability", "none")
    server = begun(daemons, tmp_path, *options)
    workers = joined(daemons, server, "--compressor", "4bit")
    reach(server, 8)
    server.signal(signal.SIGKILL)
    server.wait()
    assert not list(tmp_path.glob("journal-*"))
    server = begun(daemons, tmp_path, *options, port=server.port)
    server.wait_for("resuming at version 0")
    for worker in workers:
        worker.wait_for(r"the server has gone back from version \d+ to 0")
    assert result(server, workers)
    assert asked(server).version == 30


def test_probes_are_answered_while_the_journal_is_read(daemons: Daemons, tmp_path: Path) -> None:
    server = begun(daemons, tmp_path)
    workers = joined(daemons, server, "--compressor", "4bit")
    reach(server, 3)
    server.signal(signal.SIGKILL)
    server.wait()
    options = ("--task", TASK, *MOMENTUM, *LEASE, "--port", str(server.port), "--state", str(tmp_path))
    slowly = {VARIABLE: "journal.read=sleep:3@1"}
    again = daemons.plain("gradwire.server.cli", *options, "--http-port", "0", environ=slowly)
    again.wait_for("failpoint journal.read")
    port = int(again.wait_for(r"metrics and probes on port (\d+)")[1])
    assert get(port, "/livez") == (200, "alive\n")
    assert get(port, "/readyz") == (503, f"--state {tmp_path} is being read\n")
    again.wait_for("resuming at version")
    poll(lambda: get(port, "/readyz")[0] == 200, "not ready")
    assert [worker.wait() for worker in workers] == [0, 0]


@pytest.mark.parametrize("of", ["a file", "a checkpoint"])
def test_a_new_job_begins_with_the_parameters_of_a_file(daemons: Daemons, tmp_path: Path, of: str) -> None:
    output, state = tmp_path / "model.safetensors", tmp_path / "state"
    first = begun(daemons, state, "--output", str(output), "--checkpoint-every", "30steps")
    expected = result(first, joined(daemons, first, "--compressor", "4bit"))
    stop(first)
    what = output if of == "a file" else state
    if of == "a checkpoint":
        first.wait_for("checkpoint of version 30 written")
    # At a rate of 0 what comes out is what it began with.
    second = begun(daemons, None, "--resume", str(what), "--learning-rate", "0", "--seed", "9")
    assert result(second, joined(daemons, second)) == expected
    third = daemons.server("--resume", str(what), "--task", "digits")
    worker = daemons.worker(third.address)
    assert worker.wait() == 3
    assert "expected a tensor of shape" in worker.log
    assert "in the file of --resume, got one of shape" in worker.log
    wrong = daemons.plain("gradwire.server.cli", "--port", "0", "--resume", str(tmp_path / "none"))
    assert wrong.wait() == 2
    assert "--resume" in wrong.log


def test_a_new_job_goes_on_with_the_optimizer_of_a_checkpoint(daemons: Daemons, tmp_path: Path) -> None:
    """The result is that of a job that was not stopped; with the parameters alone it differs."""

    def trained(epochs: int, *arguments: str) -> tuple[Server, str]:
        options = ("--optimizer", "sgd:momentum=0.9", "--learning-rate", "0.01", "--epochs", str(epochs))
        server = daemons.server("--task", "small_tasks:steady", *options, *arguments)
        worker = daemons.worker(server.address, "--compressor", "none")
        return server, result(server, [worker])

    _, expected = trained(2)
    kept = ("--state", str(tmp_path / "state"), "--checkpoint-every", "1epoch")
    first, _ = trained(1, *kept, "--output", str(tmp_path / "model"))
    first.wait_for(f"checkpoint of version {asked(first).version} written")
    again, found = trained(1, "--resume", str(tmp_path / "state"))
    again.wait_for("and its optimizer state, sgd .momentum_buffer.")
    assert found == expected
    assert trained(1, "--resume", str(tmp_path / "model"))[1] != expected


def test_a_folder_is_one_jobs_and_one_servers(daemons: Daemons, tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        daemon = daemons.plain("gradwire.server.cli", "--port", "0", "--state", str(tmp_path), *arguments)
        assert daemon.wait() == 2
        return daemon.log

    server = begun(daemons, tmp_path)
    assert "another gc-server uses this folder" in refused("--task", TASK, *MOMENTUM)
    worker = daemons.worker(server.address, "--worker-id", "w0")
    worker.wait_for("ready for work")
    assert stop(server) == 143
    assert "was started with 0.02; restore --learning-rate 0.02" in refused(
        "--task", TASK, *MOMENTUM, "--learning-rate", "0.5"
    )
    assert "from which it could not resume" in refused("--mode", "coded")
    assert json.loads((tmp_path / "job.json").read_text())["job"]


def test_a_start_that_fails_and_a_job_that_has_not_begun_fix_nothing(
    daemons: Daemons, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("short")
    state, taken = tmp_path / "state", socket.create_server(("127.0.0.1", 0))
    for arguments, why in (
        (("--port", str(taken.getsockname()[1])), "cannot listen on"),
        (("--token-file", str(tmp_path / "tokens")), "expected a token of at least"),
        (("--resume", str(tmp_path / "nothing")), "--resume .*nothing"),
        (("--tls-cert", "nothing.pem"), "--tls-cert"),
    ):
        port = () if "--port" in arguments else ("--port", "0")
        given = ("--host", "127.0.0.1", "--state", str(state), "--learning-rate", "0.5", *port, *arguments)
        daemon = daemons.plain("gradwire.server.cli", *given)
        assert daemon.wait() == Exit.USAGE, daemon.log
        daemon.wait_for(why)
        assert not (state / "job.json").exists()
    taken.close()
    server = begun(daemons, state, "--learning-rate", "0.5")
    job = json.loads((state / "job.json").read_text())["job"]
    assert stop(server) == 143
    server = begun(daemons, state)  # nobody has come, so no parameters are lost
    found = json.loads((state / "job.json").read_text())
    assert (found["job"], found["options"]["learning_rate"]) == (job, 0.02)


def keeping(daemons: Daemons, server: Server, loop: str, states: Path | None) -> list[Daemon]:
    """Two scripts, whose ranks are in the order of their names."""
    found: list[Daemon] = []
    for name in ("w0", "w1"):
        kept = () if states is None else ("--state", str(states))
        options = ("--worker-id", name, "--compressor", "4bit", *kept)
        found.append(daemons.program("script_keeps", loop, server.address, *options))
        server.wait_for(rf"\({name}\) joined|resuming at version")
    return found


@pytest.mark.parametrize("loop", ["batches", "steps", "local"])
def test_a_job_of_scripts_that_is_stopped_goes_on_with_what_they_keep(
    daemons: Daemons, tmp_path: Path, loop: str
) -> None:
    """Dropout, the order of a loader, schedules, and what the scripts put into job.state; a kill besides."""
    rules = ("--script", "--min-workers", "2", "--epochs", "2", "--batch-size", "8", "--seed", "3", *LEASE)
    lossy = (*rules, "--downlink", "4bit")

    def finished(server: Server, scripts: Sequence[Daemon]) -> list[object]:
        assert [script.wait() for script in scripts] == [0, 0], scripts[0].log
        said = [script.fields("^trained$") for script in scripts]
        return [asked(server).parameters_sha256, *said]

    server = daemons.server(*lossy)
    calm = finished(server, keeping(daemons, server, loop, None))
    state = ("--state", str(tmp_path / "server"))
    server = daemons.server(*lossy, *state)
    scripts = keeping(daemons, server, loop, tmp_path)
    reach(server, 3)
    server.signal(signal.SIGKILL)
    server.wait()
    server = daemons.server(*lossy, *state, "--port", str(server.port))
    reach(server, 7)
    assert stop(server) == 143
    server.wait_for(r"paused at version \d+")  # and the scripts have written down what they keep
    for script in scripts:
        script.signal(signal.SIGKILL)
        script.wait()
    server = daemons.server(*lossy, *state)
    assert finished(server, keeping(daemons, server, loop, tmp_path)) == calm


def test_a_job_goes_on_from_checkpoints_at_a_url(daemons: Daemons, tmp_path: Path) -> None:
    """The server is killed, and once while it writes one: that is none."""
    url = f"file://{tmp_path}/bucket/job"
    options = ("--state", url, "--durability", "none", "--checkpoint-every", "3steps")
    wrong = daemons.plain("gradwire.server.cli", "--port", "0", "--state", url)
    assert wrong.wait() == 2
    assert "with --durability journal: a journal needs a disk" in wrong.log
    server = begun(daemons, None, *options, failpoints="checkpoint.stored=kill@3")
    workers = joined(daemons, server, "--compressor", "4bit")
    server.wait()
    folder = tmp_path / "bucket" / "job"
    assert [(each / "manifest.json").exists() for each in sorted(folder.glob("checkpoint-*"))] == [
        True,
        True,
        False,
    ]
    server = begun(daemons, None, *options, port=server.port)
    server.wait_for("resuming at version 3")
    assert result(server, workers)
    assert asked(server).version == 30
    stop(server)
    assert len(list(folder.glob("checkpoint-*"))) == 2
    assert not list(folder.glob("journal-*"))
    again = daemons.server("--task", TASK, "--resume", url, *MOMENTUM)
    worker = daemons.worker(again.address, "--state", f"{url}/worker", "--worker-id", "w0")
    again.wait_for(r"\(w0\) joined")
    stop(worker)
    stop(again)


def test_a_place_that_fails_does_not_hold_up_training(daemons: Daemons, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/job"
    options = ("--state", url, "--durability", "none", "--checkpoint-every", "3steps")
    server = begun(daemons, None, *options, failpoints="checkpoint.stored=eio@2+")
    workers = joined(daemons, server)
    assert result(server, workers)
    server.wait_for("checkpoint of version 3 could not be written: .*Input/output error")
    assert asked(server).version == 30


def test_the_best_version_outlives_its_server_and_a_new_job_begins_with_it(
    daemons: Daemons, tmp_path: Path
) -> None:
    state, output = tmp_path / "state", tmp_path / "model.safetensors"
    options = ("--keep", "best:loss:max", "--evaluate-every", "5steps", "--output", str(output))
    server = begun(daemons, state, *options)
    workers = joined(daemons, server)
    poll(lambda: len(asked(server).evaluations) > 1, "no evaluations")
    server.wait_for("the best so far, written to --state")
    server.signal(signal.SIGKILL)
    server.wait()
    server = begun(daemons, state, *options, port=server.port)
    result(server, workers)
    best = max(asked(server).evaluations, key=lambda each: each.metrics["loss"])
    stop(server)
    (kept,) = state.glob("best-*")
    assert kept.name == f"best-{best.version:010d}"
    found: list[str] = []
    for what in (kept, tmp_path / "model.best.safetensors"):
        second = begun(daemons, None, "--resume", str(what), "--learning-rate", "0")
        found.append(result(second, joined(daemons, second)))
    assert found[0] == found[1]


UNSENT = (
    *(
        "--mode",
        "local:steps=2,correction=0,overlay=on,clip=1,fragments=2",
        "--optimizer",
        "muon:weight_decay=0.1",
    ),
    *("--schedule", "cosine:warmup=4steps", "--epochs", "2"),
)


def test_local_steps_from_unsent_changes_end_with_the_same_bits(daemons: Daemons, tmp_path: Path) -> None:
    """Kills of the server, and a stop in which the workers, too, end and return with their residuals."""
    codes = ("--compressor", "1bit:decay=0.9")
    server = begun(daemons, None, *UNSENT)
    workers = joined(daemons, server, *codes)
    workers[0].wait_for(r"optimizer muon: Muon steps \d+ parameters of \d+ elements")
    expected = result(server, workers)
    server = begun(daemons, tmp_path, *UNSENT)
    workers = joined(daemons, server, *codes, states=tmp_path)
    reach(server, 4)
    server.signal(signal.SIGKILL)
    server.wait()
    server = begun(daemons, tmp_path, *UNSENT, port=server.port)
    server.wait_for("resuming at version")
    reach(server, 9)
    assert stop(server) == 143
    server.wait_for(r"paused at version \d+")
    for worker in workers:
        worker.wait_for(r"state of version \d+ written")
        worker.end()
    server = begun(daemons, tmp_path, *UNSENT)
    workers = joined(daemons, server, *codes, states=tmp_path)
    assert result(server, workers) == expected
