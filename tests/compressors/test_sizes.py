"""Declared costs of compressors, against the compressors themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gradwire.common.parts import cut_up, divide
from gradwire.common.spec import SpecError
from gradwire.compressors import (
    LayerRule,
    ModelCompressor,
    TensorSpec,
    dense_payload,
    parse_compressor,
    sparse_payload,
    wire_bytes,
)
from gradwire.compressors.payload import DenseFormat
from gradwire.compressors.registry import BUILT_IN
from gradwire.compressors.sizes import BLOCK_SIGNS, EIGHT_BIT, FOUR_BIT, NONE, ONE_BIT, CompressionCosts

SHAPES = ((256, 128), (128,), (128, 512), (512,), (64, 64, 3, 3))


def compression(spec: str) -> CompressionCosts:
    return parse_compressor(spec).compression()


SPECS = [name for name in BUILT_IN if name not in ("krngc", "threshold")] + [
    *("topk:ratio=10", "topk:ratio=1000", "topk:values=4bit", "topk:values=8bit", "topk:values=float32"),
    *("randk:ratio=20", "gcac:ratio=50", "qsgd:bits=8,bucket=128", "topk:ratio=3"),
    *("1bit:block=4096", "1bit:block=32"),
]


def pushed_bytes(spec: str, rank: int = 0) -> int:
    """Return the bytes of a worker's second push of noise."""
    specs = [TensorSpec(name=f"layer{place}", shape=shape) for place, shape in enumerate(SHAPES)]
    plan = divide([each.elements for each in specs])
    options = "warmup=0"
    if spec.startswith(("dgc", "gcac")):
        spec = f"{spec}{',' if ':' in spec else ':'}{options}"
    compressor = ModelCompressor(specs, spec, LayerRule(), 1, rank, plan=plan)
    generator = torch.Generator().manual_seed(rank)
    payloads = []
    for version in range(2):
        gradients = [torch.randn(shape, generator=generator) * 0.3 for shape in SHAPES]
        payloads = compressor.compress(gradients, samples=1, version=version)
    return sum(map(wire_bytes, payloads))


@pytest.mark.parametrize("spec", SPECS)
def test_a_push_has_the_bytes_that_are_said_of_it(spec: str) -> None:
    up = compression(spec).up
    said = sum(up.sent_bytes(shape) for shape in SHAPES)
    assert said == pytest.approx(pushed_bytes(spec), rel=0.05)


@pytest.mark.parametrize("spec", ["none", "4bit", "topk:ratio=30", "randk", "dgc:ratio=1000,warmup=0"])
def test_planners_know_the_densities_that_workers_say(spec: str) -> None:
    """gc-plan from the spec, a server from its workers: equal densities are equal to both."""
    up = compression(spec).up
    specs = [TensorSpec(name=f"layer{place}", shape=shape) for place, shape in enumerate(SHAPES)]
    said = ModelCompressor(specs, spec, LayerRule(), 1, 0).sent_shares(epoch=0.0)
    assert said == [up.density if up.carries(shape) else 1.0 for shape in SHAPES]


@pytest.mark.parametrize("spec", [*SPECS, "4bit:levels=groups", "4bit:momentum=0.9", "2bit:decay=0.9"])
def test_planners_know_how_many_calls_neighbours_take(spec: str) -> None:
    shapes = ((64, 64), (64, 64), (64,), (32,), (64, 63), (64, 65), (64, 64))
    specs = [TensorSpec(name=f"layer{place}", shape=shape) for place, shape in enumerate(shapes)]
    plan = cut_up([each.elements for each in specs], [len(specs)], 1 << 20)
    (runs,) = ModelCompressor(specs, spec, LayerRule(), 1, 0, plan=plan).runs
    up = compression(spec).up
    assert up.runs(shapes) == len(runs)
    assert up.calls(shapes) == (2 if up.coordinates else len(runs)), "all matrices take one call"


@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("ratio", [10, 100, 1000])
def test_an_update_of_sparse_pushes_has_the_elements_of_all_of_them(ratio: int, workers: int) -> None:
    elements, draw = 1_000_000, random.Random(1)
    held: set[int] = set()
    for _ in range(workers):
        held.update(draw.sample(range(elements), elements // ratio))
    indices = np.array(sorted(held), np.uint32)
    values = dense_payload(DenseFormat.BFLOAT16, np.zeros(indices.size, np.float32))
    real = min(wire_bytes(sparse_payload(elements, indices, values)), 2 * elements)
    down = compression(f"topk:ratio={ratio}").down(workers)
    assert down.sent_bytes((elements // 1000, 1000)) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(
    ("spec", "down"),
    [
        *[(name, name) for name in ("none", "bf16", "fp16", "1bit", "4bit", "8bit")],
        *[("2bit", "4bit"), ("terngrad", "4bit"), ("signsgd", "1bit")],
        *[("qsgd", "4bit"), ("qsgd:bits=8", "8bit")],
        *[(f"1bit:block={block}", "1bit:block=4096") for block in (64, 4096)],
    ],
)
def test_an_update_of_quantized_pushes_is_quantized_as_auto_does_it(spec: str, down: str) -> None:
    codings = {"1bit": ONE_BIT, "1bit:block=4096": BLOCK_SIGNS, "4bit": FOUR_BIT, "8bit": EIGHT_BIT}
    assert compression(spec).down(4) == codings.get(down, compression(spec).up)


@pytest.mark.parametrize("spec", ["4bit", "none", "topk", "topk:ratio=1000", "dgc:ratio=10", "qsgd"])
def test_parts_are_as_large_by_default_as_the_registry_has_them(spec: str) -> None:
    assert compression(spec).least_part_bytes == parse_compressor(spec).least_part_bytes


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("4bti", "did you mean '4bit'"),
        ("threshold", "its steps cannot be predicted: the number of elements that reach tau is not known"),
        ("randk:density=norm", "its steps cannot be predicted: .* the norm of its parameters"),
        ("topk:ratio=0.5", "ratio: expected a number from 1 to 1e9, got 0.5"),
        ("topk:foo=1", "unknown key 'foo'"),
        ("topk:values=3bit", "expected one of 1bit, "),
    ],
)
def test_what_nothing_is_known_of_is_refused(spec: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        compression(spec)


def test_planners_and_the_registry_agree_on_what_is_not_compressed() -> None:
    assert compression("none") == NONE
