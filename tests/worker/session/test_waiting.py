"""Log lines of a worker while the server waits: rarely, briefly, and with names."""

from __future__ import annotations

import pytest

from gradwire.worker.session.waiting import LONGEST, WaitingLog

TEXT = (
    "version 12 waits since 3.0 s for rank 1 (w1, connected, heard 2.0 s ago, computing), "
    "rank 2 (w2, disconnected, heard 2.9 s ago, compressing), rank 3 (w3, gone)"
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture, seconds: int, *, work_every: int = 0) -> list[str]:
    """Return the log lines when the server says each second that it waits."""
    clock = Clock()
    waiting = WaitingLog(clock)
    with caplog.at_level("INFO"):
        for second in range(seconds):
            clock.now = 100.0 + second
            waiting.say(TEXT)
            if work_every and second % work_every == 0:
                waiting.over()
    return caplog.messages


def test_the_short_pauses_of_a_healthy_job_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, 300, work_every=4) == []


def test_a_long_wait_is_logged_with_back_off(caplog: pytest.LogCaptureFixture) -> None:
    assert len(lines(caplog, 90)) == 5  # after 5, 10, 20, 40 and 80 s


def test_a_wait_for_the_first_version_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    waiting = WaitingLog(clock)
    with caplog.at_level("INFO"):
        for starting in (True, False):
            waiting.say(TEXT, starting=starting)
            clock.now += 60
            waiting.say(TEXT, starting=starting)
            waiting.over()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_wait_is_shown_where_no_logging_is_set_up(caplog: pytest.LogCaptureFixture) -> None:
    """Most scripts set up none: information is dropped there, and the wait for other workers would be
    silent."""
    clock = Clock()
    waiting = WaitingLog(clock)
    with caplog.at_level("WARNING", "gradwire.worker"):
        waiting.say(TEXT, starting=True)
        clock.now += 60
        waiting.say(TEXT, starting=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_line_is_short_and_names_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines(caplog, 7)
    assert line == "the server says: version 12 waits since 3.0 s for rank 1 (w1), rank 2 (w2), rank 3 (w3)"


def test_a_line_never_exceeds_its_length(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    waiting = WaitingLog(clock)
    waiting.say(TEXT * 5)
    clock.now += 60
    with caplog.at_level("INFO"):
        waiting.say(TEXT * 5)
    (line,) = caplog.messages
    assert len(line) == LONGEST
    assert line.endswith("…")


def test_the_reason_why_a_worker_was_lost_is_never_cut(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    waiting = WaitingLog(clock)
    why = f"{'w' * 90} is lost: refused: model: parameter 'fc.weight' of float32 [8, 7], expected (8, 6)"
    waiting.say(TEXT + "; " + why)
    clock.now += 60
    with caplog.at_level("INFO"):
        waiting.say(TEXT + "; " + why)
    (line,) = caplog.messages
    assert line.endswith(" is lost: " + why.partition(" is lost: ")[2])
