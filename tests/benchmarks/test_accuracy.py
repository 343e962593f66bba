"""The arithmetic behind the accuracy table, on made-up runs."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from gradwire.benchmarks.accuracy import MOST_SEEDS, ORDERS, area, check_order, estimate, main, markdown
from gradwire.deploy.processes import RunError
from gradwire.deploy.report import RunResult

ORDER = ORDERS[0]


def run(compressor: str, *accuracies: float | None, seed: int = 1) -> RunResult:
    return RunResult(
        task="digits",
        mode="sync",
        compressor=compressor,
        downlink="none",
        seed=seed,
        workers=4,
        steps=11 * len(accuracies),
        epochs=len(accuracies),
        seconds=1.0,
        validation_accuracy=accuracies[-1],
        validation_loss=0.5,
        wire_bytes_up=100,
        wire_bytes_down=800,
        raw_bytes_up=770,
        raw_bytes_down=800,
        payload_bytes_up=95,
        compressed_payload_bytes_up=90,
        compressed_raw_bytes_up=720,
        refused_pushes=0,
        lost_workers=(),
        parameters_sha256="ab" * 32,
        finished=True,
        accuracy_by_epoch=accuracies,
        seconds_by_epoch=(None,) * len(accuracies),
        local_steps=0,
        largest_staleness=0,
        repeated_samples=0,
        redundancy=0,
        uncoded_exchanges=0,
        clipped_elements=0,
        step_seconds=0.1,
        predicted_step_seconds=0.0,
        options={},
    )


def test_interval_is_students() -> None:
    five = estimate([0.90, 0.91, 0.92, 0.93, 0.94])
    assert five.mean == pytest.approx(0.92)
    assert five.half_width == pytest.approx(2.776 * 0.0158114 / 5**0.5, rel=1e-4)
    assert str(five) == "0.920 ± 0.020"


def test_quantiles_are_exact_for_as_many_seeds_as_are_taken() -> None:
    student = pytest.importorskip("scipy.stats").t
    for count in range(2, MOST_SEEDS + 1):
        values = [float(value) for value in range(count)]
        exact = student.ppf(0.975, count - 1) * statistics.stdev(values) / count**0.5
        assert estimate(values).half_width == pytest.approx(exact, rel=3e-4)
    with pytest.raises(ValueError, match="at most 30 values, got 31"):
        estimate([0.5] * (MOST_SEEDS + 1))


@pytest.mark.parametrize("text", ["", "1,2,x", "1,1", "-1", ",".join(map(str, range(31)))])
def test_seeds_to_correct_are_said_before_any_run(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([f"--seeds={text}"])
    assert caught.value.code == 2
    assert "expected 1 to 30 distinct numbers" in capsys.readouterr().err


def test_a_single_seed_has_no_interval() -> None:
    assert str(estimate([0.9])) == "0.900"


def test_a_lost_evaluation_is_not_averaged_over() -> None:
    with pytest.raises(RunError, match="evaluation was lost"):
        area(run("4bit", 0.5, None, 0.9))


def test_a_run_that_lost_a_worker_is_not_counted() -> None:
    with pytest.raises(RunError, match="4bit, seed 1: lost worker-3"):
        area(dataclasses.replace(run("4bit", 0.5, 0.9), lost_workers=("worker-3",)))


def test_order_is_judged_on_runs_with_the_same_seed() -> None:
    # Between seeds the accuracy varies far more than between compressors.
    runs = {
        name: [run(name, 0.2 + seed / 10 - rank / 100, seed=seed) for seed in (1, 2, 3)]
        for rank, name in enumerate(ORDER.compressors)
    }
    steps = check_order(ORDER, runs)
    assert [step.holds for step in steps] == [True, True, True]
    assert all(step.certain for step in steps)
    _, four_bit, one_group, _ = ORDER.compressors
    assert str(steps[1]) == f"{four_bit} > {one_group}: holds (0.010 ± 0.000)"


def test_equal_is_enough_only_where_the_order_says_so() -> None:
    runs = {name: [run(name, 0.5, seed=seed) for seed in (1, 2)] for name in ORDER.compressors}
    equal_allowed, *others = check_order(ORDER, runs)
    assert equal_allowed.holds
    assert not any(step.holds for step in others)


def test_worse_beyond_the_noise_fails_also_where_equal_is_enough() -> None:
    runs = {name: [run(name, 0.5), run(name, 0.6)] for name in ORDER.compressors}
    runs["none"] = [run("none", 0.4), run("none", 0.5)]
    assert not check_order(ORDER, runs)[0].holds


def test_table_has_a_row_per_compressor_and_says_what_became_of_the_order() -> None:
    text = markdown({name: [run(name, 0.2, 0.5 - rank / 10)] for rank, name in enumerate(ORDER.compressors)})
    assert "| compressor | epoch 1 | mean over epochs | bytes up |" in text
    assert "| `none` | 0.200 | 0.350 | 1/7.70 |" in text
    assert text.count(": holds") == 3
    assert "summed gradient" not in text, "an order whose compressors were not run is left out"
