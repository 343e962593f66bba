"""`gc-bench cuda`: compile the Triton kernels, check them bit for bit against the reference kernels, and time
them.

Peers on the same GPU, timed alternately: a device copy (8 bytes moved per element) for bandwidth,
`torch.topk` of the largest 1 % for selection. A whole call of a worker, from a gradient on the GPU to a
payload on the host, is timed beside the plain copy of that gradient to the host. Without a GPU the checks run
in Triton's interpreter on a small tensor, and nothing is timed.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch

from ..compressors import Payload
from ..compressors.kernels import reference, selection_reference
from ..compressors.payload import CodeFormat, Float32
from . import output
from .arguments import BenchError, at_least_one, json_option, option
from .kernels import model_compressor
from .timing import interleaved

COPY_BYTES = 8
TOP = 100  # one element in TOP is selected
LEVELS: dict[CodeFormat, Float32] = {
    CodeFormat.SIGNED_4BIT: np.array([0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07], np.float32),
    CodeFormat.SIGNED_2BIT: np.array([0.02], np.float32),
}
WHOLE = ("4bit:levels=group1", "2bit", "topk:ratio=100", "gcac:ratio=100")  # timed and checked as whole calls
CHECKED_ELEMENTS = 5003  # without a GPU; few, because the interpreter is slow


def check(gradient: Float32, residual: Float32, device: torch.device) -> None:
    """Raise `AssertionError` unless every kernel gives the reference's bits.

    Args:
        gradient, residual: inputs of the kernels, float32 (elements,).
        device: of the kernels; the CPU for Triton's interpreter.
    """
    from ..compressors.kernels import cuda

    given = torch.from_numpy(gradient).to(device)
    for format, levels in LEVELS.items():
        expected, codes = residual.copy(), np.empty(format.code_bytes(gradient.size), np.uint8)
        reference.quantize(format, gradient, expected, levels, codes)
        ours = torch.from_numpy(residual.copy()).to(device)
        data = torch.zeros(codes.size, dtype=torch.uint8, device=device)
        cuda.quantize(format, given, ours, levels, data)
        assert np.array_equal(data.cpu().numpy(), codes), f"{format.value}: codes"
        assert np.array_equal(ours.cpu().numpy().view(np.uint32), expected.view(np.uint32)), format.value
    keep = gradient.size // TOP
    for center in (0.0, cuda.median(given)):
        chosen = selection_reference.select(gradient, keep, center=center)
        indices = cuda.select(given, keep, center=center)
        assert np.array_equal(indices.cpu().numpy(), chosen.indices), f"select around {center}"
    assert cuda.median(given) == selection_reference.median(gradient), "median"
    for spec in WHOLE:
        there, here = caller(spec, given), caller(spec, given.cpu())
        for step in range(3):
            assert np.array_equal(there().data, here().data), f"{spec}: payload {step}"


def caller(spec: str, gradient: torch.Tensor) -> Callable[[], Payload]:
    """Return a function that compresses this gradient as a worker does. Each call is a further step."""
    compressor, versions = model_compressor(spec, gradient.numel()), itertools.count()
    return lambda: compressor.compress([gradient.view(1, -1)], 32, version=next(versions))[0]


def on_gpu(task: Callable[[], object]) -> float:
    """Run a task and return the seconds that it takes on the GPU."""
    started, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    started.record()
    task()
    ended.record()
    torch.cuda.synchronize()
    return started.elapsed_time(ended) / 1e3


def measure(gradient: torch.Tensor, residual: torch.Tensor, repeats: int) -> list[dict[str, object]]:
    """Time every kernel and its peers alternately; return a row for each kernel, as JSON objects."""
    from ..compressors.kernels import cuda

    elements = gradient.numel()
    keep, other = elements // TOP, torch.empty_like(gradient)

    def quantizer(format: CodeFormat) -> Callable[[], object]:
        data = torch.zeros(format.code_bytes(elements), dtype=torch.uint8, device=gradient.device)
        return lambda: cuda.quantize(format, gradient, residual, LEVELS[format], data)

    tasks: dict[str, tuple[Callable[[], object], float]] = {
        f"{format.value} with feedback": (quantizer(format), 12 + format.bits / 8) for format in LEVELS
    }
    tasks["top 1 %"] = (lambda: cuda.select(gradient, keep), 8 + 4 / TOP)
    tasks["add and top 1 %"] = (lambda: cuda.add_and_select(gradient, residual, keep), 12 + 4 / TOP)
    tasks["median"] = (lambda: cuda.median(gradient), 4)
    tasks["copy to the host"] = (gradient.cpu, 8)
    for spec in WHOLE:
        tasks[f"{spec}, to the host"] = (caller(spec, gradient), 16)
    peers: list[Callable[[], object]] = [
        lambda: other.copy_(gradient),
        lambda: torch.topk(gradient.abs(), keep),
    ]
    copy_s, topk_s, *taken = interleaved([*peers, *(task for task, _ in tasks.values())], repeats, on_gpu)
    bandwidth = COPY_BYTES * elements / copy_s
    return [
        {
            "name": name,
            "device": torch.cuda.get_device_name(),
            "elements": elements,
            "seconds": seconds,
            "bytes_moved": moved * elements,
            "ratio_to_copy": moved * elements / seconds / bandwidth,
            "ratio_to_topk": topk_s / seconds,
        }
        for (name, (_, moved)), seconds in zip(tasks.items(), taken, strict=True)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--elements", at_least_one, 25_000_000, "N", "number of elements of the tensor on a GPU")
    option(parser, "--repeats", at_least_one, 20, "N", "interleaved repetitions; their median counts")
    json_option(parser)


def run(given: argparse.Namespace) -> None:
    """Check the kernels and, if there is a GPU, time them."""
    if find_spec("triton") is None:
        raise BenchError("triton is not installed; run pip install '.[cuda]' in a checkout of Gradwire")
    there = torch.cuda.is_available()
    if not there:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    rng = np.random.default_rng(0)
    elements = given.elements if there else CHECKED_ELEMENTS
    gradient, residual = (rng.standard_normal((2, elements)) * 0.02).astype(np.float32)
    device = torch.device("cuda" if there else "cpu")
    check(gradient, residual, device)
    where = torch.cuda.get_device_name() if there else "Triton's interpreter; there is no GPU"
    print(f"{elements:,} elements: every kernel gives the reference's bits ({where})")
    rows: list[dict[str, object]] = []
    if there:
        rows = measure(
            torch.from_numpy(gradient).to(device), torch.from_numpy(residual).to(device), given.repeats
        )
        for row in rows:
            print(
                f"{row['name']:<28}{row['seconds']:.2e} s, {row['ratio_to_copy']:.2f} of a copy, "
                f"{row['ratio_to_topk']:.1f} x torch.topk"
            )
    else:
        print("nothing was timed")
    output.write_json(given.json, rows)
