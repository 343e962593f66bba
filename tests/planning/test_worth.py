"""Whether compressing is worth its time: decisions by hand, and over many steps of simulated jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.planning.worth import LONGEST_PAUSE, MARGIN, Choice, Seen, decide, other_way, worth


def test_a_unit_is_worth_it_if_the_link_takes_longer_than_the_codec() -> None:
    assert worth(0.01, 1e6, 2e-8, compressed=False)
    assert not worth(0.01, 1e6, 0.9e-8, compressed=False)
    assert not worth(0.01, 1e6, 0.0, compressed=True)


def test_a_unit_that_is_about_worth_it_stays_as_it_is() -> None:
    for byte_s in (0.9e-8, 1e-8, 1.1e-8):
        assert worth(0.01, 1e6, byte_s, compressed=True)
        assert not worth(0.01, 1e6, byte_s, compressed=False)


SEEN = Seen(step_s=1.0, codec_s=0.1, waited_s=0.5, dense_link_s=0.4, sent_link_s=0.05)


def test_the_least_that_a_step_may_take_the_other_way() -> None:
    assert other_way(True, SEEN) == 0.9
    assert other_way(True, replace(SEEN, dense_link_s=2.0)) == 2.0, "the link alone takes longer"
    assert other_way(False, SEEN) == pytest.approx(1.0 - 0.35 + 0.1)
    assert other_way(False, replace(SEEN, waited_s=0.2)) == pytest.approx(1.0 - 0.2 + 0.1), (
        "it waits for less"
    )


def test_what_cannot_gain_is_not_tried() -> None:
    calm = replace(SEEN, codec_s=MARGIN / 2)
    assert decide(Choice(), calm) == Choice()
    idle = replace(SEEN, waited_s=0.1)
    assert decide(Choice(compressing=False), idle) == Choice(compressing=False)


def test_a_trial_is_kept_only_if_it_is_faster_and_pauses_double_if_not() -> None:
    trial = decide(Choice(), SEEN)
    assert trial == Choice(compressing=False, reference_s=1.0)
    assert decide(trial, replace(SEEN, step_s=0.95)) == Choice(compressing=False)
    choice, pauses = trial, list[int]()
    for _ in range(9):
        choice = decide(choice, replace(SEEN, step_s=0.99))
        assert choice.compressing
        pauses.append(choice.pause)
        while choice.pause:
            choice = decide(choice, SEEN)
            assert not choice.trial
        choice = decide(choice, SEEN)
        assert choice.trial
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64, LONGEST_PAUSE]
