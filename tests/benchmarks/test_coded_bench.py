"""The jobs of `gc-bench coded`: options of each exchange, and the table of seconds to an accuracy."""

from __future__ import annotations

import pytest

from gradwire.benchmarks import coded
from gradwire.benchmarks.arguments import BenchError
from gradwire.benchmarks.schemes import SCHEMES
from gradwire.server.job.modes.registry import parse
from gradwire.settings import RunSettings


@pytest.mark.parametrize("nodes", [2, 8, 10])
@pytest.mark.parametrize("name", coded.COMPETITORS)
def test_each_exchange_trains_the_model_with_a_mode_that_exists(name: str, nodes: int) -> None:
    settings, scheme = coded.target_settings(name, nodes, "cnn", 0.25, 7)
    parse(settings.mode).check_workers(settings.mode, nodes)
    assert scheme in SCHEMES
    assert settings.task.endswith(":digits:model=cnn,seconds=0.25")
    assert (settings.workers, settings.seed) == (nodes, 7)
    assert settings.learning_rate == (0.1 if name == "ASGD" else pytest.approx(0.05 * nodes))
    assert ("redundancy" in settings.mode) == (name == "CSSGD")


def test_asgd_is_repeated_with_other_seeds_and_compared_by_its_mean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int]] = []

    def seconds(settings: RunSettings, scheme: str, mbit: float) -> float | None:
        ran.append((settings.mode, settings.seed))
        if settings.mode == "sync":
            return None
        return {"async": 1.0 + settings.seed, "coded": 8.0}.get(settings.mode, 4.0)

    monkeypatch.setattr(coded, "_seconds_to_target", seconds)
    rows = coded.target_part([4], "mlp", 0.0, 1, 1, 3, 100)
    assert [seed for mode, seed in ran if mode == "async"] == [1, 2, 3]
    of = {row.name: row.seconds for row in rows}
    assert of["ASGD"] == (2.0, 3.0, 4.0)
    assert of["parameter server"] == (None,)
    printed = capsys.readouterr().out
    assert "| mlp | 4 | CSSGD | 1 | 4.000 | 0.50 |" in printed
    assert "0 of 1 do" in printed
    assert "| 0.38 |" in printed  # 3 s, the mean of ASGD, against 8 s


def test_a_model_that_digits_lacks_is_refused() -> None:
    with pytest.raises(BenchError, match="--model: expected mlp or cnn, got 'vgg'"):
        coded.model_name("vgg")
    with pytest.raises(BenchError, match="expected 1 to 30 repetitions, got 31"):
        coded.repetitions("31")
