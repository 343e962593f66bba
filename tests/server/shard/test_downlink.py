"""The download: compressed updates that every worker takes in to the same bits, and `auto`'s choice."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import pytest
import torch
from pushes import Share, apply, bits, pushed, replica_bits, snapshot, take
from pushes import receive as receive_parts

from gradwire.common.parts import Plan, divide
from gradwire.common.spec import SpecError
from gradwire.compressors import (
    AbsentPayload,
    CodeFormat,
    DenseFormat,
    DensePayload,
    LayerRule,
    LinearPayload,
    ModelCompressor,
    Payload,
    ProjectedPayload,
    PushTerms,
    QuantizedPayload,
    SparsePayload,
    decode_indices,
    parse_downlink,
)
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.messages import Content
from gradwire.server.job.aggregation import Trimmed
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.pending import StepRules
from gradwire.server.streams.updates import Broadcast
from gradwire.worker.session.replica import Replica

WIDE = (300, 200)
# With what each promises to divide the bytes of the large tensor by.
DOWNLINKS = {
    "4bit": 8,
    "8bit": 4,
    "1bit": 32,
    "1bit:block=4096": 31.7,
    "qsgd": 8,
    "topk:ratio=10": 10,
    "randk:ratio=10": 10,
    "dgc": 100,
}


def wide_replica() -> Replica:
    made = Replica(torch.nn.Linear(*WIDE), 100)
    made.adopt(made.manifest.plan())
    return made


WIDE_MANIFEST = wide_replica().manifest


def wide_store(downlink: str, optimizer: str = "sgd:momentum=0.9", plan: Plan | None = None) -> SteppedStore:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(spec.elements, generator=generator).numpy() for spec in WIDE_MANIFEST.specs]
    options = parse_optimizer(optimizer)
    return SteppedStore(WIDE_MANIFEST, values, downlink, lambda ps: Optimizer(options, ps, 0.1), 5, plan=plan)


def wide_share(step: int, compressor: str = "none", rank: int = 0) -> Share:
    """Return the push of a worker that starts anew with every step."""
    generator = torch.Generator().manual_seed(100 * (rank + 1) + step)
    given = [torch.randn(spec.shape, generator=generator) for spec in WIDE_MANIFEST.specs]
    model = ModelCompressor(WIDE_MANIFEST.specs, compressor, LayerRule(), 1, rank)
    return pushed(32, model.compress(given, 32, version=step))


def receive(broadcast: Broadcast) -> tuple[list[Content], list[Payload]]:
    """Decode an update in one part; return each tensor's payload and how it is applied."""
    ((update, payloads),) = receive_parts(broadcast, WIDE_MANIFEST, wide_replica().plan)
    ends = list(accumulate(payload.elements for payload in payloads))
    places = [bisect_right(ends, end - 1) for end in WIDE_MANIFEST.ends]
    return [update.payloads[place].content for place in places], [payloads[place] for place in places]


def drift(ours: SteppedStore) -> float:
    pairs = zip(ours.parameters, ours.replica, strict=True)
    return math.hypot(*(float((p.detach() - r.detach()).double().square().sum().sqrt()) for p, r in pairs))


@pytest.mark.parametrize("downlink", DOWNLINKS)
def test_compressed_updates_give_every_worker_the_servers_replica(downlink: str) -> None:
    ours, one, other, late = wide_store(downlink), wide_replica(), wide_replica(), wide_replica()
    for worker in (one, other):
        take(worker, snapshot(ours))
    for step in range(20):
        shares = [wide_share(step)] if step % 7 != 4 else [pushed(0, ())]
        update = apply(ours, version=step + 1, shares=shares)
        assert not update.whole
        for worker in (one, other):
            take(worker, update)
            assert bits(worker) == replica_bits(ours)
        if step == 11:
            take(late, snapshot(ours))
        if step > 11:
            take(late, update)
            assert bits(late) == replica_bits(ours)
    assert bits(one) != [each.numpy().tobytes() for each in ours.parameters]


@pytest.mark.parametrize("downlink", DOWNLINKS)
def test_compressed_updates_catch_up_when_nothing_is_added(downlink: str) -> None:
    """The difference is the residual: it is bounded while the model moves, and goes when it stands still."""
    ours = wide_store(downlink)
    start = [value.detach().clone() for value in ours.parameters]
    for step in range(8):
        apply(ours, version=step + 1, shares=[wide_share(step)])
    way = sum(float(((p - s) ** 2).sum()) for p, s in zip(ours.parameters, start, strict=True)) ** 0.5
    first = drift(ours)
    assert 0 < first < way
    for step in range(8, 32):
        apply(ours, version=step + 1, shares=[pushed(0, ())])
    # Of a hundredth in each update, 24 leave about four fifths.
    assert drift(ours) < (0.85 if DOWNLINKS[downlink] == 100 else 0.4) * first


@pytest.mark.parametrize("downlink", DOWNLINKS)
def test_a_compressed_update_takes_the_bytes_that_its_compressor_promises(downlink: str) -> None:
    ours = wide_store(downlink)
    weight, bias = (spec.elements for spec in WIDE_MANIFEST.specs)
    for step in range(5):
        size = sum(map(len, apply(ours, version=step + 1, shares=[wide_share(step)]).messages))
        # Scales and levels are a few in a hundred; the bias travels as bfloat16; and there are the headers.
        assert size <= 4 * weight / DOWNLINKS[downlink] * 1.02 + 2 * bias + 200


def test_an_update_of_nothing_is_tiny_and_changes_nothing() -> None:
    ours, worker = wide_store("none"), wide_replica()
    take(worker, snapshot(ours))
    take(worker, apply(ours, version=1, shares=[wide_share(0)]))
    before = bits(worker)
    for version, shares in ((2, []), (3, [pushed(0, ())])):
        update = apply(ours, version=version, shares=shares)
        assert (update.version, receive(update)[0]) == (version, [Content.DELTA] * 2)
        assert sum(map(len, update.messages)) < 100
        take(worker, update)
        assert worker.version == version
        assert bits(worker) == before == replica_bits(ours)


def test_an_update_of_nothing_leaves_negative_zeros_alone() -> None:
    """Adding zero would make them positive on those workers that got the update, and on nobody else."""
    ours, early, late = wide_store("none"), wide_replica(), wide_replica()
    with torch.no_grad():
        ours.parameters[0][0, :5] = -0.0
    take(early, snapshot(ours))
    take(early, apply(ours, version=1, shares=[pushed(0, ())]))
    take(late, snapshot(ours))
    assert bits(early) == bits(late) == replica_bits(ours)


@pytest.mark.parametrize(
    "downlink", ["none", "bf16", "fp16", *DOWNLINKS, "topk:warmup=4", "randk:values=4bit"]
)
def test_these_compressors_suit_updates(downlink: str) -> None:
    parse_downlink(downlink)


UNSUITED = ["2bit", "gcac", "krngc", "signsgd", "terngrad", "threshold"]


@pytest.mark.parametrize(
    "name", [*UNSUITED, "4bit:levels=groups", "randk:density=norm", "qsgd:norm=l2", "qsgd:bits=2"]
)
def test_what_is_meant_for_gradients_alone_is_refused_for_updates(name: str) -> None:
    with pytest.raises(SpecError) as refusal:
        parse_downlink(name)
    suited = "1bit, 4bit, 8bit, bf16, dgc, fp16, none, qsgd, randk, topk"
    found = str(refusal.value).partition("default options: ")[2].split(", ")
    assert str(refusal.value).startswith(f"compressor {name!r} does not suit updates of parameters")
    assert {*suited.split(", ")} <= {*found}
    assert not {*found} & {*UNSUITED}


@pytest.mark.parametrize(
    ("downlink", "words"),
    [("aut", "expected auto or a compressor; unknown compressor 'aut'"), ("auto:x=1", "auto has no options")],
)
def test_a_mistyped_auto_is_told_of_auto(downlink: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_downlink(downlink)


@pytest.mark.parametrize("option", ["momentum=0.9", "feedback=off", "delay=2", "clip=1", "decay=0.5"])
def test_what_goes_around_a_compressor_is_refused_for_updates(option: str) -> None:
    key = option.partition("=")[0]
    message = f"compressor 'topk': {key} is for gradients; leave it out for updates"
    with pytest.raises(SpecError, match=message):
        parse_downlink(f"topk:{option}")


# auto


def kind(payload: Payload) -> object:
    match payload:
        case DensePayload() | QuantizedPayload():
            return payload.format
        case LinearPayload():
            return payload.bits
        case SparsePayload() | ProjectedPayload():
            return kind(payload.values)
        case AbsentPayload():
            return None


FOUR, ONE, BF16 = CodeFormat.SIGNED_4BIT, CodeFormat.BINARY, DenseFormat.BFLOAT16


@pytest.mark.parametrize(
    ("compressor", "content", "large", "small"),
    [
        ("none", Content.VALUES, DenseFormat.FLOAT32, DenseFormat.FLOAT32),
        ("bf16", Content.DELTA, BF16, BF16),
        ("fp16", Content.DELTA, DenseFormat.FLOAT16, DenseFormat.FLOAT16),
        ("8bit", Content.DELTA, 8, BF16),
        ("qsgd:bits=5", Content.DELTA, 8, BF16),
        ("qsgd", Content.DELTA, FOUR, BF16),
        ("4bit", Content.DELTA, FOUR, BF16),
        ("2bit", Content.DELTA, FOUR, BF16),
        ("terngrad", Content.DELTA, FOUR, BF16),
        ("1bit", Content.DELTA, ONE, BF16),
        ("signsgd", Content.DELTA, ONE, BF16),
        ("1bit:block=4096", Content.DELTA, 1, BF16),
        ("1bit:block=64", Content.DELTA, 1, BF16),
        ("topk:ratio=100", Content.DELTA, BF16, BF16),
        ("topk:ratio=100,values=4bit", Content.DELTA, BF16, BF16),
        ("topk:ratio=100,values=fp16", Content.DELTA, DenseFormat.FLOAT16, BF16),
        ("topk:ratio=100,values=float32", Content.VALUES, DenseFormat.FLOAT32, BF16),
        ("randk:ratio=50", Content.DELTA, BF16, BF16),
    ],
)
def test_an_update_goes_down_in_the_kind_in_which_it_came_up(
    compressor: str, content: Content, large: object, small: object
) -> None:
    ours, early, late = wide_store("auto", "sgd"), wide_replica(), wide_replica()
    take(early, snapshot(ours))
    contents: list[Content] = []
    for step in range(6):
        shares = [wide_share(step, compressor, rank) for rank in range(3)]
        broadcast = apply(ours, version=step + 1, shares=shares)
        contents, payloads = receive(broadcast)
        small_content = Content.VALUES if small is DenseFormat.FLOAT32 else Content.DELTA
        assert contents == [content, small_content]
        assert [kind(payload) for payload in payloads] == [large, small]
        take(early, broadcast)
        assert bits(early) == replica_bits(ours)
        if step == 2:
            take(late, snapshot(ours))
        elif step > 2:
            take(late, broadcast)
            assert bits(late) == bits(early)
        if isinstance(payloads[0], SparsePayload):
            held = [push[0][0] for _, push in shares]
            union: set[int] = set()
            for each in held:
                assert isinstance(each, SparsePayload)
                union |= set(decode_indices(each).tolist())
            assert set(decode_indices(payloads[0]).tolist()) == union
    pairs = zip(bits(early), ours.parameters, strict=True)
    exact = [mine == value.numpy().tobytes() for mine, value in pairs]
    assert exact == [each is Content.VALUES for each in contents]
    shared = ours.replica[0].data_ptr() == ours.parameters[0].data_ptr()
    assert shared == all(exact), "no second copy of the model where none is needed"


@pytest.mark.parametrize("optimizer", ["sgd:momentum=0.9", "sgd:weight_decay=0.1", "adam"])
def test_a_step_that_changes_every_element_goes_down_as_4bit(optimizer: str) -> None:
    ours = wide_store("auto", optimizer)
    contents, payloads = receive(apply(ours, version=1, shares=[wide_share(0, "topk:ratio=100")]))
    assert (contents[0], kind(payloads[0])) == (Content.DELTA, FOUR)


def test_elements_go_down_by_themselves_only_if_they_take_fewer_bytes_than_4bit() -> None:
    def size(compressor: str, workers: int) -> tuple[object, int]:
        shares = [wide_share(0, compressor, rank) for rank in range(workers)]
        broadcast = apply(wide_store("auto", "sgd"), version=1, shares=shares)
        return kind(receive(broadcast)[1][0]), broadcast.wire_bytes

    (few, small), (many, large) = size("topk:ratio=12", 2), size("topk:ratio=4", 2)
    assert (few, many) == (BF16, FOUR)
    assert small < large


def test_what_most_pushes_came_as_decides_and_replicas_stay_alike_when_it_changes() -> None:
    """A worker that leaves pushes float32; and a job may have workers with different compressors."""
    ours, worker = wide_store("auto", "sgd"), wide_replica()
    take(worker, snapshot(ours))
    rounds = [
        (("none", "none"), Content.VALUES),
        (("4bit", "4bit", "none"), Content.DELTA),
        (("topk:values=float32", "topk"), Content.VALUES),  # or what 4bit left out would wait
        (("topk:values=float32", "topk"), Content.VALUES),
        (("none", "4bit"), Content.DELTA),
        (("none", "none", "4bit"), Content.VALUES),
        (("topk", "topk", "none"), Content.DELTA),
        (("topk:ratio=8",), Content.DELTA),  # not so much smaller than 4bit that going back would pay
        (("topk", "topk"), Content.VALUES),
        (("topk", "topk"), Content.DELTA),
        ((), Content.DELTA),
    ]
    for step, (compressors, content) in enumerate(rounds):
        shares = [wide_share(step, compressor, rank) for rank, compressor in enumerate(compressors)]
        update = apply(ours, version=step + 1, shares=shares)
        contents, _ = receive(update)
        assert contents[0] is content, step
        take(worker, update)
        assert bits(worker) == replica_bits(ours), step


@pytest.mark.parametrize("slices", [2, 3])
def test_slices_of_parts_go_down_where_they_belong(slices: int) -> None:
    """Members of a group push different parts of one tensor, each the elements that it has chosen."""
    plan = divide([spec.elements for spec in WIDE_MANIFEST.specs], slices=slices)
    assert any(len(unit.parts) >= slices for unit in plan.units)
    ours, before = (wide_store("auto", "sgd", plan) for _ in range(2))
    worker = wide_replica()
    worker.adopt(plan)
    take(worker, snapshot(ours))
    shares: list[Share] = []
    expected = set[int]()
    for number in range(slices):
        model = ModelCompressor(WIDE_MANIFEST.specs, "topk:values=float32", LayerRule(), 1, number, plan=plan)
        model.set_slices(slices)
        wanted = plan.slice(number, slices)
        step = model.begin(PushTerms(samples=32, version=0, wanted=wanted))
        generator = torch.Generator().manual_seed(number)
        for place, spec in enumerate(WIDE_MANIFEST.specs):
            step.add(place, torch.randn(spec.shape, generator=generator))
        step.finish()
        assert step.sent.keys() == wanted
        for part, payloads in step.sent.items():
            at = plan.parts[part].start
            for payload in payloads:
                if isinstance(payload, SparsePayload):
                    expected |= {at + index for index in decode_indices(payload).tolist()}
                at += payload.elements
        shares.append(pushed(32, step.sent, slice=number))
    update = apply(ours, version=1, shares=shares)
    take(worker, update)
    assert bits(worker) == replica_bits(ours)
    held = set[int]()
    for header, payloads in receive_parts(update, WIDE_MANIFEST, plan):
        at = plan.parts[header.part].start
        for described, payload in zip(header.payloads, payloads, strict=True):
            if isinstance(payload, SparsePayload):
                assert described.content is Content.VALUES
                held |= {at + index for index in decode_indices(payload).tolist()}
            at += payload.elements
    assert held == expected
    moved = np.flatnonzero(ours.parameters[0].numpy() != before.parameters[0].numpy())
    assert set(moved.tolist()) == expected


def test_an_update_of_elements_is_for_the_version_before_it() -> None:
    ours, worker, late = wide_store("auto", "sgd"), wide_replica(), wide_replica()
    take(worker, snapshot(ours))
    take(late, snapshot(ours))
    compressor = "topk:values=float32"
    first, second = (apply(ours, version=step + 1, shares=[wide_share(step, compressor)]) for step in (0, 1))
    take(late, second)
    assert late.version == 0
    for update in (first, first, second):
        take(worker, update)
    assert bits(worker) == replica_bits(ours)


def test_indices_count_among_the_bytes_of_elements() -> None:
    """12,500 bfloat16 of 60,000 elements are smaller than 4 bits of all; with their indices they are not."""
    shares = [wide_share(0, "topk:ratio=4.8")]
    _, payloads = receive(apply(wide_store("auto", "sgd"), version=1, shares=shares))
    assert kind(payloads[0]) is FOUR


def test_a_push_without_weight_has_no_say_in_how_the_update_goes_down() -> None:
    given = [wide_share(0, spec, rank)[1] for rank, spec in enumerate(("none", "none", "4bit"))]
    shares = [pushed(32, each, weight=weight) for each, weight in zip(given, (0.0, 0.0, 1.0), strict=True)]
    contents, payloads = receive(apply(wide_store("auto", "sgd"), version=1, shares=shares))
    assert (contents[0], kind(payloads[0])) == (Content.DELTA, FOUR)


def test_too_few_gradients_change_nothing_with_auto_either() -> None:
    values = [np.ones(spec.elements, np.float32) for spec in WIDE_MANIFEST.specs]
    options = parse_optimizer("sgd")
    ours = SteppedStore(
        WIDE_MANIFEST,
        values,
        "auto",
        lambda ps: Optimizer(options, ps, 0.1),
        5,
        StepRules(aggregation=Trimmed(wrong=1)),
    )
    apply(ours, version=1, shares=[wide_share(0, "4bit", rank) for rank in range(3)])
    before = replica_bits(ours)
    broadcast = apply(ours, version=2, shares=[wide_share(1, "4bit")])
    assert broadcast.passed_over == 1
    assert broadcast.wire_bytes < 100
    assert replica_bits(ours) == before


@pytest.mark.parametrize("compressor", ["4bit", "topk:ratio=100"])
def test_a_difference_beyond_the_range_of_floats_goes_down_in_two_updates(compressor: str) -> None:
    ours, worker = wide_store("auto", "sgd"), wide_replica()
    apply(ours, version=1, shares=[wide_share(0, compressor)])
    for parameter, replica in zip(ours.parameters, ours.replica, strict=True):
        parameter.fill_(3e38)
        replica.fill_(-3e38)
    take(worker, snapshot(ours))
    for version in (2, 3):
        take(worker, apply(ours, version=version, shares=[wide_share(version, compressor)]))
        assert bits(worker) == replica_bits(ours)
    assert all(bool(torch.isfinite(replica).all()) for replica in ours.replica)
