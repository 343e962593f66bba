"""`gc-bench kernels`: speed of the compressor kernels, as ratios within one run.

There are two peers. For everything that passes over memory once it is `torch.add_` on float32 tensors of the
same size, 12 bytes moved per element: two read, one written. For the reductions it is adding up decoded
float32 tensors with `add_`. At the end, a model of many small tensors is timed: a call for each, and one for
all.

Repetitions are interleaved and medians compared. Absolute times differ between machines, and from day to day
on one machine. `gc-bench compressors` measures a worker's whole call, of which these passes are a part.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..common.parts import divide
from ..compressors import (
    DensePayload,
    LayerRule,
    ModelCompressor,
    Payload,
    QuantizedPayload,
    TensorSpec,
    decode,
    kernels,
    reduce_payloads,
    set_threads,
    tell_of_compiling,
    validate,
    warm_up,
)
from . import output
from .arguments import at_least_one, json_option, option
from .timing import interleaved, wall

PUSHES = 16  # in a reduction
ADD_BYTES = 12.0  # moved by `torch.add_` per element
BLOCKS, BLOCK_ELEMENTS = 200, 4096  # the model of many small tensors


@dataclass(frozen=True)
class Case:
    """A kernel to time, and its comparison with a peer.

    Attributes:
        name: name in the table.
        run: function that calls the kernel once.
        moved: bytes moved per element, compared as bandwidth with `add_`, one row for each count. If empty,
            the time is compared with that of adding up `PUSHES` float32 tensors.
        goal: ratio to reach in every row; None for no goal.
    """

    name: str
    run: Callable[[], object]
    moved: tuple[float, ...] = ()
    goal: float | None = None


def payload_of(spec: str, gradient: torch.Tensor) -> Payload:
    """Return the payload that a worker makes of this gradient in a step with a residual.

    Args:
        spec: spec of the compressor.
        gradient: gradient of one matrix; also compressed once before, which makes the residual.
    """
    compressor = model_compressor(spec, gradient.numel())
    compressor.compress([gradient], 32, version=0)
    return compressor.compress([gradient], 32, version=1)[0]


def model_compressor(spec: str, elements: int) -> ModelCompressor:
    """Return the compressor of a model that is a single matrix and travels in one part.

    Args:
        spec: spec of the compressor.
        elements: number of elements of the matrix.
    """
    plan = divide([elements], 4 * elements)
    specs = [TensorSpec(name="w", shape=(1, elements))]
    return ModelCompressor(specs, spec, LayerRule(), seed=0, rank=0, plan=plan)


def make_cases(elements: int, seed: int) -> list[Case]:
    """Return all kernels to time, on gradients that use all codes of the paper's third group of levels."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(elements, generator=generator) * 2e-3 for _ in range(2)]
    gradient, residual = gradients[0], torch.zeros(elements)
    out = torch.zeros(elements).numpy()
    weights = [1 / PUSHES] * PUSHES

    def quantize(spec: str) -> Callable[[], object]:
        payload = payload_of(spec, gradient)
        assert isinstance(payload, QuantizedPayload)
        format, levels, data = payload.format, payload.levels, payload.data.copy()
        return lambda: kernels.cpu.quantize(format, gradient.numpy(), residual.numpy(), levels, data)

    def encode(spec: str) -> Callable[[], object]:
        payload = payload_of(spec, gradient)
        assert isinstance(payload, DensePayload)
        format, data = payload.format, payload.data.copy()
        return lambda: kernels.cpu.encode_dense(format, gradient.numpy(), residual.numpy(), data)

    def reduce(spec: str) -> Callable[[], object]:
        pushes = [payload_of(spec, gradients[w % 2].roll(w)) for w in range(PUSHES)]
        return lambda: reduce_payloads(pushes, weights, out)

    def one_pass(spec: str, left: torch.Tensor) -> Callable[[], object]:
        payload = payload_of(spec, gradient)
        assert isinstance(payload, QuantizedPayload)
        given = [gradient.numpy()], residual.numpy(), left.numpy(), payload.levels, payload.data.copy()
        return lambda: kernels.cpu.quantize_blocks(payload.format, *given)

    four = payload_of("4bit:levels=groups", gradient)
    return [
        Case("4bit with feedback, one pass", quantize("4bit:levels=groups"), moved=(12.5,), goal=0.9),
        Case("2bit with feedback, one pass", quantize("2bit"), moved=(12.25,)),
        Case("4bit, one pass with statistics", one_pass("4bit", residual), (12.5,), 0.85),
        Case("4bit, the same, any levels", one_pass("4bit:levels=groups", residual), (12.5,)),
        # The residual is written to another buffer, which moves four more bytes per element.
        Case("4bit, the same, residual kept", one_pass("4bit", torch.zeros(elements)), (12.5,)),
        Case("2bit, one pass with statistics", one_pass("2bit", residual), moved=(12.25,)),
        Case("mean |g| and finite check", lambda: kernels.cpu.magnitudes(gradient.numpy()), moved=(4,)),
        Case("bf16 with feedback", encode("bf16"), moved=(14,)),
        Case("fp16 with feedback", encode("fp16"), moved=(14,)),
        Case("4bit decode", lambda: reduce_payloads([four], [1.0], out), moved=(4.5,)),
        Case("4bit validate", lambda: validate(four), moved=(0.5,)),
        Case(f"reduce {PUSHES} pushes of 4bit", reduce("4bit:levels=groups"), goal=10),
        *(Case(f"reduce {PUSHES} pushes of {spec}", reduce(spec)) for spec in ("2bit", "bf16", "none")),
    ]


def measure(cases: Sequence[Case], elements: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Time both peers and every case, each once in a repetition.

    Args:
        cases: kernels to time.
        elements: number of elements of each tensor.
        repeats: number of repetitions.
        seed: seed of the tensors.

    Returns:
        A row for each case and count: name; peer, in words; ratio, above 1 if faster than the peer; goal or
            None; medians time_ms and peer_ms.
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(elements)
    push = torch.randn(elements, generator=generator)
    decoded = [
        torch.from_numpy(decode(payload_of("4bit:levels=groups", push.roll(w)))) for w in range(PUSHES)
    ]

    def add_all() -> None:
        for values in decoded:
            total.add_(values)

    add, add_each, *taken = interleaved(
        [lambda: total.add_(push), add_all, *(case.run for case in cases)], repeats
    )
    rows: list[dict[str, Any]] = []
    for case, seconds in zip(cases, taken, strict=True):
        peers = {
            f"add_, as bandwidth at {moved:g} B/element": add * moved / ADD_BYTES for moved in case.moved
        } or {f"add_ of {PUSHES} decoded tensors": add_each}
        peer_ms = 1e3 * (add if case.moved else add_each)
        for peer, expected in peers.items():
            row = {"name": case.name, "peer": peer, "ratio": expected / seconds, "goal": case.goal}
            rows.append({**row, "time_ms": 1e3 * seconds, "peer_ms": peer_ms})
    return rows


def measure_blocks(blocks: int, elements: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Time the quantization of many small tensors, once with a call for each and once with one call for all.

    Args:
        blocks: number of tensors.
        elements: number of elements of each tensor.
        repeats: number of repetitions.
        seed: seed of the tensors.

    Returns:
        A row for each method: name, and time_us, the median for all tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(elements, generator=generator) * 2e-3 for _ in range(blocks)]
    residual = torch.zeros(blocks * elements)
    payload = payload_of("4bit", gradients[0])
    assert isinstance(payload, QuantizedPayload)
    format, levels = payload.format, payload.levels
    parts, all_levels = residual.view(blocks, elements).unbind(), np.tile(levels, blocks)

    def each() -> None:
        for gradient, part in zip(gradients, parts, strict=True):
            kernels.devices.magnitudes(gradient)
            kernels.devices.quantize(format, gradient, part, levels)

    def at_once() -> None:
        kernels.devices.quantize_blocks(format, gradients, residual, residual, all_levels)

    tasks: dict[str, Callable[[], object]] = {"a call for each": each, "one call for all": at_once}
    taken = interleaved(list(tasks.values()), repeats, lambda task: wall(task, 10))
    return [
        {"name": f"4bit of {blocks} x {elements}, {name}", "time_us": 1e6 * seconds}
        for name, seconds in zip(tasks, taken, strict=True)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--elements", at_least_one, 25_000_000, "N", "number of elements of a tensor")
    option(parser, "--repeats", at_least_one, 7, "N", "interleaved repetitions; their median counts")
    text = "threads of kernels and peers (default: one for each processor)"
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=at_least_one, default=threads, metavar="N", help=text)
    option(parser, "--seed", int, 0, "N", "seed of the gradients")
    json_option(parser)


def run(given: argparse.Namespace) -> None:
    """Time the kernels and print the tables."""
    torch.set_num_threads(given.threads)
    set_threads(given.threads)
    tell_of_compiling(output.say)
    warm_up()
    rows = measure(make_cases(given.elements, given.seed), given.elements, given.repeats, given.seed)

    conditions = {key: getattr(given, key) for key in ("elements", "repeats", "threads", "seed")}
    conditions |= {"machine": platform.machine(), "torch": str(torch.__version__), "numpy": np.__version__}
    print("  ".join(f"{key} {value}" for key, value in conditions.items()))
    # This bandwidth decides which rows memory limits, and which arithmetic.
    print(f"add_ moves {ADD_BYTES * given.elements / rows[0]['peer_ms'] / 1e6:.0f} GB/s")
    print(f"{'':32} {'ratio':>6}  {'goal':>5}  peer")
    for row in rows:
        goal = "" if row["goal"] is None else f"{row['goal']:.2f}"
        times = f"{row['time_ms']:.1f} : {row['peer_ms']:.1f} ms"
        print(f"{row['name']:32} {row['ratio']:6.2f}  {goal:>5}  {row['peer']} ({times})")
    blocks = measure_blocks(BLOCKS, BLOCK_ELEMENTS, given.repeats, given.seed)
    for row in blocks:
        print(f"{row['name']:40} {row['time_us']:8.0f} us")
    output.write_json(given.json, {"conditions": conditions, "rows": rows, "blocks": blocks})
