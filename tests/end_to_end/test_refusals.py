"""Bad messages over a real socket: a typed refusal, a readable message, and no change of state."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from daemons import MANIFEST, Daemons, Raw, gradient, refusal_without_effect, refusing, state_of, status, talk

from gradwire.compressors import DensePayload, QuantizedPayload
from gradwire.proto import gradwire_pb2 as pb
from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal, Refused
from gradwire.proto.transfer import payload_header
from gradwire.proto.wire import crc32c, encode_chunk, encode_worker


async def in_training(address: str) -> AsyncIterator[Raw]:
    async with talk(address) as make:
        raw = make()
        await raw.train()
        await raw.receive(m.Assignment)
        yield raw


async def outcome_of(raw: Raw, seq: int) -> m.Outcome:
    """The next one; what is told again of earlier pushes is passed over."""
    while True:
        outcome: m.Outcome = await raw.receive(m.Outcome)
        if outcome.seq >= seq:
            return outcome


async def pushed(raw: Raw, payloads: Any, **changes: Any) -> m.Outcome:
    """Push, and return the outcome."""
    for message in await raw.push(payloads, **changes):
        await raw.send(message)
    return await outcome_of(raw, changes.get("seq", 1))


async def refused_push(raw: Raw, seq: int, alter: Any) -> Refusal:
    """Return the server's refusal of a push that `alter(payloads, fields)` has spoilt, also when its commit
    is told again. Nothing may change."""
    before = await status(raw)
    payloads, fields = gradient(), {"seq": seq}
    alter(payloads, fields)
    *chunks, commit = await raw.push(payloads, **fields)
    for message in (*chunks, commit, commit):
        await raw.send(message)
    outcome = await outcome_of(raw, seq)
    assert await outcome_of(raw, seq) == outcome
    after = await status(raw)
    assert state_of(after) == state_of(before)
    assert after.refused_pushes == before.refused_pushes + 1
    assert (outcome.seq, outcome.decision) == (seq, m.Decision.REFUSED)
    assert outcome.refusal is not None
    assert outcome.refusal.worker == "raw"
    assert "'raw'" in outcome.refusal.message
    refusal: Refusal = outcome.refusal
    return refusal


def code_8(payloads: list[Any], fields: dict[str, Any]) -> None:
    payloads[0].data[3] = 0x80


def nan_level(payloads: list[Any], fields: dict[str, Any]) -> None:
    levels = payloads[0].levels.copy()
    levels[6] = np.nan
    payloads[0] = dataclasses.replace(payloads[0], levels=levels)


def infinite_value(payloads: list[Any], fields: dict[str, Any]) -> None:
    payloads[1].data[:2] = (0x80, 0x7F)  # bfloat16 infinity


def wrong_shape(payloads: list[Any], fields: dict[str, Any]) -> None:
    assert isinstance(payloads[0], QuantizedPayload)
    payloads[0] = dataclasses.replace(payloads[0], elements=40, data=payloads[0].data[:20].copy())


def wrong_dtype(payloads: list[Any], fields: dict[str, Any]) -> None:
    headers = [payload_header(payload) for payload in payloads]
    headers[1] = dataclasses.replace(headers[1], kind=m.DenseHeader(format=m.DenseEncoding.UNSPECIFIED))
    fields["payloads"] = tuple(headers)


def missing_tensor(payloads: list[Any], fields: dict[str, Any]) -> None:
    del payloads[1]


def huge_tensor(payloads: list[Any], fields: dict[str, Any]) -> None:
    headers = [payload_header(payload) for payload in payloads]
    headers[0] = dataclasses.replace(headers[0], elements=2**40)
    fields["payloads"] = tuple(headers)


def empty_payload(payloads: list[Any], fields: dict[str, Any]) -> None:
    payloads.append(dataclasses.replace(payloads[1], elements=0, data=payloads[1].data[:0]))


def another_part(payloads: list[Any], fields: dict[str, Any]) -> None:
    fields["part"] = 1


def rates_of_more_groups(payloads: list[Any], fields: dict[str, Any]) -> None:
    fields["learning_rates"] = (0.1, 0.1)


def infinite_rate(payloads: list[Any], fields: dict[str, Any]) -> None:
    fields["learning_rates"] = (float("inf"),)


def another_plan(payloads: list[Any], fields: dict[str, Any]) -> None:
    fields["plan"] = 2


def infinite_loss(payloads: list[Any], fields: dict[str, Any]) -> None:
    fields["loss"] = float("inf")


def samples_without_parts(payloads: list[Any], fields: dict[str, Any]) -> None:
    payloads.clear()


def parts_without_samples(payloads: list[Any], fields: dict[str, Any]) -> None:
    fields["samples"] = 0


BAD_PUSHES: list[tuple[Any, Reason, str]] = [
    (code_8, Reason.PAYLOAD, "code 8"),
    (nan_level, Reason.NON_FINITE, "nan"),
    (infinite_value, Reason.NON_FINITE, "an infinity or a NaN"),
    (wrong_shape, Reason.ELEMENTS, "'weight': expected payloads of 56 elements, none empty, got 48"),
    (wrong_dtype, Reason.PAYLOAD, "'bias' kind"),
    (missing_tensor, Reason.ELEMENTS, "got 48 elements"),
    (huge_tensor, Reason.ELEMENTS, "got 1099511627784 elements"),
    (empty_payload, Reason.ELEMENTS, "none empty"),
    (another_part, Reason.PLAN, "part 1: expected a part below 1"),
    (another_plan, Reason.PLAN, "expected plan 1, got 2"),
    (
        rates_of_more_groups,
        Reason.GROUP,
        "expected 1, one for each parameter group, or 1 for all groups, or none, got 2",
    ),
    (infinite_rate, Reason.GROUP, "learning_rates: expected finite numbers of at least 0"),
    (infinite_loss, Reason.NON_FINITE, "loss"),
    (samples_without_parts, Reason.TENSOR, "expected at least 1, because the push has samples, got 0"),
    (parts_without_samples, Reason.TENSOR, "expected 0, because the push has no samples"),
]


async def test_bad_pushes_are_refused_and_a_good_one_after_them_is_accepted(
    address: str, subtests: pytest.Subtests
) -> None:
    async for raw in in_training(address):
        for seq, (alter, reason, words) in enumerate(BAD_PUSHES, 1):
            with subtests.test(alter.__name__):
                refusal = await refused_push(raw, seq, alter)
                assert refusal.reason is reason
                assert words in refusal.message
        assert (await pushed(raw, gradient(), seq=99)).decision is m.Decision.ACCEPTED


async def test_members_of_a_round_that_disagree_on_a_learning_rate_are_told_apart(daemons: Daemons) -> None:
    server = daemons.server("--min-workers", "2", "--script")

    async with talk(server.address) as make:
        first, second = make("first"), make("second")
        given: list[m.Assignment] = []
        for raw in (first, second):
            await raw.train()
        for raw in (first, second):
            given.append(await raw.receive(m.Assignment))
        assert (
            await pushed(first, gradient(), assignment=given[0].id, learning_rates=(0.1,))
        ).decision is m.Decision.ACCEPTED
        before = state_of(await status(first))
        other = await pushed(second, gradient(), assignment=given[1].id, learning_rates=(0.2,))
        refusal = other.refusal
        assert refusal is not None
        assert (refusal.reason, refusal.worker) == (Reason.GROUP, "second")
        assert "group 0: expected 0.1, as worker 'first' has it in this round, got 0.2" in refusal.message
        assert state_of(await status(first)) == before
        again = await pushed(second, gradient(), seq=2, assignment=given[1].id, learning_rates=(0.1,))
        assert again.decision is m.Decision.ACCEPTED


async def test_a_push_that_is_not_what_was_committed_comes_again_whole(address: str) -> None:
    async for raw in in_training(address):
        before = state_of(await status(raw))
        outcome = await pushed(raw, gradient(), digest=7)
        assert outcome.refusal is not None
        assert outcome.refusal.reason is Reason.CHECKSUM
        assert outcome.part is None
        assert state_of(await status(raw)) == before
        assert (await pushed(raw, gradient())).decision is m.Decision.ACCEPTED


async def test_chunks_that_belong_nowhere_end_the_stream(address: str) -> None:
    async for raw in in_training(address):
        await raw.send(encode_chunk(9, 0, [np.zeros(4, np.uint8)], 0))
        with pytest.raises(Refused, match="expected the header of a part first, got transfer 9"):
            await raw.receive(m.Outcome)


async def test_bytes_that_are_no_message_end_the_stream(address: str) -> None:
    async for raw in in_training(address):
        async with refusal_without_effect(raw, Reason.MALFORMED):
            await raw.send(_with_trailer(b"\xff\xff\xff\xff"))
            await raw.receive(m.Outcome)


def _with_trailer(data: bytes) -> bytes:
    return data + b"\x7d" + crc32c((np.frombuffer(data, np.uint8),)).to_bytes(4, "little")


async def test_a_header_with_one_byte_changed_ends_the_stream(address: str) -> None:
    async for raw in in_training(address):
        empty = m.Commit(seq=1, assignment=1, base_version=0, samples=0, parts=0, digest=0, loss=0.5)
        push = bytearray(encode_worker(empty))
        push[3] ^= 1
        async with refusal_without_effect(raw, Reason.CHECKSUM):
            await raw.send(bytes(push))
            await raw.receive(m.Outcome)


BAD_EVALUATIONS: list[tuple[dict[str, float], Reason, str]] = [
    (
        {"loss": float("nan")},
        Reason.NON_FINITE,
        "evaluation metric 'loss': expected a finite number, got nan",
    ),
    *(
        ({name: 1.0}, Reason.NAME, r"evaluation metric: expected 1 to 128 printable characters")
        for name in ("", " loss", "loss\n", "\x1b]0;title\x07", "\u202eloss", "l" * 129)
    ),
    ({str(number): 1.0 for number in range(33)}, Reason.SIZE, "expected up to 32 metrics, got 33"),
]


async def test_an_evaluation_is_finite_and_of_what_was_asked(address: str, subtests: pytest.Subtests) -> None:
    async for raw in in_training(address):
        for metrics, reason, words in BAD_EVALUATIONS:
            with subtests.test(words, metrics=[*metrics]):
                await raw.attach()
                async with refusal_without_effect(raw, reason, words):
                    await raw.send(
                        m.Evaluation(version=77, epoch=30, metrics={"a name: of [any] kind/é %": 1.0})
                    )
                    await raw.send(m.Evaluation(version=0, epoch=1, metrics=metrics))
                    await raw.receive(m.Outcome)


BAD_PROFILES: list[tuple[dict[str, Any], str]] = [
    ({"forward_seconds": (1.0,)}, r"profile tensors: expected \d+ of each kind"),
    ({"steps": 0}, "profile steps: expected at least 1"),
    ({"step_seconds": float("nan")}, "profile seconds: expected 0 or more"),
    ({"backward_seconds": -1.0}, "profile seconds: expected 0 or more"),
    ({"densities": 1.5}, "profile densities: expected above 0, up to 1"),
    ({"processor_share": float("nan")}, "profile processor_share: expected 0 to 1"),
    ({"processor_share": 1.5}, "profile processor_share: expected 0 to 1"),
    ({"machine": "m" * 10_000}, r"profile machine: expected up to \d+ printable"),
    ({"machine": "m\n"}, r"profile machine: expected up to \d+ printable"),
]


async def test_a_profile_is_of_the_jobs_tensors(address: str, subtests: pytest.Subtests) -> None:
    by_tensor = dict.fromkeys(("forward_seconds", "backward_seconds", "densities"), 1.0)
    good = {"steps": 5, "sent_bytes": 4, "compressing_seconds": 0.0, "step_seconds": 1.0, **by_tensor}
    async for raw in in_training(address):
        for changes, words in BAD_PROFILES:
            with subtests.test(words, changes=changes):
                fields: dict[str, Any] = {**good, **changes}
                for name in by_tensor:
                    if not isinstance(fields[name], tuple):
                        fields[name] = (fields[name],) * len(MANIFEST.tensors)
                await raw.attach()
                async with refusal_without_effect(raw, match=words):
                    await raw.send(m.Profile(**fields))
                    await raw.receive(m.Outcome)


async def test_a_header_of_countless_payloads_is_refused_before_it_becomes_objects(address: str) -> None:
    async for raw in in_training(address):
        bomb = pb.WorkerMessage(part=pb.PartHeader(seq=1, payloads=[pb.PayloadHeader()] * 200_000))
        await raw.send(_with_trailer(bomb.SerializeToString()))
        with pytest.raises(Refused, match=r"PartHeader.payloads: expected at most 65536 entries, got 200000"):
            await raw.receive(m.Outcome)


HOSTILE_IDS = [
    *("", "x" * 129, "../../x", "..", ".hidden", "-x", "a/b", "a\\b", "a b", "a\nb", "a\x1b[2J", "a\0b"),
    *('{"base64": "AA=="}', "$bytes", "w\u00e9", "\u202ew0", "w0#", "w0?x", "w%30", "w0:x", "[red]w0"),
]


async def test_a_worker_id_that_is_no_name_is_refused_with_the_rule(
    address: str, subtests: pytest.Subtests
) -> None:
    async with talk(address) as make:
        raw = make()
        for worker in HOSTILE_IDS:
            with subtests.test(worker):
                async with refusal_without_effect(raw, Reason.NAME) as caught:
                    await raw.join(worker=worker)
                refusal = caught.value.refusal
                assert refusal.message.startswith(
                    "worker id: expected 1 to 128 characters, of ASCII letters, digits, '.', '_'"
                )
                assert refusal.message.isprintable()
                assert "--worker-id" in refusal.remedy
        async with refusal_without_effect(raw, Reason.NAME):  # a compressor is on one line
            await raw.join(compressor="4bit\n12:00:00 I a line")


async def test_another_job_strangers_and_a_fetch_before_there_are_parameters_are_refused(
    address: str,
) -> None:
    async with talk(address) as make:
        raw = make()
        for hello, reason in (({"job": "other"}, Reason.UNKNOWN_JOB), ({}, Reason.NOT_A_MEMBER)):
            async with refusal_without_effect(raw, reason):
                await raw.attach(**hello)
                await raw.receive(m.Welcome)
        with pytest.raises(Refused) as caught:
            await refusing(raw.stub.fetch(m.FetchRequest()).read())
        assert caught.value.refusal.reason is Reason.NOT_INITIALIZED


async def test_of_two_live_workers_with_one_id_exactly_one_is_accepted(address: str) -> None:
    async with talk(address) as make:
        first, second = make("same", 1), make("same", 2)
        await first.train()
        await first.receive(m.Assignment)
        with pytest.raises(Refused) as caught:
            await second.join()
        assert caught.value.refusal.reason is Reason.DUPLICATE_WORKER
        assert "--worker-id" in caught.value.refusal.remedy
        assert (await pushed(first, gradient())).decision is m.Decision.ACCEPTED


def test_a_dense_payload_keeps_its_type() -> None:
    """The fixtures above rely on it: the bias travels as bfloat16."""
    assert isinstance(gradient()[1], DensePayload)
