"""Log lines of a worker while the server waits: rarely, briefly, and with names."""

from __future__ import annotations

import logging

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


def lines(
    caplog: pytest.LogCaptureFixture,
    seconds: int = 7,
    text: str = TEXT,
    *,
    work_every: int = 0,
    starting: bool = False,
    level: str = "INFO",
) -> list[logging.LogRecord]:
    """Return the log records when the server says each second that it waits."""
    clock = Clock()
    waiting = WaitingLog(clock)
    caplog.clear()
    with caplog.at_level(level, "gradwire.worker"):
        for second in range(seconds):
            clock.now = 100.0 + second
            waiting.say(text, starting=starting)
            if work_every and second % work_every == 0:
                waiting.over()
    return caplog.records


def test_the_short_pauses_of_a_healthy_job_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, 300, work_every=4) == []


def test_a_long_wait_is_logged_with_back_off(caplog: pytest.LogCaptureFixture) -> None:
    assert len(lines(caplog, 90)) == 5  # after 5, 10, 20, 40 and 80 s


@pytest.mark.parametrize(
    ("starting", "level", "shown"),
    # Most scripts set up no logging: information is dropped there, and the wait would be silent.
    [(True, "INFO", "INFO"), (False, "INFO", "WARNING"), (True, "WARNING", "WARNING")],
)
def test_a_wait_for_the_first_version_is_no_warning_where_information_is_shown(
    caplog: pytest.LogCaptureFixture, starting: bool, level: str, shown: str
) -> None:
    assert [each.levelname for each in lines(caplog, starting=starting, level=level)] == [shown]


def test_a_line_is_short_and_names_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines(caplog)
    names = "rank 1 (w1), rank 2 (w2), rank 3 (w3)"
    assert line.getMessage() == f"the server says: version 12 waits since 3.0 s for {names}"


def test_a_line_never_exceeds_its_length_except_for_the_reason_of_a_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (line,) = lines(caplog, text=TEXT * 5)
    assert len(line.getMessage()) == LONGEST
    assert line.getMessage().endswith("…")
    reason = " is lost: refused: model: parameter 'fc.weight' of float32 [8, 7], expected (8, 6)"
    (line,) = lines(caplog, text=f"{TEXT}; {'w' * 90}{reason}")
    assert line.getMessage().endswith(reason)
