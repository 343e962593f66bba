"""Compressors with bases: every replica has the same ones, and nothing of a gradient is lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gradwire.common.spec import SpecError
from gradwire.compressors import (
    Bases,
    Compressed,
    LayerRule,
    ModelCompressor,
    ProjectedPayload,
    PushTerms,
    TensorSpec,
    compressor_of,
    cut,
    decode,
    parse_compressor,
    sum_coordinates,
)
from gradwire.compressors.registry import BUILT_IN

from .window import WINDOW, Window

SPECS = [
    TensorSpec(name="w", shape=(6, 10)),
    TensorSpec(name="b", shape=(10,)),
    TensorSpec(name="v", shape=(2, 3, 4)),
]
STARTS = [0, 60, 70, 94]
WORKERS = 3
Array = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "window", WINDOW)


def subject(rank: int = 0, spec: str = "window") -> ModelCompressor:
    return ModelCompressor(SPECS, spec, LayerRule(), seed=5, rank=rank)


def gradients(rank: int, version: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + version)
    return [torch.randint(-8, 9, spec.shape, generator=generator).float() for spec in SPECS]


def sent_by(worker: ModelCompressor, version: int, rank: int) -> Compressed:
    step = worker.begin(PushTerms(samples=1, version=version))
    for index, gradient in enumerate(gradients(rank, version)):
        step.add(index, gradient)
    step.finish()
    (payloads,) = step.sent.values()
    return Compressed(payloads, [*pairwise(STARTS)], 1, None, step.bases)


def advanced(bases: Bases, pushes: list[Compressed]) -> tuple[Bases, Array]:
    """The bases of the next version, and the sum of the gradients of these pushes."""
    means, total = dict[int, Array](), np.zeros(STARTS[-1], np.float32)
    for index, (start, end) in enumerate(pairwise(STARTS)):
        each = [push.payloads[index] for push in pushes]
        projected = [payload for payload in each if isinstance(payload, ProjectedPayload)]
        if projected:
            means[index] = np.empty(projected[0].count, np.float32)
            sum_coordinates(projected, [1.0] * len(projected), means[index])
            bases.expand(index, means[index], total[start:end])
        else:
            total[start:end] = np.sum([decode(payload) for payload in each], axis=0)
    return bases.advance(means), total


def test_all_replicas_have_the_same_bases_and_nothing_is_lost() -> None:
    workers = [subject(rank) for rank in range(WORKERS)]
    server, places = workers[0].bases, set[float]()
    computed, applied = np.zeros(STARTS[-1]), np.zeros(STARTS[-1])
    for version in range(20):
        pushes = [sent_by(worker, version, rank) for rank, worker in enumerate(workers)]
        computed += sum(
            torch.cat([g.reshape(-1) for g in gradients(r, version)]).numpy() for r in range(WORKERS)
        )
        server, total = advanced(server, pushes)
        applied += total
        for worker in workers:
            worker.bases = advanced(worker.bases, pushes)[0]
            assert [each.tobytes() for each in worker.bases.values.values()] == [
                each.tobytes() for each in server.values.values()
            ]
        places.add(float(server.values[0][0]))
    owed = sum(worker.ledger.residual.numpy() for worker in workers)
    assert (applied + owed == computed).all()
    assert len(places) > 8, "the bases follow the mean"


def test_tensors_without_coordinates_travel_as_bfloat16() -> None:
    assert [each.name for each in subject().chosen] == ["window", "bf16", "window"]
    assert sorted(subject().bases.values) == [0, 2]
    assert not subject(spec="4bit").bases.values


def test_a_push_that_is_too_late_is_decoded_with_the_bases_of_its_version() -> None:
    worker = subject()
    sent = sent_by(worker, 0, 0)
    worker.bases, _ = advanced(worker.bases, [sent])
    worker.ledger.put_back(sent)
    expected = torch.cat([each.reshape(-1) for each in gradients(0, 0)])
    assert torch.equal(worker.ledger.residual, expected)


def test_coordinates_are_neither_cut_nor_decoded_alone() -> None:
    payload = sent_by(subject(), 0, 0).payloads[0]
    assert cut(payload, 0, 60) == [payload]
    with pytest.raises(ValueError, match="send the tensor in one part"):
        cut(payload, 0, 32)
    with pytest.raises(ValueError, match="coordinates in bases"):
        decode(payload)


def test_no_plan_cuts_a_tensor_with_coordinates() -> None:
    large = [TensorSpec(name="w", shape=(1024, 1024)), TensorSpec(name="b", shape=(1 << 20,))]
    plan = ModelCompressor(large, "window", LayerRule(), seed=0, rank=0).plan
    assert [len(unit.parts) for unit in plan.units] == [2, 1]
    costs = parse_compressor("window").compression()
    assert costs.up.uncut([spec.shape for spec in large]) == {0}
    assert costs.up.sent_bytes((1024, 1024)) == 1 << 20
    assert costs.up.sent_bytes((1 << 20,)) == 2 << 20


@pytest.mark.parametrize("method", ["start", "expand", "advance", "compress_with_residual"])
def test_a_compressor_with_bases_has_their_methods(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking(Window):
        pass

    setattr(Lacking, method, None)

    def build(options: object) -> Lacking:
        return Lacking()

    monkeypatch.setitem(BUILT_IN, "window", replace(WINDOW, build=build))
    with pytest.raises(SpecError, match=f"has no method '{method}'"):
        parse_compressor("window").build()


def test_bases_cannot_be_switched_off_for_single_units() -> None:
    with pytest.raises(SpecError, match="without momentum, delay, bases"):
        compressor_of("auto:compressor=window")
