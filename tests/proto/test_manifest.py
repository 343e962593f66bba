"""Manifests that come over the wire are checked before anything is allocated for them."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest, first_difference
from gradwire.proto.messages import Tensor
from gradwire.proto.refusal import Reason, Refused

GOOD = Manifest(
    (Tensor(name="a", shape=(2, 3), dtype="float32"), Tensor(name="b", shape=(), dtype="float32")), 10
)


def check(message: object) -> Manifest:
    return Manifest.from_message(message, worker="w", max_bytes=1000)  # type: ignore[arg-type]


def test_a_good_one_comes_back() -> None:
    assert check(GOOD.to_message()) == GOOD
    assert GOOD.elements == 7
    assert GOOD.raw_bytes == 28


@pytest.mark.parametrize(
    ("tensors", "reason", "words"),
    [
        ((), Reason.TENSOR, "at least one"),
        *(
            (
                (Tensor(name=name, shape=(1,), dtype="float32"),),
                Reason.NAME,
                "tensor name: expected 1 to 1024",
            )
            for name in ("a\nb", " a", "a\x1b[2J", "\u202ea", "x" * 1025, "__metadata__")
        ),
        ((Tensor(name="", shape=(1,), dtype="float32"),), Reason.TENSOR, "a name of its own"),
        (
            (Tensor(name="a", shape=(1,), dtype="float32"), Tensor(name="a", shape=(1,), dtype="float32")),
            Reason.TENSOR,
            "repeated",
        ),
        ((Tensor(name="a", shape=(1,), dtype="float64"),), Reason.DTYPE, "expected float32, got float64"),
        ((Tensor(name="a", shape=(1,), dtype=""),), Reason.DTYPE, "no dtype"),
        ((Tensor(name="a", shape=(2**40, 2**40), dtype="float32"),), Reason.SIZE, "1000 bytes"),
        ((Tensor(name="a", shape=(2**41,), dtype="float32"),), Reason.SHAPE, "a"),
        ((Tensor(name="a", shape=(1,) * 17, dtype="float32"),), Reason.SHAPE, "16 dimensions"),
        ((Tensor(name="a", shape=(251,), dtype="float32"),), Reason.SIZE, "got 1004 bytes"),
        (
            (Tensor(name="a", shape=(1,), dtype="float32", group=1),),
            Reason.GROUP,
            "tensor 'a': expected a parameter group below 1, the number of groups, got 1",
        ),
    ],
)
def test_a_bad_one_is_refused(tensors: tuple[Tensor, ...], reason: Reason, words: str) -> None:
    with pytest.raises(Refused) as caught:
        check(Manifest(tensors, 10).to_message())
    assert caught.value.refusal.reason is reason
    assert words in caught.value.refusal.message


def test_a_fingerprint_that_is_not_its_own_is_refused() -> None:
    with pytest.raises(Refused, match="fingerprint"):
        check(dataclasses.replace(GOOD.to_message(), fingerprint=b"other"))


def test_no_training_samples_are_refused() -> None:
    with pytest.raises(Refused, match="train_samples: expected at least 1, got 0"):
        check(Manifest(GOOD.tensors, 0).to_message())


def test_the_fingerprint_tells_models_apart() -> None:
    others = [
        Manifest(GOOD.tensors[::-1], 10),
        Manifest((Tensor(name="a", shape=(3, 2), dtype="float32"), GOOD.tensors[1]), 10),
        Manifest((Tensor(name="c", shape=(2, 3), dtype="float32"), GOOD.tensors[1]), 10),
        Manifest((dataclasses.replace(GOOD.tensors[0], group=1), GOOD.tensors[1]), 10),
        Manifest(GOOD.tensors, 10, (m.Group(optimizer="sgd"),)),
        Manifest(GOOD.tensors, 10, (m.Group(optimizer="sgd:momentum=0.9"),)),
        Manifest(GOOD.tensors, 10, (m.Group(optimizer="sgd", learning_rate=0.1),)),
        Manifest(GOOD.tensors, 10, clip_norm=1.0),
        Manifest(GOOD.tensors, 10, epochs=3),
        *(Manifest(GOOD.tensors, 10, entries=(dataclasses.replace(BASE, digest=each),)) for each in DIGESTS),
    ]
    assert len({manifest.fingerprint for manifest in (GOOD, *others)}) == 13
    # The number of samples is compared apart, so that a refusal names it.
    assert Manifest(GOOD.tensors, 11).fingerprint == GOOD.fingerprint


def test_no_name_in_an_entry_is_taken_for_another_entry() -> None:
    def tied(name: str, to: str) -> m.Entry:
        return m.Entry(name=name, kind=m.EntryKind.TIED, tied_to=to)

    two = Manifest(GOOD.tensors, 10, entries=(tied("c", "a"), tied("d", "b")))
    one = Manifest(GOOD.tensors, 10, entries=(tied("c", "'a';entry:'d':tied::'b'"),))
    raw = Manifest(GOOD.tensors, 10, entries=(tied("c", "a;entry:'d':tied::b"),))
    assert len({each.fingerprint for each in (two, one, raw)}) == 3


@pytest.mark.parametrize(
    ("group", "reason", "words"),
    [
        (m.Group(optimizer="lion"), Reason.GROUP, "parameter group 1: expected a known optimizer"),
        (m.Group(optimizer="sgd:momentum=1.5"), Reason.GROUP, "momentum: expected at least 0 and below 1"),
        (m.Group(optimizer="sgd", learning_rate=float("nan")), Reason.GROUP, "learning rate: expected"),
        (m.Group(optimizer="sgd", learning_rate=-0.1), Reason.GROUP, "got -0.1"),
        (m.Group(optimizer="s" * 257), Reason.SIZE, "at most 256 characters, got 257"),
    ],
)
def test_a_bad_group_is_refused(group: m.Group, reason: Reason, words: str) -> None:
    with pytest.raises(Refused) as caught:
        check(Manifest(GOOD.tensors, 10, (m.Group(optimizer="sgd"), group)).to_message())
    assert caught.value.refusal.reason is reason
    assert words in caught.value.refusal.message


def test_a_part_may_mix_parameter_groups() -> None:
    groups = (0, 0, 1, 0)
    tensors = tuple(
        Tensor(name=str(place), shape=(3,), dtype="float32", group=group)
        for place, group in enumerate(groups)
    )
    manifest = Manifest(tensors, 10, (m.Group(optimizer="sgd"), m.Group(optimizer="sgd:momentum=0.9")))
    assert check(manifest.to_message()) == manifest
    assert [(part.start, part.end) for part in manifest.plan().parts] == [(0, 12)]


def described(*tensors: Tensor, entries: tuple[m.Entry, ...] = (), groups: tuple[str, ...] = ()) -> Any:
    sent = tuple(m.Group(optimizer=each) for each in groups)
    return m.ModelManifest(tensors=tensors, train_samples=1, fingerprint=b"", entries=entries, groups=sent)


WEIGHT = Tensor(name="w", shape=(8, 6), dtype="float32")
BIAS = Tensor(name="b", shape=(8,), dtype="float32")
MEAN = m.Entry(name="mean", kind=m.EntryKind.BUFFER, shape=(3,), dtype="float32")
BASE = m.Entry(name="base", kind=m.EntryKind.FROZEN, shape=(3,), dtype="float32", digest=b"a" * 32)
DIGESTS = (b"", b"a" * 32, b"b" * 32)
W, B = "parameter 'w' of float32 [8, 6]", "parameter 'b' of float32 [8]"


@pytest.mark.parametrize(
    ("other", "ours", "theirs"),
    [
        (described(replace(WEIGHT, shape=(8, 7)), BIAS), W, "parameter 'w' of float32 [8, 7]"),
        (described(WEIGHT), B, "no parameter after the first 1"),
        (described(WEIGHT, BIAS, BIAS), "no parameter after the first 2", B),
        (described(BIAS, WEIGHT), W, B),
        (described(WEIGHT, replace(BIAS, group=1)), B, B + " in group 1"),
        (described(WEIGHT, BIAS, entries=(MEAN,)), "no entry of the state_dict", "'mean' of float32 [3]"),
        (described(WEIGHT, BIAS, groups=("sgd",)), "no parameter group", "parameter group 0 with sgd"),
        (described(WEIGHT, BIAS), "", ""),
        (replace(described(WEIGHT, BIAS), clip_norm=2.0), "clip_norm=0", "clip_norm=2"),
        (replace(described(WEIGHT, BIAS), epochs=3), "epochs=0", "epochs=3"),
        (
            described(WEIGHT, BIAS, entries=(BASE,)),
            "no entry",
            "[3] with SHA-256 6161616161616161",
        ),
        (described(replace(WEIGHT, name="w\n" * 1000), BIAS), W, r"parameter 'w\nw\n"),
    ],
)
def test_the_first_difference_of_two_models_is_described(other: Any, ours: str, theirs: str) -> None:
    found = first_difference(described(WEIGHT, BIAS), other)
    assert ours in found[0]
    assert theirs in found[1]
    assert bool(found[0]) == bool(ours)
    assert all(len(each) < 1000 and "\n" not in each for each in found)
