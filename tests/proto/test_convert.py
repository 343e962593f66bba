"""Dataclasses and protobuf messages say the same."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.proto import gradwire_pb2 as pb
from gradwire.proto import messages as m
from gradwire.proto.convert import MalformedError, decode, encode
from gradwire.proto.refusal import Reason, Refusal
from gradwire.proto.service import INVALID, STATUS

EXAMPLES: list[Any] = [
    m.JoinRequest(worker="w", incarnation=2**63, compressors=("none", "4bit")),
    m.PartHeader(
        seq=7,
        assignment=5,
        part=2**16 - 1,
        plan=1,
        payloads=(
            m.PayloadHeader(elements=9, kind=m.DenseHeader(format=m.DenseEncoding.BFLOAT16)),
            m.PayloadHeader(
                elements=2**40,
                kind=m.QuantizedHeader(format=m.CodeEncoding.SIGNED_2BIT, levels=(0.5, 2), sizes=(9, 2**39)),
            ),
            m.PayloadHeader(elements=0, kind=None, content=m.Content.DELTA),
        ),
    ),
    m.Commit(seq=7, assignment=5, base_version=6, samples=32, parts=2, digest=2**32 - 1, loss=0.5),
    m.Abandon(seq=7),
    m.Stored(seq=4, parts=(2,)),
    m.Welcome(rank=1, version=2, last_seq=3, stored=(m.Stored(seq=4, parts=(0, 2)),)),
    m.Update(version=3, part=2, plan=1, whole=True, payloads=()),
    m.Ready(fingerprint=b"\x00\xff", version=None),
    m.Ready(fingerprint=b"", version=0),
    m.Outcome(seq=1, decision=m.Decision.ACCEPTED, version=3),
    m.Outcome(
        seq=1,
        decision=m.Decision.REFUSED,
        refusal=Refusal(reason=Reason.CHECKSUM, message="é", worker="w", remedy="r"),
    ),
    m.Evaluation(version=3, epoch=1, metrics={"accuracy": 0.5, "loss": float("inf")}),
    m.Waiting(ranks=(2, 5), seconds=0.5, text="rank 2"),
    m.InitializeRequest(),
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_round_trip_changes_nothing(value: Any) -> None:
    assert decode(encode(value), value.__class__) == value


@given(st.floats(width=32), st.integers(0, 2**64 - 1))
def test_numbers_survive_to_the_bit(level: float, elements: int) -> None:
    kind = m.QuantizedHeader(format=m.CodeEncoding.SIGNED_4BIT, levels=(level,))
    header = m.PayloadHeader(elements=elements, kind=kind)
    back = decode(encode(header), m.PayloadHeader)
    assert repr(back) == repr(header)


def test_every_message_has_a_dataclass_that_is_read_and_written() -> None:
    """Its zero value goes there and back; a message that must be there is left out of this."""
    envelopes = {
        "WorkerMessage",
        "ServerMessage",
        "InitializeMessage",
        "FetchMessage",
        "StateMessage",
        "OptimizerMessage",
        "Chunk",
    }
    for name in set(pb.DESCRIPTOR.message_types_by_name) - envelopes:
        cls = getattr(m, name)
        assert cls.__dataclass_params__.frozen, name
        try:
            value = decode(b"", cls)
        except MalformedError:
            continue
        assert decode(encode(value), cls) == value
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING:
                assert getattr(value, field.name) == field.default, (name, field.name)


def test_an_enum_number_of_a_newer_version_is_malformed() -> None:
    data = pb.Outcome(seq=1, decision=9).SerializeToString()  # type: ignore[arg-type]
    with pytest.raises(MalformedError, match=r"Outcome\.decision: 9 is not a known Decision"):
        decode(data, m.Outcome)


def test_unknown_fields_are_ignored() -> None:
    newer = encode(m.Heartbeat(activity="x")) + b"\xfa\x3f\x03abc"
    assert decode(newer, m.Heartbeat) == m.Heartbeat(activity="x")


def test_a_missing_message_is_malformed() -> None:
    with pytest.raises(MalformedError, match="JoinResponse without job"):
        decode(b"", m.JoinResponse)


def test_every_refusal_has_a_status_that_is_not_worth_a_retry() -> None:
    assert all(STATUS.get(reason, INVALID).name != "UNAVAILABLE" for reason in Reason)


def test_every_field_of_the_protocol_is_commented() -> None:
    """A comment on the field's line, or on the lines before it within its message."""
    text = (Path(__file__).parents[2] / "proto" / "gradwire.proto").read_text()
    obvious = {
        "job",
        "worker",
        "incarnation",
        "manifest",
        "version",
        "epoch",
        "rank",
        "compressor",
        "message",
    }
    uncommented: list[str] = []
    for message in re.finditer(r"((?://.*\n)*)message (\w+) \{\n(.*?)\n\}", text, re.DOTALL):
        heading, name, body = message.groups()
        for line in body.splitlines():
            field = re.match(r"\s*(?:repeated |optional )?[\w<>, ]+ (\w+) = \d+;(.*)", line)
            if field and "//" not in field.group(2) and not heading and field.group(1) not in obvious:
                uncommented.append(f"{name}.{field.group(1)}")
    assert uncommented == []
