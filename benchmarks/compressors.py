"""`gc-bench compressors`: speed of every compressor relative to memory, its promised and achieved ratio, its
error.

A row is the whole call of a worker in steady state, on one matrix: the check for infinities, error feedback,
compression, a new payload. Its peer is `torch.add_` on float32 tensors of that size, 12 bytes moved per
element, timed alternately with it; medians are compared. The bytes counted as moved are the payload and the
least that feedback needs, 12 bytes per element to read gradient and residual and write the residual.

Below the table stand three comparisons at the largest size:

- exact selection of the largest 1 % beside `torch.topk` and `np.argpartition`
- the one pass of `4bit` over gradient and residual beside `torch.add_`, as bandwidth
- the server's sum of 16 pushes beside adding them up as decoded float32 tensors

The last lines give the bits of an index relative to the entropy of the kept elements' positions.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..common.exits import Exit
from ..common.parts import divide
from ..common.spec import parse_spec
from ..compressors import (
    AbsentPayload,
    DensePayload,
    LayerRule,
    LinearPayload,
    ModelCompressor,
    Payload,
    ProjectedPayload,
    QuantizedPayload,
    SparsePayload,
    TensorSpec,
    decode,
    reduce_payloads,
    tell_of_compiling,
    warm_up,
    wire_bytes,
)
from ..compressors.kernels import cpu, selection, sparse
from ..compressors.registry import BUILT_IN, create, names
from . import output
from .arguments import at_least_one, json_option, numbers, option
from .timing import interleaved, wall

ADD_BYTES = 12.0
MOST_ELEMENTS = 1_000_000_000
SAMPLES = 32
ELEMENTS_A_TURN = 2_000_000
FIRST_STEPS = 3  # until thresholds and residuals have settled
RATIOS = (10, 100)
DENSITIES = (0.1, 0.01, 0.001)
TOP = 100  # one element in TOP is selected
PUSHES = 16  # in a sum
SPARSIFIERS = ("dgc", "gcac", "krngc", "l1", "randk", "topk")


def default_specs() -> list[str]:
    """Return the specs of all registered compressors, sparsifiers at each of `RATIOS`, and some variants."""
    plain = [name for name in names() if name not in SPARSIFIERS]
    kept = [f"{name}:ratio={ratio},warmup=0" for ratio in RATIOS for name in SPARSIFIERS]
    variants = ["qsgd:bits=2", "qsgd:bits=8", "1bit:block=4096"]
    return [*plain, *kept, *variants, "topk:ratio=100,values=4bit", "topk:ratio=100,values=1bit"]


def promised_ratio(spec: str, payload: Payload) -> float | None:
    """Return the compression ratio that a spec promises; None if it depends on the gradient.

    The ratio is that of the float32 bytes to the payload's.

    Args:
        spec: spec of the compressor.
        payload: payload that it has made.
    """
    match payload:
        case SparsePayload():
            ratio = parse_spec("compressor", spec).options.get("ratio")
            return None if ratio is None else float(ratio)
        case QuantizedPayload():
            return 32 / payload.format.bits
        case LinearPayload():
            return 32 / payload.bits
        case DensePayload():
            return 4 / payload.format.element_bytes
        case AbsentPayload() | ProjectedPayload():
            return None


def model_compressor(spec: str, elements: int) -> ModelCompressor:
    """Return the compressor of a model that is a single matrix and travels in one part."""
    plan = divide([elements], 4 * elements)
    rows = next((n for n in range(math.isqrt(elements), 0, -1) if elements % n == 0), 1)
    specs = [TensorSpec(name="w", shape=(rows, elements // rows))]  # near a square
    return ModelCompressor(specs, spec, LayerRule(), seed=0, rank=0, plan=plan)


class _Subject:
    """One compressor that compresses a matrix of random values, step after step.

    Attributes:
        payload: payload of the last step.
        error_norm: Euclidean norm of the first step's error, relative to that of its gradient.
    """

    def __init__(self, spec: str, elements: int) -> None:
        self._compressor = model_compressor(spec, elements)
        generator = torch.Generator().manual_seed(0)
        self._gradients = [torch.randn(1, elements, generator=generator) * 0.02 for _ in range(2)]
        self._version = 0
        first = self._gradients[0].float()
        self.payload = self.step()
        bases, payload = self._compressor.bases, self.payload
        sent = bases.decode(0, payload) if isinstance(payload, ProjectedPayload) else decode(payload)
        missed = first.view(-1).numpy() - sent
        norm = float(np.linalg.norm(first.numpy().astype(np.float64)))
        self.error_norm = float(np.linalg.norm(missed.astype(np.float64))) / norm if norm else 0.0
        for _ in range(FIRST_STEPS):
            self.payload = self.step()

    def step(self) -> Payload:
        gradient = self._gradients[self._version % 2].float()
        self._version += 1
        return self._compressor.compress([gradient], SAMPLES, version=self._version)[0]


def in_turn(tasks: Sequence[Callable[[], object]], elements: int, repeats: int) -> list[float]:
    """Time the tasks alternately and return the median seconds of a call of each.

    Args:
        tasks: functions to time.
        elements: elements that a call processes; with few, a turn has several calls.
        repeats: number of turns.
    """
    calls = max(1, ELEMENTS_A_TURN // elements)
    return interleaved(tasks, repeats, lambda task: wall(task, calls))


def measure(spec: str, elements: int, repeats: int) -> dict[str, Any]:
    """Measure one compressor on one matrix and return a row of the table, as a JSON object.

    "seconds" is the median of a call, "ratio_to_add" its bandwidth relative to that of `torch.add_` in the
    same run, and "error_norm" the norm of the first payload's error, relative to that of its gradient.
    """
    subject = _Subject(spec, elements)
    one, other = torch.ones(elements), torch.ones(elements)
    seconds, add_seconds = in_turn([subject.step, lambda: one.add_(other)], elements, repeats)
    sent = wire_bytes(subject.payload)
    moved = ADD_BYTES * elements + sent
    return {
        "name": spec,
        "device": "cpu",
        "elements": elements,
        "seconds": seconds,
        "bytes_moved": moved,
        "ratio_to_add": moved / seconds / (ADD_BYTES * elements / add_seconds),
        "wire_bytes": sent,
        "raw_bytes": 4 * elements,
        "promised_ratio": promised_ratio(spec, subject.payload),
        "achieved_ratio": 4 * elements / sent,
        "error_norm": subject.error_norm,
    }


def selection_ratios(elements: int, repeats: int) -> Mapping[str, float]:
    """Return how many times longer peers take than our exact selection of the largest 1 %, by their names."""
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 0.02
    values, keep = tensor.numpy(), max(1, elements // TOP)
    residual = np.zeros_like(values)
    ours, fused, topk, partition = in_turn(
        [
            lambda: selection.select(values, keep),
            lambda: selection.add_and_select(values, residual, keep),
            lambda: torch.topk(tensor.abs(), keep),
            lambda: np.argpartition(np.abs(values), elements - keep),
        ],
        elements,
        repeats,
    )
    return {
        "torch.topk": topk / ours,
        "torch.topk, with error feedback in the same pass": topk / fused,
        "np.argpartition": partition / ours,
        "np.argpartition, with error feedback in the same pass": partition / fused,
    }


def pass_ratios(elements: int, repeats: int) -> Mapping[str, float]:
    """Return the bandwidth of `4bit`'s pass relative to that of `torch.add_`, and the speed of a sum of
    `PUSHES` pushes relative to adding them up as decoded tensors, by name."""
    generator = torch.Generator().manual_seed(0)
    gradient, total = torch.randn(1, elements, generator=generator) * 2e-3, torch.zeros(elements)

    def pushed(shift: int) -> Payload:
        compressor = model_compressor("4bit", elements)
        compressor.compress([gradient.roll(shift)], SAMPLES, version=0)
        (payload,) = compressor.compress([gradient.roll(shift)], SAMPLES, version=1)  # has a residual
        return payload

    pushes = [pushed(shift) for shift in range(PUSHES)]
    decoded = [torch.from_numpy(decode(push)) for push in pushes]
    first, residual = pushes[0], np.zeros(elements, np.float32)
    assert isinstance(first, QuantizedPayload)
    given = [gradient.view(-1).numpy()], residual, residual, first.levels, first.data.copy()
    weights, out = [1 / PUSHES] * PUSHES, np.zeros(elements, np.float32)
    add, one_pass, add_all, reduce = in_turn(
        [
            lambda: total.add_(decoded[0]),
            lambda: cpu.quantize_blocks(first.format, *given),
            lambda: [total.add_(values) for values in decoded],
            lambda: reduce_payloads(pushes, weights, out),
        ],
        elements,
        repeats,
    )
    moved = ADD_BYTES + first.format.bits / 8
    return {
        "bandwidth of 4bit's pass / torch.add_'s": moved * add / (ADD_BYTES * one_pass),
        f"sum of {PUSHES} 4-bit pushes, time of adding decoded tensors / ours": add_all / reduce,
    }


def index_ratio(density: float, elements: int) -> float:
    """Return how many bits an index of a sparse payload takes, relative to the entropy of its position.

    The positions are uniformly random.

    Args:
        density: fraction of the elements that is kept, 0 to 1.
        elements: number of elements.
    """
    count = max(1, round(density * elements))
    kept = np.random.default_rng(0).permutation(elements)[:count]
    indices = np.sort(kept).astype(np.uint32)
    bits = 8 * sparse.encode_gaps(indices, elements, sparse.gaps_low_bits(elements, count)).size / count
    entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density
    return bits / entropy


def tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table for each size."""

    def cells(row: Mapping[str, Any]) -> Iterator[str]:
        yield from (f"`{row['name']}`", f"{row['seconds'] * 1e3:.2f}", f"{row['ratio_to_add']:.2f}")
        yield "–" if row["promised_ratio"] is None else f"{row['promised_ratio']:g} x"
        yield from (f"{row['achieved_ratio']:.2f} x", f"{row['error_norm']:.3f}")

    headings = "compressor", "ms", "of add_", "promised", "achieved", "error"
    for elements, group in itertools.groupby(rows, lambda row: row["elements"]):
        yield f"{elements:,} elements: whole call with error feedback\n"
        yield output.table(headings, map(cells, group)) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = "100000,1000000,25000000"
    option(
        parser, "--elements", numbers(MOST_ELEMENTS), sizes, "N,...", "numbers of elements of the matrices"
    )
    text = "compressors to measure (default: all)"
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", help=text)
    option(parser, "--repeats", at_least_one, 7, "N", "repetitions")
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Measure every compressor; return the exit code.

    A third-party compressor that fails is reported at the end; the exit code is then not 0.
    """
    specs = given.compressors or default_specs()
    for spec in specs:
        create(spec)  # raises for a bad spec before any measurement
    tell_of_compiling(output.say)
    warm_up()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for elements, spec in itertools.product(given.elements, specs):
        output.say(f"{spec}: {elements:,} elements")
        try:
            rows.append(measure(spec, elements, given.repeats))
        except Exception as error:
            if parse_spec("compressor", spec).name in BUILT_IN:
                raise
            # A third-party compressor: continue with the other ones.
            failed.append(f"{spec}: failed with {error!r}")
    for text in tables(rows):
        print(text)
    largest = max(given.elements)
    print(f"exact top 1 % of {largest:,}, time of the peer / ours:")
    for name, ratio in selection_ratios(largest, given.repeats).items():
        print(f"  {name}: {ratio:.1f}")
    for name, ratio in pass_ratios(largest, given.repeats).items():
        print(f"{name}: {ratio:.2f}")
    print("bits per index / entropy, random places in 1,000,000:")
    for density in DENSITIES:
        print(f"  {density:.1%}: {index_ratio(density, 1_000_000):.3f}")
    output.write_json(given.json, rows)
    for what in failed:
        output.say(what)
    return Exit.INTERNAL if failed else Exit.DONE
