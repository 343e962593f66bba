"""Rows 8 to 11 of docs/reference/faults.md: a server is killed at every step of its writing, its files are
damaged, and the disk is full. The job ends with the parameters of a calm run, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from daemons import Daemon, Daemons, Server, asked, poll
from test_durable import joined, result

from gradwire.common.exits import Exit
from gradwire.common.failpoints import POINTS, VARIABLE

JOB = (
    *("--task", "small_tasks:regression:slow=0.02,samples=3840", "--min-workers", "2", "--epochs", "1"),
    *("--optimizer", "sgd:momentum=0.9", "--learning-rate", "0.02", "--downlink", "4bit"),
)
WORKER = ("--compressor", "4bit", "--give-up-seconds", "100")


@pytest.fixture(scope="module")
def calm() -> Iterator[str]:
    """What the job comes to if nothing happens."""
    daemons = Daemons()
    try:
        server = daemons.server(*JOB)
        yield result(server, joined(daemons, server, *WORKER))
    finally:
        daemons.end()


def begun(
    daemons: Daemons, state: Path, *arguments: str, every: str = "3steps", port: int = 0, failpoints: str = ""
) -> Server:
    kept = ("--state", str(state), "--checkpoint-every", every, "--port", str(port))
    return daemons.server(*JOB, *kept, *arguments, environ={VARIABLE: failpoints})


def killed(server: Daemon) -> None:
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL


def test_a_server_that_is_killed_at_every_point_ends_with_the_bits_of_a_calm_run(
    daemons: Daemons, tmp_path: Path, calm: str
) -> None:
    """One server after the other, each of which ends itself where the next point is, some while they recover
    what the one before has left. The third time that it gets there: a job begins with a checkpoint."""
    first, *others = (point for point in POINTS if point not in ("checkpoint.stored", "journal.read"))
    others.insert(0, "journal.read")  # where there is something to read; the one that is left is at URLs
    server: Daemon = begun(daemons, tmp_path, "--durability", "fsync", failpoints=f"{first}=kill@3")
    assert isinstance(server, Server)
    port, workers = server.port, joined(daemons, server, *WORKER)
    assert server.wait() == -signal.SIGKILL
    for point in others:
        arguments = (*JOB, "--state", str(tmp_path), "--checkpoint-every", "3steps", "--durability", "fsync")
        where = ("--port", str(port), "--host", "127.0.0.1")
        server = Daemon("gradwire.server.cli", (*arguments, *where), {VARIABLE: f"{point}=kill@3"})
        try:
            assert server.wait() == -signal.SIGKILL, f"{point}: {server.log}"
        finally:
            server.end()
    server = begun(daemons, tmp_path, port=port)
    server.wait_for("resuming at version")
    assert result(server, workers) == calm
    assert not list(tmp_path.glob(".checkpoint*")), "nothing half written is left"


def test_workers_whose_ids_look_like_the_format_of_the_journal_cost_nothing(
    daemons: Daemons, tmp_path: Path, calm: str
) -> None:
    """Others are refused, with the rule."""
    server = begun(daemons, tmp_path, every="100000steps")
    hostile = daemons.worker(server.address, "--worker-id", '{"base64": "AA=="}')
    workers = joined(daemons, server, *WORKER, names=("base64", "bytes"))
    poll(lambda: asked(server).version > 10, "training stands still")
    killed(server)
    server = begun(daemons, tmp_path, port=server.port)
    server.wait_for("resuming at version [1-9]")
    assert result(server, workers) == calm
    assert "damaged" not in server.log
    assert hostile.wait() == Exit.USAGE
    assert "--worker-id (flag): expected 1 to 128 characters, of ASCII letters" in hostile.log


# ---- damage


def truncated(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def flipped(folder: Path) -> None:
    path = next(each for each in folder.iterdir() if each.suffix == ".json" and each.stat().st_size > 1000)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        os.truncate(path, 0)


def missing(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def two_newer(state: Path, version: int) -> bool:
    """Whether there are two checkpoints of later versions."""
    versions = [int(each.name.removeprefix("checkpoint-")) for each in state.glob("checkpoint-*")]
    return sum(each > version for each in versions) >= 2


DAMAGE: tuple[Callable[[Path], None], ...] = (truncated, flipped, empty, missing)


def test_whatever_is_damaged_of_the_newest_checkpoint_the_one_before_leads_on(
    daemons: Daemons, tmp_path: Path, calm: str
) -> None:
    server = begun(daemons, tmp_path)
    workers = joined(daemons, server, *WORKER)
    for damage in DAMAGE:
        last = asked(server).version
        poll(partial(two_newer, tmp_path, last), "no two checkpoints")
        killed(server)
        newest = max(tmp_path.glob("checkpoint-*"))
        damage(newest)
        server = begun(daemons, tmp_path, port=server.port)
        server.wait_for(f"cannot use a checkpoint, so the previous one is read: .*{newest.name}")
        server.wait_for("resuming at version")
    assert result(server, workers) == calm


# ---- a disk that is full, or cannot be written


def test_checkpoints_that_cannot_be_written_are_said_and_cost_nothing(
    daemons: Daemons, tmp_path: Path, calm: str
) -> None:
    """The one before and the journal stay, and lead to the same bits."""
    server = begun(daemons, tmp_path, failpoints="checkpoint.written=enospc@2+")
    workers = joined(daemons, server, *WORKER)
    server.wait_for(
        "could not be written: .*No space left on device.*the previous checkpoint and the journal stay"
    )
    poll(lambda: asked(server).version > 12, "training stands still")
    killed(server)
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == ["checkpoint-0000000000"]
    server = begun(daemons, tmp_path, port=server.port)
    assert result(server, workers) == calm


def test_a_journal_that_cannot_be_written_ends_the_server_and_another_goes_on(
    daemons: Daemons, tmp_path: Path, calm: str
) -> None:
    """Nothing is promised that is not written down."""
    server = begun(daemons, tmp_path, failpoints="journal.appended=enospc@40+")
    workers = joined(daemons, server, *WORKER)
    assert server.wait() == Exit.UNWRITTEN
    server.wait_for("cannot write the journal .*: No space left on device.*Free disk space")
    server = begun(daemons, tmp_path, port=server.port)
    assert result(server, workers) == calm


def mounted(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"]).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs to mount")
def test_a_disk_that_is_full_for_a_while_costs_nothing(daemons: Daemons, tmp_path: Path, calm: str) -> None:
    """A tmpfs of 2 MiB, which something else fills in the middle of the run."""
    mounted(tmp_path, "size=2m")
    try:
        server = begun(daemons, tmp_path)
        workers = joined(daemons, server, *WORKER)
        poll(lambda: asked(server).version > 8, "no progress")
        with (tmp_path / "filler").open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(1024))
            except OSError:
                pass
        assert server.wait() == Exit.UNWRITTEN
        server.wait_for("No space left on device")
        (tmp_path / "filler").unlink()
        server = begun(daemons, tmp_path, port=server.port)
        assert result(server, workers) == calm
    finally:
        daemons.end()
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs to mount")
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(daemons: Daemons, tmp_path: Path) -> None:
    mounted(tmp_path, "size=2m,ro")
    try:
        arguments = ("--port", "0", *JOB, "--state", str(tmp_path))
        server = daemons.plain("gradwire.server.cli", *arguments)
        assert server.wait() == Exit.USAGE
        server.wait_for(r"--state .*: Read-only file system; choose a folder that can be written to")
    finally:
        daemons.end()
        subprocess.run(["umount", str(tmp_path)], check=True)
