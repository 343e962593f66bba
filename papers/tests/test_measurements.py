"""Measurements: the papers' numbers, what is made of ours, and how long computation is emulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.benchmarks import Setup
from gradwire.compressors import create
from gradwire.planning import parse_fusion, tensors
from gradwire_papers import (
    compressing,
    emulated,
    four_bit,
    local_steps,
    measurements,
    pages,
    seamgs,
    target,
    trainings,
)
from gradwire_papers.catalogue import MEASUREMENTS
from gradwire_papers.emulated import Method, MethodRow, StepTimings
from gradwire_papers.result import Result

SETUP = Setup(model="3x40", workers=2, mbit=0, seconds=0.1, steps=12, part_bytes=0)
ROW = MethodRow(
    model="3x40",
    workers=2,
    share=0.5,
    method="one",
    step_seconds=1.0,
    computing_seconds=0.5,
    bytes_in=1e6,
    parts=3,
    speedup=1.0,
    paper=(1.0,),
)


def test_the_exchange_takes_the_share_of_itself_and_the_computation() -> None:
    assert emulated.computation(1.0, 0.25) == pytest.approx(3.0)
    assert emulated.computation(3.0, 0.75) == pytest.approx(1.0)


def test_ways_are_compared_with_the_first_and_with_the_paper() -> None:
    seconds = {"slow": 2.0, "fast": 0.5}

    def take(setup: Setup, method: Method) -> StepTimings:
        return StepTimings(step_seconds=seconds[method.name], computing_seconds=0.4, bytes_in=1e6, parts=2)

    methods = [Method(name="slow", paper=(1.0,)), Method(name="fast", paper=(3.81, 3.99))]
    rows = emulated.measure(SETUP, 0.5, methods, take)
    assert [row.speedup for row in rows] == [1.0, 4.0]
    assert emulated.cells(rows[1], methods[1])[-2:] == ["4.00", "3.81, 3.99"]
    assert len(emulated.cells(rows[1], methods[1])) == len(emulated.HEADINGS)
    assert emulated.differences(rows) == []


def test_another_order_than_the_papers_is_said_beyond_the_noise() -> None:
    rows = [ROW, replace(ROW, method="two", step_seconds=1.1, paper=(1.5,))]
    assert emulated.differences(rows) == [
        "3x40, share 0.5: two is 1.50 times faster than one in the paper, and takes 1.10 times as long here"
    ]
    alike = [ROW, replace(rows[1], paper=(1.01,))]
    assert emulated.differences(alike) == [], "the paper's order is not beyond the noise"
    rows[1] = replace(rows[1], step_seconds=1.01)
    assert emulated.differences(rows) == []
    rows[1] = replace(rows[1], step_seconds=9.0, paper=())
    assert emulated.differences(rows) == [], "the paper has not measured that"


def test_the_papers_numbers_are_those_of_its_tables() -> None:
    largest = {each.name: each.paper for each in seamgs.methods("resnet110", 1_727_962)}
    assert largest["SEAMGS"][0] == pytest.approx(1.63, abs=0.01)
    assert largest["SEAMGS"][0] / largest["MGS"][0] == pytest.approx(1.25, abs=0.03)
    of_four = {each.name: each.paper for each in four_bit.methods("inception-cifar", 4, 0.25)}
    of_two = {each.name: each.paper for each in four_bit.methods("inception-cifar", 2, 0.25)}
    assert of_four["4Bit"] == pytest.approx((1.281, 1.233), abs=1e-3)
    assert of_four["2Bit"] == pytest.approx((1.373, 1.265), abs=1e-3)
    assert of_two["4Bit"] == pytest.approx((1.218, 1.193), abs=1e-3)
    assert of_two["2Bit"] == pytest.approx((1.309, 1.221), abs=1e-3)
    pushes = {each.name: each for each in four_bit.methods("inception-cifar", 4, 0.45)}
    assert pushes["4Bit, push only"].paper == of_four["4Bit"]
    assert pushes["2Bit, push only"].paper == of_four["2Bit"]
    narrow = [each for each in pushes.values() if each.paper and each.name != four_bit.BASELINE]
    assert {each.downlink for each in narrow} == {"none"}
    for model, text in (("vgg19-cifar", 3.81), ("resnet50", 2.51), ("resnet20", 1.49)):
        corrected = local_steps.methods(model)[-1].paper
        assert corrected == pytest.approx((text, text), rel=0.13)
        assert corrected[1] == text
    assert compressing.TABLE_3_5["resnet56"]["GCAC"] == pytest.approx((0.691, 2.12), abs=0.01)


def test_the_papers_speedups_are_for_its_own_models_and_share() -> None:
    assert not any(each.paper for each in seamgs.methods("vgg19", 1000))
    assert not any(each.paper for each in four_bit.methods("inception-cifar", 4, 0.9))
    assert not any(each.paper for each in four_bit.methods("resnet50", 4, 0.25))
    assert not any(each.paper for each in local_steps.methods("resnet110"))


def test_the_shares_of_the_4bit_paper_follow_from_its_times() -> None:
    """Saved time is the share, or the half of it that is the push, times what the codes leave out."""
    both, push = list[float](), list[float]()
    for table in (four_bit.TABLE_2, four_bit.TABLE_3):
        for seconds in table.values():
            for name, bits in (("2Bit", 2), ("4Bit", 4)):
                both.append((1 - seconds[name] / seconds["baseline"]) / (1 - bits / 32))
                push.append(2 * both[-1])
    assert (min(push), max(push)) == pytest.approx(four_bit.PUSH_ONLY, abs=0.01)
    assert max(both) == pytest.approx(four_bit.BOTH_WAYS[1], abs=0.01)
    assert all(
        low <= share <= high
        for (low, high), share in zip(
            (four_bit.BOTH_WAYS, four_bit.PUSH_ONLY), MEASUREMENTS["4bit"].options["shares"], strict=True
        )
    )


def test_every_way_is_one_that_a_job_can_have() -> None:
    methods = [
        *seamgs.methods("resnet20", 269_722),
        *four_bit.methods("inception-cifar", 4, 0.25),
        *local_steps.methods("resnet20"),
    ]
    for method in methods:
        create(method.compressor)
        parse_fusion(method.fusion)
        assert method.mode.partition(":")[0] in ("sync", "local")
    for compressor, _ in compressing.compressors(10).values():
        create(compressor)
    for model in (*seamgs.TABLE_1, four_bit.MODEL, *local_steps.TABLE_2, *compressing.TABLE_3_5):
        assert tensors(model)
    assert MEASUREMENTS["seamgs"].options["models"] == list(seamgs.TABLE_1)
    assert MEASUREMENTS["compressing"].options["models"] == list(compressing.TABLE_3_5)
    assert MEASUREMENTS["local"].options["models"] == list(local_steps.TABLE_2)


def test_sparse_ways_send_the_same_elements_and_differ_in_their_messages() -> None:
    dense, *sparse = seamgs.methods("resnet20", 269_722)
    assert dense.compressor == "none"
    assert len({method.compressor for method in sparse}) == 1
    assert len({method.fusion for method in sparse}) == 5
    assert seamgs.part_bytes([20, 300, 4]) == 1200


@pytest.mark.parametrize(
    ("model", "parts"), [("resnet20", 20), ("resnet56", 55), ("resnet110", 90), ("vgg16-cifar", 12)]
)
def test_seamgs_merges_what_the_time_rule_merges_at_the_papers_densities(model: str, parts: int) -> None:
    """Densities, norms and link are those of `gc-paper seamgs`."""
    layers = seamgs.layers_at(model, 0.23)
    link = seamgs.link_of(replace(SETUP, workers=4, mbit=500))
    groups = parse_fusion("seamgs").groups(layers, link)
    by_time = parse_fusion("seamgs").groups([replace(layer, square_norm=0.0) for layer in layers], link)
    assert len(groups) == len(by_time) == parts, "the rule of accuracy forbids nothing"


def test_the_sparse_error_of_seamgs_is_at_most_that_of_lags() -> None:
    """And choosing from the whole model, as Rand-K does, has one density for all tensors."""
    model = "resnet20"
    setup = replace(SETUP, model=model, workers=4, mbit=500, seconds=0.23)
    chosen = {each.name: each for each in seamgs.methods(model, 269_722)}
    parts = {"P-SGD": 59, "Rand K": 1, "LAGS": 59, "MGS": 10, "MG-WFBP": 4, "SEAMGS": 8}
    error = {name: seamgs.sparse_error(setup, method, parts[name]) for name, method in chosen.items()}
    assert error["P-SGD"] == 0
    assert error["SEAMGS"] <= error["LAGS"] < 1
    densities = seamgs.densities_of(model)
    sparse = [each for each in zip(tensors(model), densities, strict=True) if each[1] < 1]
    kept = sum(tensor.elements * density for tensor, density in sparse)
    assert error["Rand K"] == pytest.approx(1 - kept / sum(tensor.elements for tensor, _ in sparse))
    norm = sum(tensor.square_norm for tensor, _ in sparse)
    alone = sum((1 - density) * tensor.square_norm for tensor, density in sparse) / norm
    assert error["LAGS"] == pytest.approx(alone)


def test_deep_models_are_simulated_and_their_rows_say_so() -> None:
    setup = replace(SETUP, model="resnet110", workers=4, mbit=10_000)
    ((rows, methods),) = seamgs.rows_of(setup, [0.5])
    assert [row.method for row in rows] == [method.name for method in methods]
    assert {row.model for row in rows} == {"resnet110 (simulated)"}
    of = {row.method: row for row in rows}
    assert of["P-SGD"].parts == of["LAGS"].parts == 329
    assert of["Rand K"].parts == 1
    assert of["SEAMGS"].step_seconds <= of["LAGS"].step_seconds <= of["P-SGD"].step_seconds


def test_the_share_of_the_multi_step_paper_follows_from_its_times() -> None:
    for model, share in (("vgg19-cifar", 0.76), ("resnet50", 0.64), ("resnet20", 0.33)):
        assert local_steps.share_of(model) == pytest.approx(share, abs=0.01)


def test_a_local_step_has_its_part_of_the_exchange() -> None:
    """Rounds of 4 steps of 1 s, half of it computing, and 2 s of exchange after each."""
    trace = [SimpleNamespace(began=step + 2.0 * (step // 4), seconds=0.5) for step in range(20)]
    recorded: Any = SimpleNamespace(traces=[trace, trace])
    assert emulated.split(recorded, 4, 16) == pytest.approx((1.5, 0.5))


def test_two_bit_overtakes_where_it_is_faster() -> None:
    def rows(share: float, two: float, four: float) -> list[MethodRow]:
        return [
            replace(ROW, share=share, method=name, step_seconds=seconds)
            for name, seconds in (
                *(("2Bit", two), ("4Bit", four)),
                *(("2Bit, push only", 0.7), ("4Bit, push only", 0.8 * share)),
            )
        ]

    found = [*rows(0.9, 0.5, 0.6), *rows(0.25, 0.91, 0.9)]
    both, push = four_bit.overtaken(found).splitlines()
    assert both == "2 workers: 2Bit is faster than 4Bit from a share of 0.9 on"
    assert push == "2 workers: 2Bit, push only is faster than 4Bit, push only from a share of 0.9 on"
    assert "none of these" in four_bit.overtaken(found[4:])


def test_compressing_is_timed_as_a_worker_compresses() -> None:
    chosen = {name: compressing.compressors(10)[name] for name in ("L1", "k-RNGC, delay 3")}
    found = compressing.compressing_seconds(SETUP, chosen)
    assert set(found) == set(chosen)
    assert all(0 < seconds < 1 for seconds in found.values())


def test_curves_are_means_over_seeds_and_the_record_keeps_each_seed(tmp_path: Path) -> None:
    def run(*accuracies: float | None) -> Any:
        return SimpleNamespace(accuracy_by_epoch=accuracies, seconds_by_epoch=(1.0, 2.0, len(accuracies)))

    found = {"sync": [run(0.2, 0.4, 0.6), run(0.4, 0.8, None)]}
    panel = trainings.curves(found, "t", "seconds", over_seconds=True)
    at, means = panel.lines["sync"]
    assert list(at) == [1.0, 2.0]
    assert list(means) == pytest.approx([0.3, 0.6])
    assert panel.runs == {"sync": [[0.2, 0.4], [0.4, 0.8]]}
    result = Result(settings="seeds 1, 2", ours="", headings=(), rows=(), panels=[panel])
    record = measurements.Record(
        measurement=next(iter(MEASUREMENTS)), date="", command="", quick=False, seconds=0, result=result
    )
    measurements.write(tmp_path, {record.measurement: record})
    (again,) = measurements.read(tmp_path).values()
    assert again.result is not None
    assert again.result.panels[0].runs == panel.runs
    assert pages.drawn(result) != pages.drawn(replace(result, panels=[replace(panel, runs={})]))


def test_a_target_is_reached_by_the_first_epoch_that_ends_above_it() -> None:
    accuracies, seconds = (0.3, None, 0.7, 0.65), (1.0, 2.0, 3.0, 4.0)
    assert target.seconds_to(0.6, accuracies, seconds) == 3.0
    assert target.seconds_to(0.8, accuracies, seconds) is None
    row = target.TargetRow(
        method="x", seeds=(1, 2), accuracies=(0.65, 0.7), seconds=((3.0, 5.0), (4.0, None))
    )
    found = target.cells(row, Method(name="x"))
    assert len(found) == len(target.HEADINGS)
    assert str(found[2]).startswith("4.000")
    assert found[3] == "1 of 2 seeds do"
