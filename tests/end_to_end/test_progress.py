"""Workers whose training threads hang while their heartbeats go on (finding F11)."""

from __future__ import annotations

import pytest
from daemons import Daemon, Daemons, Server, asked, poll
from test_training import get, sample

from gradwire.deploy.daemons import free_port
from gradwire.proto import messages as m

STATED_S = 3.0
SAMPLES, EPOCHS = 192, 2
SCRIPTS_SAMPLES = 96
LIMITS = ("--progress-seconds", str(STATED_S), "--lease-seconds", "3")


def job(daemons: Daemons, http: int, *task: str) -> Server:
    return daemons.server(
        *(*task, "--epochs", str(EPOCHS), "--batch-size", "4", "--min-workers", "2", *LIMITS),
        *("--http-port", str(http)),
    )


def one_hangs(daemons: Daemons, server: Server, http: int) -> tuple[Daemon, Daemon]:
    """The worker that hangs, which has rank 0 and so evaluates first, and another one."""
    options = ("--worker-id", "hangs", "--http-port", str(http))
    hangs = daemons.worker(server.address, *options, environ={"HANGS": "1"})
    server.wait_for(r"rank 0 \(hangs\) joined")
    return hangs, daemons.worker(server.address, "--worker-id", "w1")


@pytest.mark.parametrize("where", ["loss", "batch", "evaluate"])
def test_a_job_ends_without_a_worker_that_hangs_with_each_sample_once(where: str, daemons: Daemons) -> None:
    http, of_worker = free_port(), free_port()
    server = job(daemons, http, "--task", f"small_tasks:hanging:where={where},samples={SAMPLES}")
    hangs, other = one_hangs(daemons, server, of_worker)
    server.wait_for(r"rank 0 \(hangs\) has made no progress for \d+ s")
    server.wait_for(r"rank 0 \(hangs\) is lost: has made no progress for \d+ s")
    assert "time.sleep(seconds)" in hangs.wait_for(r"no progress for \d+ s[^$]*").string
    poll(lambda: get(of_worker, "/livez")[0] == 503, "the worker says that it is alive")
    assert "the training thread has made no progress" in get(of_worker, "/livez")[1]
    assert other.wait() == 0
    status = asked(server)
    assert (status.phase, status.epoch, status.repeated_samples) == (m.Phase.FINISHED, EPOCHS, 0)
    assert [each.epoch for each in status.evaluations] == [1, 2]
    text = get(http, "/metrics")[1]
    assert sample(text, "gradwire_server_samples_total") == EPOCHS * SAMPLES
    assert sample(text, "gradwire_server_suspensions_total") == 1
    poll(lambda: not asked(server).members, "the server waits for the worker that hangs")


def test_a_script_that_hangs_between_two_steps_is_suspended(daemons: Daemons) -> None:
    http = free_port()
    options = ("--script", "--epochs", str(EPOCHS), "--batch-size", "8", "--min-workers", "2")
    server = daemons.server(*options, *LIMITS, "--http-port", str(http))
    program = ("script_loops", "hanging", server.address, "--worker-id")
    daemons.program(*program, "hangs", environ={"HANGS": "1"})
    other = daemons.program(*program, "other")
    server.wait_for(r"\(hangs\) is lost: has made no progress for \d+ s \(loading a batch\)")
    assert other.wait() == 0
    status = asked(server)
    assert (status.phase, status.repeated_samples) == (m.Phase.FINISHED, 0)
    assert sample(get(http, "/metrics")[1], "gradwire_server_samples_total") == EPOCHS * SCRIPTS_SAMPLES


def test_a_worker_that_goes_on_takes_part_again(daemons: Daemons) -> None:
    http, of_worker = free_port(), free_port()
    task = f"small_tasks:hanging:seconds={4 * STATED_S},samples={SAMPLES},slow=0.2"
    server = job(daemons, http, "--task", task)
    hangs, other = one_hangs(daemons, server, of_worker)
    server.wait_for(r"rank 0 \(hangs\) is lost: has made no progress for \d+ s")
    poll(lambda: any(each.suspended for each in asked(server).members), "it is not shown as suspended")
    server.wait_for(r"rank 0 \(hangs\) makes progress again and takes part")
    assert get(of_worker, "/livez") == (200, "alive\n")
    assert hangs.wait() == other.wait() == 0
    status = asked(server)
    assert (status.phase, status.epoch) == (m.Phase.FINISHED, EPOCHS)
    text = get(http, "/metrics")[1]
    assert sample(text, "gradwire_server_samples_total") == EPOCHS * SAMPLES


def test_a_worker_that_waits_for_others_does_not_hang(daemons: Daemons) -> None:
    of_worker = free_port()
    server = job(daemons, free_port(), "--task", "small_tasks:regression")
    daemons.worker(server.address, "--worker-id", "w0", "--http-port", str(of_worker))
    server.wait_for(
        r"the job has waited 1\d.* have 1 of 2"
    )  # seconds, said every ten, and more than STATED_S
    assert get(of_worker, "/livez") == (200, "alive\n")
    assert all(each.stalled_seconds < STATED_S for each in asked(server).members)
