"""Specs, options and third parties: every refusal names what would have been accepted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, cast, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.common import plugins
from gradwire.common import spec as spec_module
from gradwire.common.parts import LEAST_BYTES
from gradwire.common.spec import Spec, SpecError, parse_options, parse_spec
from gradwire.compressors import (
    CompressorEntry,
    DenseFormat,
    ErrorFeedback,
    LayerRule,
    ModelCompressor,
    Random,
    StepContext,
    TensorSpec,
    create,
    create_bare,
    known_compressor,
    parse_compressor,
)
from gradwire.compressors import registry as registry_module
from gradwire.compressors.dense import Dense
from gradwire.compressors.four_bit import FourBit
from gradwire.compressors.quantizers import FourBitOptions, Levels, Scale
from gradwire.compressors.registry import BUILT_IN, check_entry, compressor_of, names


def test_the_built_in_compressors() -> None:
    dense, quantizers = (
        {"none", "bf16", "fp16"},
        {"1bit", "2bit", "4bit", "8bit", "qsgd", "signsgd", "terngrad"},
    )
    sparsifiers = {"dgc", "gcac", "krngc", "l1", "randk", "threshold", "topk"}
    assert set(BUILT_IN) == dense | quantizers | sparsifiers | {"lowrank"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_feedback_is_on_for_lossy_compressors_unless_told_otherwise(name: str) -> None:
    wrapping = BUILT_IN[name].wrapping
    assert isinstance(create(name), ErrorFeedback) == (wrapping is not None and wrapping.feedback)
    if wrapping is not None:
        assert isinstance(create(f"{name}:feedback=on"), ErrorFeedback)
        assert not isinstance(create(f"{name}:feedback=off"), ErrorFeedback)


def test_options_reach_the_compressor() -> None:
    options = FourBitOptions(levels=Levels.GROUPS, scale=Scale.MEAN)
    expected = ErrorFeedback(compressor=FourBit(options=options))
    assert create("4bit:levels=groups,scale=mean") == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "5bit",
            "unknown compressor '5bit' (did you mean '8bit'?); known compressors: 1bit, 2bit, 4bit, 8bit,",
        ),
        ("4bit:size=3", "known keys: clip, decay, delay, feedback, levels, masking, momentum, scale"),
        ("none:feedback=on", "compressor 'none': unknown key 'feedback'; it has no keys"),
        (
            "bf16:x=1",
            "compressor 'bf16': unknown key 'x'; known keys: clip, decay, delay, feedback, masking, momentum",
        ),
        (
            "4bit:levels=many",
            "compressor '4bit': levels: expected one of group1, groups, running, got 'many'",
        ),
        ("2bit:scale=max", "compressor '2bit': scale: expected one of mean, sum, got 'max'"),
        ("2bit:threshold=big", "compressor '2bit': threshold: expected float, got 'big'"),
        ("2bit:threshold=0", "compressor '2bit': threshold: expected a number from 1e-20 to 1e20, got 0.0"),
        ("2bit:threshold=nan", "threshold: expected a number from 1e-20 to 1e20, got nan"),
        ("2bit:threshold=1e300", "threshold: expected a number from 1e-20 to 1e20, got 1e+300"),
        ("4bit:feedback=yes", "compressor '4bit': feedback: expected on or off, got 'yes'"),
        ("4bit:decay=0", "compressor '4bit': decay: expected above 0 and at most 1, got 0"),
        ("topk:momentum=1", "compressor 'topk': momentum: expected at least 0 and below 1, got 1"),
        ("topk:clip=-1", "compressor 'topk': clip: expected a finite norm of at least 0, got -1"),
        ("topk:delay=0", "compressor 'topk': delay: expected 1 to 1000 versions, got 0"),
        ("topk:feedback=off,delay=2", "delay: needs a residual; use feedback=on"),
        ("l1:momentum=0.9", "momentum: needs a residual; use feedback=on"),
        ("topk:ratio=0.5", "compressor 'topk': ratio: expected a number from 1 to 1e9, got 0.5"),
        ("topk:warmup=-1", "compressor 'topk': warmup: expected 0 to 10000 epochs, got -1"),
        ("topk:values=3bit", "values: expected one of 1bit, 4bit, 8bit, bf16, float32, fp16, got '3bit'"),
        ("krngc:kappa=-1", "compressor 'krngc': kappa: expected 0 to 10, got -1"),
        ("krngc:reading=both", "reading: expected one of distinct, literal, got 'both'"),
        ("qsgd:bits=9", "compressor 'qsgd': bits: expected 2 to 8, got 9"),
        ("qsgd:bucket=33", "bucket: expected a multiple of 32 from 32 to 16777216, got 33"),
        ("terngrad:sigmas=0", "sigmas: expected 0.1 to 1e6 standard deviations, got 0"),
        ("threshold:tau=0", "compressor 'threshold': tau: expected a number from 1e-20 to 1e20, got 0.0"),
        ("4bit:", "compressor '4bit:': expected key=value after the colon, got ''"),
        ("4bit:levels", "compressor '4bit:levels': expected key=value after the colon, got 'levels'"),
        ("4bit:levels=", "compressor '4bit:levels=': expected key=value after the colon, got 'levels='"),
        ("4bit:scale=sum,scale=sum", "key 'scale' is given twice"),
        ("", "expected name[:key=value,...] in lower case, got the name ''"),
        (" 4bit", "expected name[:key=value,...] in lower case, got the name ' 4bit'"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(SpecError) as refusal:
        create(spec)
    assert message in str(refusal.value)


keys = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)
values = st.text(st.characters(exclude_characters=",", exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(keys, st.dictionaries(keys, values, max_size=4))
def test_a_spec_reads_back_as_it_was_written(name: str, options: dict[str, str]) -> None:
    spec = Spec(kind="toy", name=name, options=options)
    assert parse_spec("toy", str(spec)) == spec


@given(st.text(max_size=20))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(SpecError):
        create(text)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class EveryType:
    switch: bool = False
    count: int = 1
    rate: float = 0.5
    text: str = ""
    colour: Colour = Colour.RED


def test_option_types() -> None:
    spec = parse_spec("toy", "toy:switch=on,count=3,rate=1e-3,text=a=b,colour=red")
    expected = EveryType(switch=True, count=3, rate=1e-3, text="a=b", colour=Colour.RED)
    assert parse_options(EveryType, spec) == expected


def test_annotations_are_evaluated_once_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 15,000 tensors took a worker ten seconds of CPU before it could compress anything."""
    evaluated: list[type[Any]] = []

    def counted(options: type[Any]) -> dict[str, Any]:
        evaluated.append(options)
        return get_type_hints(options)

    monkeypatch.setattr(spec_module, "get_type_hints", counted)
    spec_module.option_types.cache_clear()
    specs = [TensorSpec(name=f"{place}", shape=(2, 2)) for place in range(50)]
    ModelCompressor(specs, "4bit", LayerRule(), 1, 0)
    assert sorted(each.__name__ for each in evaluated) == ["FourBitOptions", "Wrapping"]


@dataclass(frozen=True, kw_only=True)
class ToyOptions:
    rate: float = 1.0


def build_toy(options: Any) -> Dense:
    assert isinstance(options, ToyOptions)
    return Dense(format=DenseFormat.FLOAT32)


toy = CompressorEntry(options=ToyOptions, build=build_toy)
broken = "not an entry"

Offer = Callable[..., None]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Pretend that packages with these entry points (name, object) are installed."""

    def pretend(*points: tuple[str, str]) -> None:
        found = [
            EntryPoint(name, f"{__name__}:{attribute}", "gradwire.compressors") for name, attribute in points
        ]

        def entry_points(**wanted: Any) -> EntryPoints:
            return EntryPoints(found).select(**wanted)

        def load(point: EntryPoint) -> object:
            return globals()[point.attr]  # this file is no module that importlib would find by name

        monkeypatch.setattr(plugins, "entry_points", entry_points)
        monkeypatch.setattr(EntryPoint, "load", load)

    return pretend


def test_a_third_party_compressor(offer: Offer) -> None:
    offer(("toy", "toy"))
    assert isinstance(create("toy:rate=0.5"), ErrorFeedback)
    assert names() == sorted([*BUILT_IN, "toy"])
    with pytest.raises(SpecError, match="known keys: clip, decay, delay, feedback, masking, momentum, rate"):
        create("toy:speed=1")


def test_a_compressor_that_lacks_a_method_is_refused() -> None:
    entry = CompressorEntry(options=ToyOptions, build=lambda _options: cast(Dense, object()))
    spec = replace(parse_compressor("none"), entry=entry)
    with pytest.raises(SpecError, match="compressor 'none': object has no method 'init'"):
        spec.build()


def test_a_third_party_cannot_replace_a_built_in_one(offer: Offer) -> None:
    offer(("none", "toy"))
    assert create("none") == Dense(format=DenseFormat.FLOAT32)


def test_a_name_offered_twice_is_refused(offer: Offer) -> None:
    offer(("toy", "toy"), ("toy", "toy"))
    with pytest.raises(SpecError, match="'toy' is offered by several packages"):
        create("toy")


@pytest.mark.parametrize(
    ("attribute", "message"),
    [("broken", "is not a CompressorEntry"), ("missing", "failed to load: KeyError")],
)
def test_a_broken_third_party_is_named(offer: Offer, attribute: str, message: str) -> None:
    offer(("toy", attribute))
    create("none")  # nobody else is bothered by it
    with pytest.raises(SpecError, match=message):
        create("toy")


@dataclass(frozen=True, kw_only=True)
class TakesFeedback:
    feedback: bool = True


@dataclass(frozen=True, kw_only=True)
class TakesList:
    items: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (str, "options must be a dataclass"),
        (TakesFeedback, "the key 'feedback' belongs to every compressor"),
        (TakesList, "items: expected bool, int, float, str or an Enum"),
    ],
)
def test_an_entry_that_could_not_serve_is_refused(options: type[Any], message: str) -> None:
    entry = CompressorEntry(options=options, build=build_toy)
    with pytest.raises(SpecError, match=message):
        check_entry("toy", entry)


@pytest.mark.parametrize("spec", ["none", "4bit", "1bit", "threshold", "topk:ratio=1"])
def test_parts_have_two_mebibytes_at_least(spec: str) -> None:
    assert parse_compressor(spec).least_part_bytes == LEAST_BYTES


@pytest.mark.parametrize("spec", ["topk:ratio=100", "dgc:ratio=50", "randk:ratio=50"])
def test_what_a_sparsifier_sends_of_a_part_is_worth_its_messages(spec: str) -> None:
    elements = parse_compressor(spec).least_part_bytes // 4
    compressor = create_bare(spec)
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(elements, np.float32))
    context = StepContext(samples=1, version=0, epoch=math.inf, random=Random((1,)))
    state = compressor.init(TensorSpec(name="w", shape=(elements,)))
    payload, _ = compressor.compress(values, state, context)
    assert 0.6 < payload.data.size / (256 << 10) < 1.3


def test_a_third_party_is_not_loaded_to_divide_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name comes from a worker."""

    def load(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(registry_module, "find", load)
    assert known_compressor("theirs:level=3") is None


def test_auto_names_the_compressor_that_is_left_where_it_loses() -> None:
    assert compressor_of("auto") == (parse_compressor("4bit"), True)
    given = parse_compressor("topk:ratio=50,values=8bit")
    assert compressor_of("auto:compressor=topk/ratio=50/values=8bit") == (given, True)
    assert compressor_of(given.text) == (given, False)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("auto:compressor=none", "expected a lossy compressor without momentum"),
        ("auto:compressor=dgc", "without momentum"),
        ("auto:compressor=krngc/momentum=0", "budget for the whole model"),
        ("auto:compressor=4bit/delay=2", "got '4bit:delay=2'"),
        ("auto:compressor=5bit", "unknown compressor '5bit'"),
        ("auto:ratio=5", "unknown key 'ratio'"),
        ("5bit", "unknown compressor '5bit'"),
    ],
)
def test_what_auto_cannot_leave_is_refused(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        compressor_of(spec)
