"""How long a training thread has made no progress, and what is said of it."""

from __future__ import annotations

from gradwire.common.liveness import FIRST, TIMES
from gradwire.worker.session.progress import Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def begun(clock: Clock, *, stepped: bool = True) -> Progress:
    progress = Progress(clock)
    progress.stated_s, progress.begun, progress.stepped = 600.0, True, stepped
    return progress


def test_time_counts_from_the_last_progress_and_not_while_it_waits_for_the_server() -> None:
    clock = Clock()
    progress = begun(clock)
    progress.moved("computing")
    clock.now += 5
    assert progress.stalled_s == 5
    with progress.waiting():
        clock.now += 1000
        assert progress.stalled_s == 0
        assert not progress.hung()
    assert progress.stalled_s == 0
    clock.now += 3
    assert progress.stalled_s == 3
    progress.moved()
    assert (progress.stalled_s, progress.activity) == (0, "computing")


def test_it_hangs_beyond_the_limit_which_is_larger_for_a_first_step() -> None:
    clock = Clock()
    progress = begun(clock, stepped=False)
    progress.moved("computing")
    clock.now += 601
    assert progress.may_be_suspended
    assert not progress.hung()
    progress.stepped = True
    assert "no progress for 601 s (computing)" in progress.hung()
    progress.stepped = False
    clock.now += 600 * (FIRST - 1)
    assert progress.hung()


def test_what_took_long_once_may_take_a_multiple_of_that() -> None:
    clock = Clock()
    progress = begun(clock)
    progress.moved("evaluating")
    clock.now += 700
    progress.moved("computing")
    clock.now += 601
    assert progress.hung()
    progress.moved("evaluating")
    clock.now += TIMES * 700
    assert not progress.hung()
    clock.now += 1
    assert progress.hung()


def test_waiting_is_no_measure_of_what_steps_take() -> None:
    clock = Clock()
    progress = begun(clock)
    progress.moved("computing")
    with progress.waiting():
        clock.now += 5000
    progress.moved("computing")
    clock.now += 601
    assert progress.hung()


def test_loading_takes_as_long_as_it_takes_and_no_limit_is_none() -> None:
    clock = Clock()
    progress = begun(clock)
    progress.begun = False
    clock.now += 1e6
    assert not progress.hung()
    progress.begun, progress.stated_s = True, 0.0
    assert not progress.hung()
    assert not progress.may_be_suspended


def test_the_stack_is_that_of_the_thread_which_made_it() -> None:
    assert "test_the_stack_is_that" in begun(Clock()).stack()
