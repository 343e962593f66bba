"""A model compressed where its gradients lie: on a GPU, or else in Triton's interpreter, for which the CPU's
memory has to do."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flat import as_push

from gradwire.compressors import (
    CodeFormat,
    LayerRule,
    ModelCompressor,
    NonFiniteGradient,
    ProjectedPayload,
    TensorSpec,
    decode,
    parse_compressor,
    sum_coordinates,
)
from gradwire.compressors.joining import units
from gradwire.compressors.kernels import devices, low_rank
from gradwire.compressors.payload import Payload
from gradwire.compressors.registry import BUILT_IN

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from gradwire.compressors.kernels import cuda

AVAILABLE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if AVAILABLE else "cpu")
SPECS = [
    TensorSpec(name="w", shape=(40, 60)),
    TensorSpec(name="b", shape=(60,)),
    TensorSpec(name="odd", shape=(7, 3)),
    TensorSpec(name="nothing", shape=(0, 4)),
]
COMPRESSORS = [
    "4bit",
    "4bit:levels=groups,feedback=off",
    "2bit:threshold=0.05,scale=mean",
    "topk:ratio=10",
    "topk:ratio=10,momentum=0.9,clip=1",
    "topk:ratio=10,values=4bit,delay=2,decay=0.9",
    "l1:ratio=7",
    "gcac:ratio=10",
    "dgc:ratio=10,warmup=0",  # on the host
    "krngc:ratio=10,warmup=0",
    "8bit",
    "bf16",
    "none",
]


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that tensors lie on a GPU, if there is none."""

    def on_gpu(what: torch.Tensor | torch.device) -> bool:
        return True

    if not AVAILABLE:
        monkeypatch.setattr(devices, "on_gpu", on_gpu)


def gradients(version: int) -> list[torch.Tensor]:
    """Small multiples of a power of two, so that their sums are exact in any order."""
    rng = np.random.default_rng(version)
    return [
        torch.from_numpy((rng.integers(-300, 300, spec.shape) / 1024).astype(np.float32)) for spec in SPECS
    ]


def steps(spec: str, device: torch.device) -> tuple[list[list[Payload]], ModelCompressor]:
    compressor = ModelCompressor(SPECS, spec, LayerRule(), seed=1, rank=0)
    taken: list[list[Payload]] = []
    for version in range(4):
        given = [gradient.to(device) for gradient in gradients(version)]
        taken.append(compressor.compress(given, 32, version=version, workers=2))
        if version == 2 and taken[-1]:
            compressor.ledger.put_back(as_push(taken[-1]))
    return taken, compressor


def content(payloads: list[Payload]) -> list[tuple[type, bytes]]:
    return [(type(payload), payload.data.tobytes()) for payload in payloads]


@pytest.mark.parametrize("spec", COMPRESSORS)
def test_payloads_are_those_of_the_cpu(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, plain = steps(spec, torch.device("cpu"))
    pretend(monkeypatch)
    launched: list[object] = []
    launch = cuda._launch  # pyright: ignore[reportPrivateUsage]

    def spy(kernel: object, *arguments: object, **constants: object) -> None:
        launched.append(kernel)
        launch(kernel, *arguments, **constants)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(cuda, "_launch", spy)
    got, ours = steps(spec, DEVICE)
    assert bool(launched) == parse_compressor(spec).entry.on_gpu
    assert [content(payloads) for payloads in got] == [content(payloads) for payloads in expected]
    assert ours.ledger.norm() == pytest.approx(plain.ledger.norm(), rel=1e-12)


@pytest.mark.parametrize("options", ["values=fp16", "values=8bit", "values=4bit,momentum=0.9"])
def test_coordinates_are_those_of_the_cpu_but_for_rounding(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = (
        ModelCompressor(SPECS, f"lowrank:rank=2,{options}", LayerRule(), seed=1, rank=0) for _ in range(2)
    )
    expected = [plain.compress(gradients(version), 32, version=version)[0] for version in range(2)]
    pretend(monkeypatch)
    monkeypatch.delattr(low_rank, "project")  # the matrix would be copied to the host
    for version, payload in enumerate(expected):
        given = [gradient.to(DEVICE) for gradient in gradients(version)]
        got, same = coordinates(ours.compress(given, 32, version=version)[0]), coordinates(payload)
        # The random numbers are the same, and round up or down alike, but for coordinates on the border.
        assert np.median(np.abs(got - same)) <= 1e-3 * np.abs(same).max()
    assert ours.ledger.norm() == pytest.approx(plain.ledger.norm(), rel=0.02)


def coordinates(payload: Payload) -> npt.NDArray[np.float32]:
    assert isinstance(payload, ProjectedPayload)
    out = np.empty(payload.count, np.float32)
    sum_coordinates([payload], [1.0], out)
    return out


def test_a_gradient_that_is_not_finite_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    compressor = ModelCompressor(SPECS, "topk:ratio=10", LayerRule(), seed=1, rank=0)
    for worst in (float("nan"), float("inf")):
        given = [gradient.to(DEVICE) for gradient in gradients(0)]
        given[2][1, 1] = worst
        with pytest.raises(NonFiniteGradient, match="odd"):
            compressor.compress(given, 1, version=0)
        assert compressor.ledger.norm() == 0


@pytest.mark.parametrize("spec", ["bf16", "bf16:feedback=off", "4bit", "dgc:ratio=10,warmup=0"])
def test_neighbours_on_the_host_are_apart_from_a_ledger_on_the_gpu(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [TensorSpec(name=name, shape=(40, 2)) for name in "abc"]
    given = [[torch.linspace(-1, version, 80).view(each.shape) for each in specs] for version in range(3)]
    plain, ours = (ModelCompressor(specs, spec, LayerRule(), seed=1, rank=0) for _ in range(2))
    expected = [plain.compress(each, 8, version=version) for version, each in enumerate(given)]
    ours.ledger.to(DEVICE)  # as another tensor of the model, which lies there, would have it

    def on_gpu(what: torch.Tensor | torch.device) -> bool:
        return isinstance(what, torch.device)

    def together(*_: object) -> Payload:
        raise AssertionError("what is left would go to a copy of the ledger's")

    if not AVAILABLE:
        monkeypatch.setattr(devices, "on_gpu", on_gpu)
        monkeypatch.setattr(units, "WAYS", dict.fromkeys(units.WAYS, together))
    for version, each in enumerate(given):
        got = ours.compress(each, 8, version=version)
        decoded = [np.concatenate([decode(payload) for payload in sent]) for sent in (got, expected[version])]
        assert decoded[0].tobytes() == decoded[1].tobytes()
    assert torch.equal(ours.ledger.residual.cpu(), plain.ledger.residual)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("format", [CodeFormat.SIGNED_4BIT, CodeFormat.SIGNED_2BIT])
def test_many_tensors_at_once(format: CodeFormat, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [gradient.reshape(-1) for gradient in gradients(0)]
    owed = torch.cat([gradient.reshape(-1) for gradient in gradients(1)])
    levels = np.linspace(0.01, 0.4, format.level_count * len(flat), dtype=np.float32)
    left = torch.empty_like(owed)
    data, totals, nonzero = devices.quantize_blocks(format, flat, owed, left, levels)
    pretend(monkeypatch)
    ours = owed.to(DEVICE, copy=True)
    kept = ours if in_place else torch.empty_like(ours)
    got = devices.quantize_blocks(format, [each.to(DEVICE) for each in flat], ours, kept, levels)
    assert np.array_equal(got[0], data)
    assert got[1].tolist() == totals.tolist()
    assert got[2].tolist() == nonzero.tolist()
    assert torch.equal(kept.cpu().view(torch.int32), left.view(torch.int32))
    assert in_place or torch.equal(ours.cpu(), owed)


def test_which_compressors_work_on_a_gpu() -> None:
    on_gpu = {name for name, entry in BUILT_IN.items() if entry.on_gpu}
    assert on_gpu == {"4bit", "2bit", "topk", "l1", "gcac", "lowrank"}
