"""When a plan is made, and from what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from gradwire.common.parts import ALIGNMENT, Plan
from gradwire.planning import Link, parse_fusion, parse_order, parse_replan
from gradwire.planning.job import Costs
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.server.plans.planner import FULL, Measurements, Planner
from gradwire.server.plans.rate_control import PartArrival

LAYERS = 12


def manifest(sizes: Iterable[int] = [1000] * LAYERS) -> Manifest:
    made = [m.Tensor(name=f"t{place}", shape=(size,), dtype="float32") for place, size in enumerate(sizes)]
    return Manifest(tuple(made), 8)


def profile(of: Manifest, steps: int = FULL, backward_s: float = 1e-3) -> m.Profile:
    count = len(of.tensors)
    return m.Profile(
        steps=steps,
        forward_seconds=(backward_s / 2,) * count,
        backward_seconds=(backward_s,) * count,
        densities=(1.0,) * count,
        sent_bytes=4 * of.elements,
        compressing_seconds=1e-3,
        step_seconds=1.0,
    )


def planner(fusion: str = "mgwfbp", order: str = "fifo", replanning: str = "100") -> Planner:
    return Planner(parse_fusion(fusion), parse_order(order), parse_replan(replanning))


def link(of: Planner, start_s: float, byte_s: float, worker: str = "a") -> None:
    """Parts of several sizes come over it."""
    at = 0.0
    for size in (1 << 10, 1 << 12, 1 << 14, 1 << 16) * 8:
        at += start_s + byte_s * size
        of.arrived(PartArrival(worker, size, at, waited=True))


def planned(of: Planner, model: Manifest, norms: Iterable[float] = (), version: int = 5) -> Plan:
    measured = of.measured(model, [*norms])
    assert measured is not None
    plan = of.plan(version, model, measured)
    assert plan is not None
    return plan


def units(plan: Plan) -> list[int]:
    return [unit.last - unit.first for unit in plan.units]


@pytest.mark.parametrize(("fusion", "expected"), [("none", [1] * LAYERS), ("bytes=8000", [2] * 6)])
def test_some_plans_need_nothing_measured(fusion: str, expected: list[int]) -> None:
    of = planner(fusion)
    model = manifest([ALIGNMENT // 2] * LAYERS)
    of = planner(fusion.replace("8000", str(4 * ALIGNMENT)))
    plan = of.first(model)
    assert units(plan) == expected
    assert not plan.merged
    of.profiled("a", 1, profile(model))
    assert not of.due(1000)


def test_until_something_is_measured_tensors_go_by_size() -> None:
    of, model = planner("seamgs", "two-phase"), manifest()
    plan = of.first(model)
    assert (plan.units, plan.merged) == (model.plan().units, False)
    assert not of.due(1)
    of.profiled("a", 1, profile(model, steps=5))
    assert of.due(1)


def test_what_a_message_costs_decides_what_is_merged() -> None:
    model = manifest()
    of = planner()
    of.first(model)
    of.profiled("a", 1, profile(model))
    link(of, 1e-6, 1e-9)
    cheap = planned(of, model)
    assert units(cheap) == [1] * LAYERS
    dear = planner()
    dear.first(model)
    dear.profiled("a", 1, profile(model))
    link(dear, 1.0, 1e-9)
    plan = planned(dear, model)
    assert units(plan) == [LAYERS]
    assert plan.merged


def test_seamgs_leaves_apart_what_would_lose_accuracy() -> None:
    model = manifest([1000, 1000])
    of = planner("seamgs")
    of.first(model)
    of.profiled("a", 1, replace(profile(model), densities=(0.01, 0.02)))
    link(of, 1.0, 1e-9)
    # Together less of the larger gradients is left out than if the smaller ones have more elements to send.
    assert units(planned(of, model, (5.0, 1.0))) == [2]
    assert units(planned(of, model, (1.0, 5.0), version=105)) == [1, 1]


def test_seamgs_passes_over_what_is_sent_whole() -> None:
    """Two convolutions and the normalizations between and behind them, whose gradients are larger."""
    model = manifest([1000, 10, 10, 1000, 10, 10])
    of = planner("seamgs")
    of.first(model)
    of.profiled("a", 1, replace(profile(model), densities=(0.01, 1.0, 1.0, 0.01, 1.0, 1.0)))
    link(of, 1.0, 1e-9)
    norms = (5.0, 50.0, 50.0, 1.0, 50.0, 50.0)
    assert units(planned(of, model, norms)) == [6]
    of.profiled("a", 1, replace(profile(model), densities=(0.02, 1.0, 1.0, 0.01, 1.0, 1.0)))
    assert units(planned(of, model, norms, version=105)) == [5, 1]
    # What is asked of a running job knows all norms: with another compressor other tensors may be sparse.
    measured = of.measured(model, norms)
    assert measured is not None
    assert measured.square_norms == norms


def test_plans_come_after_the_first_profile_after_fifty_steps_and_then_every_so_many_versions() -> None:
    of, model = planner(replanning="100"), manifest()
    of.first(model)
    link(of, 1e-3, 1e-9)
    of.profiled("a", 1, profile(model, steps=5))
    assert of.due(7)
    planned(of, model, version=7)
    assert not of.due(8)
    of.profiled("a", 1, profile(model))
    assert of.due(52)
    planned(of, model, version=52)
    assert not of.due(151)
    assert of.due(152)


def test_a_drift_is_a_change_by_a_fifth() -> None:
    of, model = planner(replanning="drift"), manifest()
    of.first(model)
    link(of, 1e-3, 1e-7)
    of.profiled("a", 1, profile(model))
    planned(of, model, version=10)
    assert not of.due(59)
    assert of.due(100)
    of.profiled("a", 1, profile(model, backward_s=1.1e-3))
    same = of.measured(model)
    assert same is not None
    assert of.plan(100, model, same) is None
    of.profiled("a", 1, profile(model, backward_s=1.5e-3))
    slower = of.measured(model)
    assert slower is not None
    assert of.plan(150, model, slower) is not None


def test_never_is_after_the_first_plans() -> None:
    of, model = planner(replanning="never"), manifest()
    of.first(model)
    link(of, 1e-3, 1e-9)
    of.profiled("a", 1, profile(model, steps=5))
    planned(of, model, version=7)
    of.profiled("a", 1, profile(model))
    assert of.due(60)
    planned(of, model, version=60)
    assert not of.due(10**6)


def test_several_workers_count_alike_and_who_is_gone_no_more() -> None:
    of, model = planner(), manifest()
    of.first(model)
    link(of, 1e-3, 1e-9)
    of.profiled("a", 1, profile(model, backward_s=1e-3))
    of.profiled("b", 1, profile(model, backward_s=3e-3))

    def seconds() -> float:
        found = of.measured(model)
        assert isinstance(found, Measurements)
        return found.layers[0].backward_s

    assert seconds() == pytest.approx(2e-3)
    of.keep([("a", 1)])
    assert seconds() == pytest.approx(1e-3)


def test_only_parts_that_waited_show_the_link() -> None:
    of, model = planner(), manifest()
    of.first(model)
    assert of.measured(model) is None
    of.profiled("a", 1, profile(model))
    for number in range(100):
        of.arrived(PartArrival("a", 1000, float(number), waited=False))
    measured = of.measured(model)
    assert measured is not None
    assert measured.link == Link(start_s=Costs().part_s, byte_s=0.0)
    link(of, 0.1, 1e-6)
    measured = of.measured(model)
    assert measured is not None
    assert measured.link.start_s == pytest.approx(0.1)
    assert measured.link.byte_s == pytest.approx(1e-6)


def test_all_workers_together_have_what_an_uneven_link_has() -> None:
    of, model = planner(), manifest()
    of.first(model)
    for begin in range(0, 100, 10):
        for first, worker in enumerate("ab"):  # one is through before the other begins: 1 s for 1000 bytes
            for part in range(4):
                at = begin + 4.0 * first + part + 1
                of.arrived(PartArrival(worker, 1000, at, waited=part > 0))
    of.profiled("a", 1, profile(model))  # the other has not said anything yet
    measured = of.measured(model)
    assert measured is not None
    assert measured.link.byte_s == pytest.approx(2e-3)
    of.keep([("a", 1)])
    measured = of.measured(model)
    assert measured is not None
    assert measured.link.byte_s == pytest.approx(1e-3)


def test_cores_are_shared_where_all_are_on_the_server_s_machine() -> None:
    model = manifest()
    of = Planner(parse_fusion("none"), parse_order("fifo"), parse_replan("never"), machine="m", cores=2)
    of.first(model)
    for worker, share in (("a", 0.5), ("b", 1.0)):
        of.profiled(worker, 1, replace(profile(model), machine="m", processor_share=share))
    measured = of.measured(model)
    assert measured is not None
    assert (measured.cores, measured.processor_share) == (2, 0.75)
    of.profiled("b", 1, replace(profile(model), machine="another"))
    measured = of.measured(model)
    assert measured is not None
    assert measured.cores is None


def test_a_part_takes_the_server_so_long_for_each_worker() -> None:
    of, model = planner(), manifest()
    of.first(model)
    for worker in "abc":
        of.profiled(worker, 1, profile(model))
        link(of, 0.0, 1e-6, worker)
    measured = of.measured(model)
    assert measured is not None
    assert measured.link.start_s == 3 * Costs().part_s


def test_who_came_back_counts_as_it_is_now() -> None:
    of, model = planner(), manifest()
    of.first(model)
    of.profiled("a", 1, profile(model, steps=5))
    of.profiled("a", 2, profile(model, backward_s=3e-3))
    of.keep([("a", 2)])
    measured = of.measured(model)
    assert measured is not None
    assert measured.steps == FULL
    assert measured.layers[0].backward_s == pytest.approx(3e-3)


def test_what_leaves_after_backward_may_go_together() -> None:
    model = manifest()
    at_once = Planner(parse_fusion("mgwfbp"), parse_order("fifo"), parse_replan("100"), at_once=True)
    for of, expected in ((planner(), LAYERS), (at_once, 1)):
        of.first(model)
        of.profiled("a", 1, profile(model))
        link(of, 1e-6, 1e-9)
        assert len(units(planned(of, model))) == expected


def test_a_credit_is_a_part_of_the_plan() -> None:
    plan = planner("bytes", "credit=3").first(manifest([8 * ALIGNMENT] * 3))
    assert plan.credit == 3
    assert sorted(plan.turns) == list(range(len(plan.parts)))
