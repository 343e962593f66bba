"""The figures behind what docs/accuracy.md says of gradients beyond the levels."""

from __future__ import annotations

import pytest

from gradwire.benchmarks.tails import main, shares_beyond


def test_shares_grow_in_the_first_epochs() -> None:
    first, *_, last = shares_beyond("digits", seed=1, epochs=8)
    assert first.keys() == {"0.weight", "2.weight", "4.weight"}
    for name in ("0.weight", "2.weight"):
        assert first[name] < 0.1
        assert last[name] == pytest.approx(0.2, abs=0.04)


def test_a_line_per_epoch_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--epochs", "1"])
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["epoch", "0.weight", "2.weight", "4.weight"]
    assert line.split()[0] == "1"
