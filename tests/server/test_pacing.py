"""How fast workers are told to send, from when the parts of a round came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from gradwire.server.plans.rate_control import MOST_PARTS, PartArrival, RateControl, rates, sending_intervals


def parts(worker: str, *times: float, size: int = 100) -> list[PartArrival]:
    """That came at these times, the first at once and all others behind it."""
    return [PartArrival(worker, size, at, waited=number > 0) for number, at in enumerate(times)]


def fair(*came: list[PartArrival]) -> dict[str, float]:
    found = rates(sending_intervals([each for some in came for each in some], 0.0))
    return {worker: each.fair for worker, each in found.items()}


def round_of(pacing: RateControl, came: Sequence[PartArrival], workers: Sequence[str] | None = None) -> None:
    pacing.open({each.worker for each in came} if workers is None else workers, 0.0)
    for each in came:
        pacing.arrived(each)
    pacing.close()


def link(speeds: Sequence[int], rates: Sequence[float]) -> list[PartArrival]:
    """Eight parts of 100 bytes of each worker, over a link that carries 400 bytes in a second. Whom no rate
    holds back takes of what the others leave, in proportion to speeds, until it has sent all."""
    step, now = 0.01, 0.0
    left = [800.0] * len(speeds)
    found: list[PartArrival] = []
    while any(left):
        now += step
        most = [min(bytes_, rate * step) for bytes_, rate in zip(left, rates, strict=True)]
        given, free = [0.0] * len(speeds), 400 * step
        while free > 1e-9 and any(most[place] - given[place] > 1e-9 for place in range(len(speeds))):
            want = [place for place in range(len(speeds)) if most[place] - given[place] > 1e-9]
            total = sum(speeds[place] for place in want)
            for place in want:
                more = min(most[place] - given[place], free * speeds[place] / total)
                given[place] += more
            free = 400 * step - sum(given)
        for place, bytes_ in enumerate(given):
            parts_left = math.ceil(left[place] / 100 - 1e-6)
            left[place] = left[place] - bytes_ if left[place] - bytes_ > 1e-6 else 0.0
            done = parts_left - math.ceil(left[place] / 100 - 1e-6)
            found += [PartArrival(f"{place}", 100, now, waited=parts_left < 8)] * done
    return found


def test_a_worker_alone_has_the_link_for_itself() -> None:
    assert fair(parts("a", 1.0, 2.0, 4.0)) == {"a": pytest.approx(300 / 4)}


def test_workers_that_send_at_the_same_time_share_what_comes() -> None:
    found = fair(parts("q", 1.0, 2.0, 3.0), parts("s", 3.0, 3.75, size=150))
    both = (75 + 150) / 2  # from 2.25 on
    assert found == {"q": pytest.approx((225 + both) / 3), "s": pytest.approx((both + 150) / 1.5)}


def test_what_comes_while_another_computes_is_not_shared() -> None:
    found = fair(parts("e", 1.0, 2.0), parts("l", 5.5, 6.0))
    assert found == {"e": pytest.approx(100), "l": pytest.approx(200)}


def test_the_first_part_is_not_taken_to_have_begun_before_the_round() -> None:
    assert sending_intervals(parts("a", 1.0, 4.0), 0.5)[0].since == 0.5


def test_a_part_that_did_not_wait_says_nothing_of_the_link() -> None:
    assert fair([PartArrival("a", 100, at, waited=False) for at in (1.0, 2.0, 3.0)]) == {}


def test_nothing_is_no_rate() -> None:
    assert fair([]) == {}


@pytest.mark.parametrize("speeds", [(1, 1, 1, 1), (8, 4, 2, 1), (20, 1, 1, 1)])
def test_parts_come_from_all_workers_together_after_some_rounds(speeds: Sequence[int]) -> None:
    pacing, told = RateControl(), [math.inf] * 4
    there: list[list[float]] = []
    for _ in range(12):
        came = link(speeds, told)
        round_of(pacing, came)
        told = [pacing.rate(f"{place}") for place in range(4)]
        by_worker = [[each.at for each in came if each.worker == f"{place}"] for place in range(4)]
        there.append([max(times) for times in zip(*by_worker, strict=True)])  # by part, from everybody
    assert there[-1] == pytest.approx(range(1, 9), rel=0.15)
    assert sum(there[-1]) < 1.05 * sum(there[0])


def test_a_link_that_has_become_faster_is_noticed() -> None:
    pacing, rate, rounds = RateControl(), 10.0, 0
    while rate < 200:
        round_of(pacing, parts("a", *(100 / rate * number for number in range(1, 4))))
        rate, rounds = pacing.rate("a"), rounds + 1
        assert rounds < 40
    assert rate <= 200 * 1.1 + 1


def test_one_round_that_takes_long_changes_nothing() -> None:
    pacing = RateControl()
    for slow in (1, 1, 20, 1):
        round_of(pacing, parts("a", *(slow * number for number in range(1, 5))))
        assert pacing.rate("a") >= 100


def test_a_link_that_has_become_slower_is_believed_the_second_time() -> None:
    pacing, told = RateControl(), list[int]()
    for slow in (1, 20, 20):
        round_of(pacing, parts("a", *(slow * number for number in range(1, 5))))
        told.append(pacing.rate("a"))
    assert told == [103, 103, 6]


def test_with_other_workers_rates_are_found_anew() -> None:
    pacing = RateControl()
    round_of(pacing, [*parts("a", 1.0, 2.0, 3.0), *parts("b", 1.0, 2.0, 3.0)])
    assert pacing.rate("a")
    pacing.open({"a"}, 4.0)
    assert not pacing.rate("a")
    assert not pacing.rate("b")


def test_what_is_kept_of_a_round_is_bounded() -> None:
    pacing = RateControl()
    pacing.open({"a"}, 0.0)
    for number in range(2 * MOST_PARTS):
        pacing.arrived(PartArrival("a", 100, float(number + 1), waited=number > 0))
    pacing.close()
    assert pacing.rate("a") == 103


def test_who_has_hardly_ever_two_parts_waiting_is_told_nothing() -> None:
    pacing = RateControl()
    round_of(pacing, parts("a", 1.0, 2.0))
    assert pacing.rate("a") == 0
    assert pacing.rate("unknown") == 0


def test_what_comes_outside_of_such_a_round_is_not_kept() -> None:
    pacing = RateControl()
    for each in parts("a", 1.0, 2.0, 3.0):
        pacing.arrived(each)
    pacing.close()
    round_of(pacing, [], ["a"])
    assert pacing.rate("a") == 0
