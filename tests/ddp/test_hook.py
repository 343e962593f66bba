"""gradwire.ddp under torchrun, with three ranks over gloo, beside plain references of both exchanges."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradwire.ddp
from gradwire.common.machine import cores
from gradwire.common.spec import SpecError
from gradwire.compressors import (
    Bases,
    LayerRule,
    ModelCompressor,
    Payload,
    ProjectedPayload,
    Random,
    StepContext,
    TensorSpec,
    create,
    decode,
    norm,
    parse_compressor,
    reduce_payloads,
    sum_coordinates,
)
from gradwire.compressors.registry import BUILT_IN
from gradwire.ddp.bundle import Parameter
from gradwire.ddp.shares import for_owners, pieces

PROGRAM = Path(__file__).parent / "programs" / "ranks.py"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ddp_digits.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
RANKS, SEED = 3, 3
SHARE = 1 / RANKS
# Each compressor with what leaves something to do in tensors of these sizes.
OPTIONS = {
    "2bit": "threshold=0.02",
    "dgc": "ratio=10",
    "gcac": "ratio=10",
    "krngc": "ratio=10",
    "l1": "ratio=10",
    "randk": "ratio=10",
    "threshold": "tau=0.02",
    "topk": "ratio=10",
}
COMPRESSORS = [
    *(f"{name}:{OPTIONS[name]}" if name in OPTIONS else name for name in BUILT_IN if name != "lowrank"),
    "lowrank:rank=1",
    "topk:ratio=10,values=4bit",
    "randk:density=norm",
    "4bit:clip=0.05",
    "window",  # of another distribution, with bases
]

_spec = importlib.util.spec_from_file_location("ranks", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
ranks: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
SPECS = [TensorSpec(name=name, shape=shape) for name, shape in ranks.SHAPES.items()]


def torchrun(program: Path, *arguments: str, ranks: int = RANKS) -> str:
    """Run a program under torchrun and return its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = subprocess.run(
        [*command, str(program), *arguments],
        stdout=subprocess.PIPE,
        check=True,
        timeout=240,
        env=ENVIRONMENT,
        text=True,
    )
    return ended.stdout


@pytest.fixture(scope="module")
def all_of_it(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each scenario of the program, by rank. Nothing in it needs pickle."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(PROGRAM, str(folder), *COMPRESSORS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "window", ranks.WINDOW)


@pytest.fixture(params=["gather", "owners"])
def exchange(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ran(all_of_it: list[dict[str, Any]], exchange: str) -> list[dict[str, Any]]:
    """Return the results of the scenarios that run with each exchange, by rank."""
    return [found[exchange] for found in all_of_it]


@pytest.fixture(params=ranks.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def went(all_of_it: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    """Return the results of the scenarios that run in each way, by rank."""
    return [found[way] for found in all_of_it]


class Tensorwise:
    """A rank, compressing tensor by tensor with what `create` makes."""

    def __init__(self, compressor: str, rank: int) -> None:
        chosen = [LayerRule().choose(spec, parse_compressor(compressor)) for spec in SPECS]
        self._made = [create(each) for each in chosen]
        self.bases = Bases.start(SPECS, chosen, self._made, SEED, range(len(SPECS)))
        self._states = [each.init(spec) for each, spec in zip(self._made, SPECS, strict=True)]
        self._rank = rank

    def step(self, version: int, given: dict[str, Tensor | None]) -> list[Payload | None]:
        sent: list[Payload | None] = []
        for place, (spec, compressor) in enumerate(zip(SPECS, self._made, strict=True)):
            gradient = given[spec.name]
            payload: Payload | None = None
            if gradient is not None:
                context = StepContext(
                    samples=1,
                    version=version,
                    epoch=float("inf"),
                    random=Random((SEED, self._rank, version, place)),
                    shared=Random((SEED, version, place)),
                    bases=self.bases.values.get(place),
                )
                payload, self._states[place] = compressor.compress(
                    gradient.reshape(-1), self._states[place], context
                )
            sent.append(payload)
        return sent


def mean_of(pushes: Sequence[Sequence[Payload | None]], ranks: Sequence[Tensorwise]) -> dict[str, Tensor]:
    """Return the mean of the ranks' payloads; advance their bases."""
    found, means = dict[str, Tensor](), dict[int, Any]()
    for place, (spec, *payloads) in enumerate(zip(SPECS, *pushes, strict=True)):
        out = np.zeros(spec.elements, np.float32)
        there = [payload for payload in payloads if payload is not None]
        projected = [payload for payload in there if isinstance(payload, ProjectedPayload)]
        if projected:
            means[place] = np.zeros(projected[0].count, np.float32)
            sum_coordinates(projected, [SHARE] * len(projected), means[place])
            ranks[0].bases.expand(place, means[place], out)
        else:
            reduce_payloads(there, [SHARE] * len(there), out)
        found[spec.name] = torch.from_numpy(out).view(spec.shape)
    for each in ranks:
        each.bases = each.bases.advance(means)
    return found


class Owners:
    """The owners of all pieces, each with a residual of its own."""

    def __init__(self, compressor: str, exchange: str) -> None:
        self._pieces: list[tuple[int, int, slice, Any, Any]] = []
        for place, spec in enumerate(SPECS if exchange == "owners" else []):
            parameter = Parameter(name=spec.name, number=place, shape=spec.shape)
            made = create(LayerRule().choose(spec, for_owners(parse_compressor(compressor))))
            for owner, start, end in pieces(parameter, RANKS):
                state = made.init(TensorSpec(name=spec.name, shape=(end - start,)))
                self._pieces.append((place, owner, slice(start, end), made, state))

    def step(self, version: int, mean: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean that all ranks get, in the memory of the given one."""
        for index, (place, owner, here, made, state) in enumerate(self._pieces):
            values = mean[SPECS[place].name].view(-1)[here]
            if values.any():
                context = StepContext(
                    samples=1,
                    version=version,
                    epoch=float("inf"),
                    random=Random((SEED, RANKS + owner, version, place)),
                    shared=Random((SEED, version, place)),
                )
                payload, after = made.compress(values.clone(), state, context)
                values.copy_(torch.from_numpy(decode(payload)))
                self._pieces[index] = place, owner, here, made, after
        return mean


def by_step(
    compressor: str,
    exchange: str,
    change: Callable[[int, dict[str, Tensor]], Any] = lambda step, given: given,
    steps: Sequence[int] = range(ranks.STEPS),
) -> list[dict[str, Tensor]]:
    """The mean of decode(compress(gradient + residual)) over ranks, with the residual of each carried on,
    and with owners the means that these send. change: function of the scenario, on a rank's gradients."""
    each, owners = [Tensorwise(compressor, rank) for rank in range(RANKS)], Owners(compressor, exchange)
    found: list[dict[str, Tensor]] = []
    for step in steps:
        given = [{name: ranks.gradient(name, rank, step) for name in ranks.SHAPES} for rank in range(RANKS)]
        sent = [of.step(step, change(step, mine)) for of, mine in zip(each, given, strict=True)]
        found.append(owners.step(step, mean_of(sent, each)))
    return found


@functools.cache
def expected(compressor: str, exchange: str) -> list[dict[str, Tensor]]:
    return by_step(compressor, exchange)


def expected_of_the_whole(compressor: str, exchange: str) -> list[dict[str, Tensor]]:
    """Like `expected`, but for a compressor that sees the whole model."""
    norms = tuple(norm(torch.full((spec.elements,), 0.5)) for spec in SPECS)
    models = [ModelCompressor(SPECS, compressor, LayerRule(), SEED, rank) for rank in range(RANKS)]
    for model in models:
        model.adopt(replace(model.plan, norms=norms))
    owners = Owners(compressor, exchange)
    found: list[dict[str, Tensor]] = []
    for step in range(ranks.STEPS):
        flats: list[Any] = []
        for rank, model in enumerate(models):
            given = [ranks.gradient(name, rank, step) for name in ranks.SHAPES]
            payloads = model.compress(given, 1, version=step, epoch=float("inf"), workers=RANKS)
            flats.append(np.concatenate([decode(payload) for payload in payloads]))
        flat = torch.from_numpy(functools.reduce(np.add, [np.float32(SHARE) * each for each in flats]))
        tensors = torch.split(flat, [spec.elements for spec in SPECS])
        mean = {s.name: piece.view(s.shape) for s, piece in zip(SPECS, tensors, strict=True)}
        found.append(owners.step(step, mean))
    return found


def assert_equal(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """To the bit."""
    assert len(found) == len(expected)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert {*one} == {*other}
        for name in one:
            assert torch.equal(one[name], other[name]), (step, name)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_every_rank_has_the_mean_of_what_was_sent(
    ran: list[dict[str, Any]], exchange: str, compressor: str
) -> None:
    if exchange == "owners" and (reason := parse_compressor(compressor).not_for_means):
        with pytest.raises(SpecError, match=f"expected auto or gather, got owners: {reason}"):
            gradwire.ddp.state(compressor, exchange="owners")
        return
    whole = compressor.startswith("krngc") or "norm" in compressor or "clip" in compressor
    reference = expected_of_the_whole if whole else expected
    for found in ran:
        assert_equal(found[compressor]["gradients"], reference(compressor, exchange))


def test_without_compression_it_is_the_mean_of_the_gradients_in_rank_order(ran: list[dict[str, Any]]) -> None:
    for step, found in enumerate(ran[0]["none"]["gradients"]):
        for name, mean in found.items():
            parts = [ranks.gradient(name, rank, step) * torch.tensor(SHARE) for rank in range(RANKS)]
            assert torch.equal(mean, functools.reduce(torch.add, parts))


@pytest.mark.parametrize("scenario", ["one_bucket", "static", "views"])
def test_buckets_have_no_say_in_the_bits(went: list[dict[str, Any]], way: str, scenario: str) -> None:
    exchange, compressor, *_ = ranks.WAYS[way]
    for found in went:
        assert_equal(found[scenario], expected(compressor, exchange))


def test_small_bundles_have_no_say_in_the_bits(ran: list[dict[str, Any]], exchange: str) -> None:
    for found in ran:
        assert_equal(found["small_bundles"], expected("4bit", exchange))


def test_gradients_of_no_sync_are_added(went: list[dict[str, Any]], way: str) -> None:
    def double(step: int, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: gradient * (2 if step == 1 else 1) for name, gradient in given.items()}

    exchange, compressor, *_ = ranks.WAYS[way]
    means = by_step(compressor, exchange, double)
    for found in went:
        assert_equal(found["accumulated"], means)


def test_names_have_no_say_in_the_bits(all_of_it: list[dict[str, Any]]) -> None:
    for found in all_of_it:
        assert_equal(found["nameless"], expected("4bit", "gather"))


def test_torchs_defaults_do_not_affect_the_bits(all_of_it: list[dict[str, Any]]) -> None:
    for found in all_of_it:
        for under_another in found["defaults"]:
            assert_equal(under_another, expected("dgc:ratio=10", "gather"))


def test_bfloat16_comes_back_as_bfloat16(went: list[dict[str, Any]], way: str) -> None:
    def rounded(step: int, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: gradient.bfloat16().float() for name, gradient in given.items()}

    exchange, compressor, *_ = ranks.WAYS[way]
    means = by_step(compressor, exchange, rounded)
    for found in went:
        assert_equal(found["half"], [{n: value.bfloat16() for n, value in mean.items()} for mean in means])


def test_a_gradient_that_is_not_finite_voids_the_step_on_every_rank(
    went: list[dict[str, Any]], way: str
) -> None:
    exchange, _, compressor, _ = ranks.WAYS[way]
    means = by_step(compressor, exchange, steps=(0, 2))
    for found in went:
        assert (found["not_finite"]["voided"], found["not_finite"]["steps"]) == (1, 3)
        assert all(value.isnan().all() for value in found["not_finite"]["gradients"][1].values())
        assert_equal(found["not_finite"]["gradients"][::2], means)


def test_a_spike_is_over_after_its_step(ran: list[dict[str, Any]]) -> None:
    """`1bit` would send more than ten times the usual norm in the steps that follow, too."""
    assert [found["spike"]["spikes"] for found in ran] == [0, 1, 0]
    for found in ran[1:]:
        assert_equal(ran[0]["spike"]["gradients"], found["spike"]["gradients"])
    before, at, *after = (norm(each["wide"]) for each in ran[0]["spike"]["gradients"])
    expected = norm(ranks.gradient("wide", 1, 12)) * 1e6 / RANKS
    assert at == pytest.approx(expected, rel=1e-3)
    assert max(after) < 10 * before


def test_what_a_step_does_not_use_keeps_its_residual(went: list[dict[str, Any]], way: str) -> None:
    def drop(step: int, given: dict[str, Tensor]) -> dict[str, Tensor | None]:
        return {**given, "wide": None if step == 1 else given["wide"]}

    exchange, _, compressor, _ = ranks.WAYS[way]
    means = by_step(compressor, exchange, drop)
    for found in went:
        for got, mean in zip(found["unused"], means, strict=True):
            assert_equal([got], [{name: mean[name] for name in got}])


def test_a_state_that_is_loaded_goes_on(went: list[dict[str, Any]], way: str) -> None:
    exchange, first, _, second = ranks.WAYS[way]
    for found in went:
        compressors = [first, second, *(["window"] if way == "gather" else [])]
        assert_equal(found["interrupted"], [expected(each, exchange)[2] for each in compressors])


def test_bytes_are_counted_both_ways(ran: list[dict[str, Any]], exchange: str) -> None:
    elements, passes = sum(spec.elements for spec in SPECS), 1 if exchange == "gather" else 2 / RANKS
    for found in ran:
        assert found["none"]["raw"] == found["4bit"]["raw"] == 4 * elements * ranks.STEPS
        assert found["none"]["sent"] > 0.9 * passes * found["none"]["raw"]
        assert found["1bit"]["sent"] < found["4bit"]["sent"] < found["none"]["sent"] / 4


def test_ranks_of_a_machine_share_its_cores(all_of_it: list[dict[str, Any]]) -> None:
    assert {found["threads"] for found in all_of_it} == {max(1, cores() // RANKS)}


def test_frames_outgrow_their_slots(all_of_it: list[dict[str, Any]]) -> None:
    assert all(found["scattered"] for found in all_of_it)


def test_packing_affects_bytes_alone(ran: list[dict[str, Any]], exchange: str) -> None:
    for found in ran:
        on, off = found["packed"]["on"], found["packed"]["off"]
        assert_equal(on["gradients"], off["gradients"])
        assert on["sent"] < 0.9 * off["sent"]


def test_ranks_at_other_steps_are_told(all_of_it: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(all_of_it):
        assert {*found["at_another_step"]} == {*ranks.EXCHANGES}
        for told in found["at_another_step"].values():
            assert told.startswith(f"rank {0 if rank else 1}: expected the same compressor, seed")


def test_a_rank_that_dies_is_named_to_all_others(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROGRAM, tmp_path, "--killed"], check=True, timeout=240, env=ENVIRONMENT)
    told = {(way, rank): (tmp_path / f"{way}.{rank}").read_text() for way in ranks.WAYS for rank in (0, 2)}
    for each in told.values():
        assert each.startswith("gradwire.RankLost: rank 1: no answer: see its log"), told
        # With a cause it would be shown as a traceback.
        assert re.search(r"\) \(ranks.py, line \d+\) after None$", each), told


def test_what_is_saved_is_of_this_rank(ran: list[dict[str, Any]]) -> None:
    one, other, _ = (found["4bit"]["saved"] for found in ran)
    assert one["compressor"] == "4bit"
    assert (one["seed"], one["steps"]) == (SEED, ranks.STEPS)
    assert {*one["residuals"]} == {*ranks.SHAPES}
    assert not torch.equal(one["residuals"]["wide"], other["residuals"]["wide"])
    assert {*one["states"]["wide"]} == {"total", "elements"}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("seed", "RanksDisagree: rank 1: expected the same compressor, seed"),
        ("compressor", "RanksDisagree: rank 1: expected the same compressor, seed"),
        ("exchange", "RanksDisagree: rank 1: expected the same compressor, seed"),
        ("entropy", "RanksDisagree: rank 1: expected the same compressor, seed"),
        ("clip", "RanksDisagree: rank 1: expected the same compressor, seed"),
        (
            "names",
            "ValueError: named_parameters: expected all parameters, a parameter of shape .* is missing",
        ),
        ("float64", r"TypeError: gradient of '\w+': expected a dense one of .* got torch.float64"),
        ("another model", "ValueError: state of gradwire.ddp: expected tensors of this model, .* 'other'"),
    ],
)
def test_errors_say_what_is_wrong(all_of_it: list[dict[str, Any]], what: str, told: str) -> None:
    assert re.match(told, all_of_it[0]["errors"][what])


@pytest.mark.parametrize(
    ("optimizer", "given", "taken"),
    [
        (torch.optim.AdamW, "4bit", "4bit:feedback=off"),
        (torch.optim.RMSprop, "4bit:scale=mean", "4bit:scale=mean,feedback=off"),
        (torch.optim.Adam, "4bit:feedback=on", "4bit:feedback=on"),
        (torch.optim.Adam, "8bit", "8bit"),
        (torch.optim.SGD, "4bit", "4bit"),
    ],
)
def test_4bit_leaves_its_feedback_out_where_the_optimizer_is_like_adam(
    optimizer: Any, given: str, taken: str
) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert gradwire.ddp.state(given, optimizer=optimizer([weight], lr=0.1)).compressor == taken
    assert gradwire.ddp.state(given).compressor == given


def test_what_loses_with_the_optimizer_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    gradwire.ddp.state("topk", optimizer=torch.optim.Adam([weight]))
    gradwire.ddp.state("dgc", optimizer=torch.optim.SGD([weight], momentum=0.9))
    gradwire.ddp.state("topk", optimizer=torch.optim.SGD([weight], momentum=0.9))
    gradwire.ddp.state("topk")
    lost, twice = (record.getMessage() for record in caplog.records)
    assert lost.startswith("topk loses where the optimizer is Adam")
    assert lost.endswith("use 4bit, which loses little, or 8bit")  # no server, no mode
    assert twice.startswith("momentum is applied twice: by dgc and by the optimizer; take plain SGD")


def test_a_bad_compressor_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(SpecError, match="unknown compressor '4bits'"):
        gradwire.ddp.state("4bits")
    with pytest.raises(SpecError, match="unknown compressor 'auto'"):
        gradwire.ddp.state("auto")
    with pytest.raises(SpecError, match=r"delay=1, got 3; to exchange fewer gradients use DDP's no_sync\(\)"):
        gradwire.ddp.state("topk:delay=3")
    with pytest.raises(ValueError, match="exchange: expected auto, gather, owners, got 'owner'"):
        gradwire.ddp.state("4bit", exchange="owner")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="entropy: expected auto, on, off, got 'yes'"):
        gradwire.ddp.state("4bit", entropy="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples: expected at least 1, got 0"):
        gradwire.ddp.state("2bit", samples=0)


def test_a_state_of_another_compressor_is_not_loaded() -> None:
    saved = gradwire.ddp.state("topk").state_dict()
    with pytest.raises(ValueError, match="compressor: expected a state of '4bit', got one of 'topk'"):
        gradwire.ddp.state("4bit").load_state_dict(saved)


def test_the_example_trains() -> None:
    found = torchrun(EXAMPLE, "--epochs", "3", "--compressor", "4bit", ranks=2)
    said = re.search(r"4bit, 2 ranks, seed 1: validation accuracy 0\.(\d+); .* ([\d.]+) times fewer", found)
    assert said is not None
    assert int(said[1]) > 600
    assert float(said[2]) > 7.5
