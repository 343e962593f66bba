"""Ends of a script's process: signals, exits, threads, forks, and cells that run again."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from looping import DATA, EPOCHS, STEPS, Connect, Server, attached, part_of_an_epoch, take

from gradwire import ScriptError
from gradwire.worker.script import part, process
from gradwire.worker.session.replica import Replica


@pytest.fixture
def sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default handler, before and after."""
    monkeypatch.setattr(process, "_stopping", None)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("compressor", ["none", "topk:ratio=24"])
def test_a_step_that_was_interrupted_in_backward_begins_anew(
    connect: Connect, caplog: pytest.LogCaptureFixture, compressor: str
) -> None:
    """Its gradients, also those that have left, count once, as after Ctrl-C in a notebook."""

    def trained(*, interrupted: bool) -> Server:
        server, job = connect(Server(overlap="backward"), compressor=compressor)
        model, optimizer = attached(job)
        # Interrupts the second step, when the last layer's gradients have left.
        steps, second = itertools.count(), interrupted

        def interrupt(gradient: torch.Tensor) -> None:
            nonlocal second
            if second and next(steps) == 1:
                second = False
                raise KeyboardInterrupt

        model[1].register_full_backward_hook(lambda _, given, __: interrupt(given[0]))  # type: ignore[index]
        while not job.done:
            try:
                for _ in job.epochs():
                    for (inputs,) in job.batches(DATA):
                        model(inputs).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except KeyboardInterrupt:
                pass
        job.leave()
        return server

    plain, again = trained(interrupted=False), trained(interrupted=True)
    assert "the step at version 1 was interrupted, and begins anew" in caplog.text
    assert "from now on gradients leave after the backward pass" not in caplog.text
    assert len(plain.pushed) == len(again.pushed) == EPOCHS * STEPS
    for (_, one), (_, other) in zip(plain.pushed, again.pushed, strict=True):
        assert [each.data.tobytes() for each in one] == [each.data.tobytes() for each in other]


def test_an_update_that_is_interrupted_is_applied_whole(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(at: int) -> tuple[torch.Tensor, int]:
        """Return the parameters and the number of interrupts; SIGINT arrives in that call of `apply`."""
        _, job = connect(Server())
        model, optimizer = attached(job)
        calls, interrupts = itertools.count(), 0

        def apply(replica: Any, *given: Any, **named: Any) -> None:
            if next(calls) == at:
                signal.raise_signal(signal.SIGINT)
            plain(replica, *given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(Replica, "apply", apply)
            while not job.done:
                try:
                    for (inputs,) in job.batches(DATA):
                        model(inputs).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                except KeyboardInterrupt:
                    interrupts += 1
        job.leave()
        return torch.cat([each.detach().reshape(-1) for each in model.parameters()]), interrupts

    plain = Replica.apply
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    try:
        expected, none = trained(-1)
        found, once = trained(5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.equal(found, expected)
    assert (none, once) == (0, 1)


@pytest.mark.usefixtures("sigterm")
def test_after_sigterm_the_present_step_and_the_residual_are_pushed(connect: Connect) -> None:
    server, job = connect(Server(), compressor="topk:ratio=24")
    left: list[int] = []

    def stop() -> None:
        if not left:
            left.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        part_of_an_epoch(job, stop)
    assert (ended.value.code, server.ended) == (143, "stopped by SIGTERM")
    # The push of the present step had begun; the next one takes the residual with it.
    sent = [sum(payload.data.size for payload in payloads) for _, payloads in server.pushed]
    assert len(sent) == 2
    assert sent[1] > 4 * sent[0]
    assert not job._driver.assignments.session.held_back  # type: ignore[union-attr]


@pytest.mark.usefixtures("sigterm")
def test_a_script_that_does_not_step_again_after_sigterm_ends_all_the_same(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, job = connect(Server(), compressor="topk:ratio=24")
    monkeypatch.setattr(part.Part, "leave_s", 0.2)
    began = time.monotonic()

    def hang() -> None:
        if server.pushed:
            signal.raise_signal(signal.SIGTERM)
            while time.monotonic() < began + 60:
                time.sleep(0.01)

    with pytest.raises(SystemExit) as ended:
        part_of_an_epoch(job, hang)
    assert ended.value.code == 143
    assert time.monotonic() < began + 30
    job.leave()
    assert server.ended == "stopped by SIGTERM"


@pytest.mark.usefixtures("sigterm")
def test_a_scripts_own_handler_stays_and_the_default_one_comes_back(connect: Connect) -> None:
    _, job = connect()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    job.leave()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    own: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: own.append(number))
    _, job = connect()
    signal.raise_signal(signal.SIGTERM)
    assert own == [signal.SIGTERM]
    part_of_an_epoch(job, lambda: None)
    assert job.done


def test_a_cell_that_runs_again_leaves_the_job_of_its_first_run(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    first, job = connect()
    with pytest.raises(KeyboardInterrupt):
        part_of_an_epoch(job, interrupt)
    connect()
    assert first.ended == "the script has ended"
    assert "connects again: its earlier job leaves" in caplog.text
    second, _ = connect(Server(), worker_id="another")  # of this process, too
    assert not second.ended


def test_two_threads_are_not_the_same_worker(connect: Connect) -> None:
    go = threading.Event()
    thread = threading.Thread(target=lambda: (connect(), go.wait(60)))
    thread.start()
    while not process.joined:
        time.sleep(0.01)
    with pytest.raises(ScriptError, match=r"thread 'Thread-.*worker_id of its own"):
        connect()
    go.set()
    thread.join()


@pytest.mark.parametrize("with_statement", [False, True])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no"), "the script failed: ValueError('no')"),
        (KeyboardInterrupt(), "stopped by KeyboardInterrupt"),
        (None, "the script has ended"),
    ],
)
def test_the_server_hears_of_a_failed_script_with_and_without_a_context(
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    with_statement: bool,
    error: BaseException | None,
    reason: str,
) -> None:
    monkeypatch.setattr(sys, "last_value", OSError("of an earlier cell"), raising=False)
    server, job = connect()
    if with_statement:
        with contextlib.suppress(BaseException), job:
            if error is not None:
                raise error
    else:
        if error is not None:
            monkeypatch.setattr(sys, "last_value", error)  # as the interpreter does before it exits
        process.leave_all()
    assert server.ended == reason
    assert server.failed == isinstance(error, Exception)


@pytest.mark.parametrize(("code", "failed"), [(None, False), (0, False), (3, True)])
def test_a_script_that_exits_with_a_code_has_failed(connect: Connect, code: Any, failed: bool) -> None:
    server, job = connect()
    with contextlib.suppress(SystemExit), job:
        sys.exit(code)
    assert server.failed == failed


def test_a_forked_child_has_no_part_in_the_job(connect: Connect) -> None:
    server, job = connect()
    child = os.fork()
    if not child:  # os._exit, because this process is a test's
        job.leave()
        process.leave_all()
        os._exit(0 if not server.ended and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not server.ended


def test_ctrl_c_while_a_job_begins_lets_the_loop_begin_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    reads: list[int] = []
    uploads: list[int] = []

    def initialize(*_: Any) -> bool:
        uploads.append(1)
        signal.raise_signal(signal.SIGINT)
        return True

    def interrupt(_: list[Any]) -> Any:
        reads.append(1)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(server, "initialize", initialize)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    try:
        with pytest.raises(KeyboardInterrupt):  # at once, while the samples are read
            next(iter(job.batches(DATA, collate_fn=interrupt)))
        assert (len(reads), len(uploads)) == (1, 0)
        with pytest.raises(KeyboardInterrupt):
            next(iter(job.batches(DATA)))
        for _ in job.epochs():
            for (inputs,) in job.batches(DATA):
                take(model, optimizer, inputs)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(uploads), len(server.pushed), job.done) == (1, EPOCHS * STEPS, True)
