"""How many local steps a round has, and how many samples a slow worker gets."""

from __future__ import annotations

import math

import pytest
from jobs import Job as Story
from paced import BOUND, SECONDS_PER_SAMPLE, Job, even, one_slow
from stepping import core_of

from gradwire.common.spec import SpecError
from gradwire.server.job.modes.local import LocalOptions
from gradwire.server.job.modes.registry import parse
from gradwire.server.job.modes.share_fit import BEHIND, ENOUGH, ShareFit

# ---- local steps


@pytest.mark.parametrize(
    ("loss_ratio", "rate_ratio", "steps"),
    [
        (1.0, 1.0, 4),  # the first round's own: H_0, not its root
        (0.25, 1.0, 2),
        (0.26, 1.0, 3),  # rounded up
        (1e-9, 1.0, 1),
        (4.0, 1.0, 8),
        (1.0, 4.0, 8),  # a rate that has fallen to a quarter
        (1.0, 1e9, 16),
        (1.0, math.inf, 16),  # a rate of nothing
        (0.0, math.inf, 4),  # nothing to go by
        (math.nan, 1.0, 4),
        (-1.0, 1.0, 4),
    ],
)
def test_the_interval_follows_loss_and_rate(loss_ratio: float, rate_ratio: float, steps: int) -> None:
    assert LocalOptions(first=4, most=16).next_steps(loss_ratio, rate_ratio) == steps
    assert LocalOptions(steps="7").next_steps(loss_ratio, rate_ratio) == 7


@pytest.mark.parametrize(
    ("time_ratio", "by_time", "by_both"),
    [
        (3.0, 3, 3),
        (3.1, 4, 4),  # rounded up: what is less would not hide it
        (0.2, 1, 1),
        (0.0, 1, 1),
        (7.0, 7, 4),  # the loss allows 4
        (1e9, 16, 4),
        (math.inf, 16, 4),
        (math.nan, 4, 4),  # nobody knows
    ],
)
def test_the_interval_hides_the_exchange(time_ratio: float, by_time: int, by_both: int) -> None:
    assert LocalOptions(by="time").next_steps(1.0, 1.0, time_ratio) == by_time
    assert LocalOptions(by="both").next_steps(1.0, 1.0, time_ratio) == by_both
    assert LocalOptions().next_steps(1.0, 1.0, time_ratio) == 4
    assert LocalOptions(steps="7").next_steps(1.0, 1.0, time_ratio) == 7


def test_a_fixed_number_of_steps_follows_nothing() -> None:
    with pytest.raises(ValueError, match="by: expected steps=adaptive with time, got steps=7"):
        LocalOptions(steps="7", by="time")


def test_times_are_those_of_the_slowest_and_of_the_rest_of_a_round() -> None:
    """Steps of 0.1 s and 0.2 s, and an exchange of 0.7 s: four of the slower ones hide it."""
    steps = local_steps("local:first=2,most=16,by=time", 0.7, 6)
    assert steps == [2, 4, 4, 4, 4, 4]


def test_times_follow_what_changes_by_half_in_each_round() -> None:
    job = Rounds("local:first=2,most=16,by=time")
    job.round(0.6)
    assert job.steps == 3
    job.round(1.4)
    assert job.steps == 5  # of a mean of 1.0
    job.round(1.4)
    assert job.steps == 6  # of 1.2


def test_a_round_whose_members_say_nothing_of_times_changes_nothing() -> None:
    job = Rounds("local:first=2,most=16,by=time")
    job.round(0.6)
    job.round(5.0, told=False)
    assert job.steps == 3


def test_the_steps_of_a_round_are_known_one_round_earlier_where_workers_begin_them_early() -> None:
    """The losses at the start of rounds call for 4, 4, 2, 4 and 2 steps in the next ones."""
    losses = (1.0, 1.0, 0.25, 1.0, 0.25)
    for mode, expected in (("first=4", [4, 4, 4, 2, 4]), ("first=4,delayed=on", [4, 4, 4, 4, 2])):
        job, found = Rounds(f"local:{mode}"), list[int]()
        for loss in losses:
            found.append(job.steps)
            told = {worker: each.next for worker, each in job.job.told.items()}
            job.round(0.1, loss=loss)
            given = {worker: each.ranges for worker, each in job.job.told.items()}
            assert (told == given) == ("delayed" in mode)
        assert found == expected


class Rounds:
    """Two workers, one twice as fast as the other."""

    def __init__(self, mode: str) -> None:
        core = core_of(mode, min_workers=2, batch_size=4, epochs=100)
        self.job = Story(core=core, samples=4000)
        self.job.bring("a")
        self.job.bring("b")

    @property
    def steps(self) -> int:
        return int(self.job.core.mode.gauges["local_steps"])

    def round(self, exchange_s: float, *, told: bool = True, loss: float = 1.0) -> None:
        steps = self.steps
        self.job.now += 0.2 * steps + exchange_s
        self.job.push("a", computing_s=0.1 * steps * told, loss=loss)
        self.job.push("b", computing_s=0.2 * steps * told, loss=loss)
        self.job.publish()


def local_steps(mode: str, exchange_s: float, rounds: int) -> list[int]:
    job, found = Rounds(mode), list[int]()
    for _ in range(rounds):
        found.append(job.steps)
        job.round(exchange_s)
    return found


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("steps=8", LocalOptions(steps="8")),
        ("steps=adaptive", LocalOptions(first=4, most=16)),
        ("steps=adaptive,first=8,most=64", LocalOptions(first=8, most=64)),
        ("by=time", LocalOptions(by="time")),
        ("steps=8,delayed=on", LocalOptions(steps="8", delayed=True)),
        ("correction=0,overlay=on,clip=1", LocalOptions(correction=0.0, overlay=True, clip=1.0)),
    ],
)
def test_what_can_be_typed(text: str, steps: object) -> None:
    assert parse(f"local:{text}") == steps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps=0", "expected 1 to 10000 steps, got 0"),
        ("by=chance", "expected one of"),
        ("steps=often", "expected a whole number, or adaptive, got 'often'"),
        ("first=9,most=8", "first: expected at most `most`, which is 8, got 9"),
        ("least=9", "known keys: by, clip, correction, delayed, elastic, first, fragments, most"),
        ("by=time,delayed=on", "by: expected loss with delayed=on, got time"),
    ],
)
def test_what_cannot_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse(f"local:{text}")


# ---- shares

BATCH = 32


def usual(seconds: float = 0.1) -> list[ShareFit]:
    return [ShareFit(share=BATCH, answers=[seconds] * ENOUGH) for _ in range(3)]


def whole(paces: list[ShareFit]) -> list[float]:
    """Seconds of those that others are compared with."""
    return sorted(each.seconds for each in paces if each.is_reference(BATCH))


def answer(pace: ShareFit, seconds: float, times: int = ENOUGH, others: list[ShareFit] | None = None) -> None:
    for _ in range(times):
        pace.note(seconds)
        pace.adapt(whole(usual() if others is None else others), BATCH)


def test_a_worker_that_takes_ten_times_as_long_gets_a_tenth() -> None:
    pace = ShareFit(share=BATCH)
    answer(pace, 1.0, ENOUGH - 1)
    assert pace.share == BATCH  # not by one bad step
    answer(pace, 1.0, 1)
    assert pace.share == 3
    answer(pace, 3 * 1.0 / BATCH)
    assert pace.share in (3, 4)


def test_one_bad_step_among_good_ones_is_no_reason() -> None:
    pace = ShareFit(share=BATCH)
    answer(pace, 0.1)
    answer(pace, 1.0, 1)
    assert pace.share == BATCH
    answer(pace, 1.0, 1)
    assert pace.share == 3


def test_a_share_shrinks_until_the_worker_keeps_up() -> None:
    """A step of 0.02 s and 0.01 s per sample: a tenth of the samples is not enough."""
    pace = ShareFit(share=BATCH)
    for _ in range(4):
        answer(pace, 0.02 + 0.01 * pace.share)
    assert 0.02 + 0.01 * pace.share <= BEHIND * 0.1
    share = pace.share
    answer(pace, 0.02 + 0.01 * share, 20)
    assert pace.share == share


def test_somewhat_slower_is_not_slow() -> None:
    pace = ShareFit(share=BATCH)
    answer(pace, 0.19, 50)
    assert pace.share == BATCH


def test_a_worker_that_recovers_gets_its_share_back() -> None:
    pace = ShareFit(share=BATCH)
    answer(pace, 1.0)
    for _ in range(12):
        answer(pace, 0.1 * pace.share / BATCH)
    assert pace.share == BATCH
    assert not pace.fixed


def test_where_fewer_samples_do_not_help_the_share_is_whole_again_and_stays() -> None:
    """A slow link, or a fixed cost per step: shrinking would only lose samples."""
    pace = ShareFit(share=BATCH)
    answer(pace, 1.0)
    assert pace.share == 3
    answer(pace, 0.95)
    assert pace.share == BATCH
    answer(pace, 1.0, 20)
    assert pace.share == BATCH


def test_without_anyone_to_compare_with_nothing_changes() -> None:
    pace = ShareFit(share=BATCH)
    answer(pace, 5.0, others=[])
    answer(pace, 5.0, others=[ShareFit(share=4, answers=[0.1] * ENOUGH)])
    assert pace.share == BATCH


def test_a_share_is_at_least_one_sample() -> None:
    pace = ShareFit(share=BATCH)
    answer(pace, 1e6)
    assert pace.share == 1


def shown(job: Job) -> str:
    return f"shares {job.shares[:20]}, most stale {job.most_stale}"


@pytest.mark.parametrize("overhead", [0.0, 0.02, 0.05])
def test_with_one_worker_ten_times_slower_the_others_keep_their_pace(overhead: float) -> None:
    """Three even workers and a tenth of one are 0.78 of four."""
    usual, job = even(10, overhead), one_slow(10, overhead)
    assert job.pace(0.5) >= 0.7 * usual.pace(0.5), shown(job)
    assert job.pace() >= 0.65 * usual.pace(), shown(job)
    assert job.most_stale == BOUND


def test_without_overhead_and_noise_a_straggler_costs_little_more_than_what_it_does_not_compute() -> None:
    usual = Job(slower=[1, 1, 1, 1], overhead=[0, 0, 0, 0], epochs=40, noise=0).run()
    job = Job(slower=[1, 1, 1, 10], overhead=[0, 0, 0, 0], epochs=40, noise=0).run()
    assert usual.pace() == pytest.approx(4 / SECONDS_PER_SAMPLE, rel=0.05)
    assert job.pace() > 0.72 * usual.pace(), shown(job)


def test_a_slow_link_is_not_mended_by_smaller_shares() -> None:
    """Its worker keeps a whole one: with any other all would be as slow, and have trained on less."""
    job = Job(slower=[1, 1, 1, 1], overhead=[0.02, 0.02, 0.02, 0.5], epochs=10).run()
    assert set(job.shares[-10:-3]) == {BATCH}
    assert job.most_stale <= BOUND
