"""Table 1 of the paper on accuracy-aware sparse fusion: seconds of an iteration, six methods, four models.
MG-WFBP, which merges by time alone, is not in the paper's table.

The paper: four nodes with a GPU each, Horovod over Ethernet at 10 Gbit/s, CIFAR-10, batches of 128, 64 for
ResNet-20; mean of 1000 iterations. It gives neither the size of MGS's messages nor the share of communication
in an iteration.

All four sparse methods choose equally many elements. Their densities, from 0.001 to 0.02, rise with the norms
of the initial weights. Rand-K over the whole model after backward is here one unit of all tensors, which is
complete when backward is. MGS closes a message once it has about an eighth of the bytes that a step sends.
Deviations: `randk` draws one element in each of k equal ranges, where the paper's Rand-K draws any k, and
keeps the rest as a residual, which the paper does not mention. Tensors of one dimension (biases,
normalization) are sent whole and have no density.

ResNet-110 and VGG-16 are simulated (`planning/step`), with a machine for each process and `randk:ratio=95`
in place of densities by norms, so that Q2 forbids nothing; their rows say so. The other models are run by
daemons.

The sparse error of a method is the sum over its units of (1 - k/d) times the square norm of the sparse
tensors' gradients, as a fraction of that norm. Gradients count as large as the initial weights; none is
measured. The units are those that the planner makes for the computation and links of the run. The planner
also needs the cost of a message, which only the run has measured. We therefore try many costs, and take the
one at which the number of units is closest to the number of parts of the run.

The server makes plans by measurement after the first steps and after 50, for SEAMGS once the norms of the
window after that are known. Where steps are short, the measurement begins after the second plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gradwire.benchmarks import Setup
from gradwire.compressors import parse_compressor
from gradwire.planning import (
    FRAMING,
    NORM_VERSIONS,
    Costs,
    JobProfile,
    Layer,
    Link,
    StepOptions,
    joined,
    layers_of,
    parse_fusion,
    predict,
    tensors,
)

from .emulated import (
    MBIT,
    WORKERS,
    Method,
    MethodRow,
    StepTimings,
    computation,
    exchange_seconds,
    measure,
    of_methods,
    speedups,
)
from .result import Conditions, Result

TABLE_1: Mapping[str, Mapping[str, float]] = {
    "vgg16-cifar": {"P-SGD": 0.525, "Rand K": 0.301, "LAGS": 0.402, "MGS": 0.375, "SEAMGS": 0.276},
    "resnet20": {"P-SGD": 0.084, "Rand K": 0.070, "LAGS": 0.075, "MGS": 0.069, "SEAMGS": 0.060},
    "resnet56": {"P-SGD": 0.199, "Rand K": 0.158, "LAGS": 0.179, "MGS": 0.173, "SEAMGS": 0.131},
    "resnet110": {"P-SGD": 0.344, "Rand K": 0.264, "LAGS": 0.299, "MGS": 0.268, "SEAMGS": 0.210},
}
SPARSE = "randk:density=norm"
RATIO = 95  # elements for each that is sent, about, at the middle of the densities
VALUE_BYTES = 2
MESSAGES = 8  # number of messages in a step of MGS
WHOLE = 1 << 40  # bytes of a message that no model exceeds
SHORT_S = 1.0  # a step of fewer seconds is short
UNLIMITED = 1e6  # Mbit/s
SECOND_PLAN = 50  # steps before the server's second plan
SIMULATED = ("resnet110", "vgg16-cifar")


def methods(model: str, elements: int) -> list[Method]:
    """Return the methods, with the paper's speed-ups if the paper has the model."""
    paper = speedups(TABLE_1[model]) if model in TABLE_1 else {}
    message = max(1, elements // RATIO * VALUE_BYTES // MESSAGES)

    def method(name: str, compressor: str, fusion: str) -> Method:
        theirs = (paper[name],) if name in paper else ()
        return Method(name=name, paper=theirs, compressor=compressor, overlap="backward", fusion=fusion)

    return [
        method("P-SGD", "none", "none"),
        method("Rand K", SPARSE, f"mgs={WHOLE}"),
        method("LAGS", SPARSE, "none"),
        method("MGS", SPARSE, f"mgs={message}"),
        method("MG-WFBP", SPARSE, "mgwfbp"),
        method("SEAMGS", SPARSE, "seamgs"),
    ]


def part_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of a part that cuts no tensor, for tensors of these numbers of elements. The first
    parts then also measure the link."""
    return 4 * max(sizes)


def layers_at(model: str, seconds: float) -> list[Layer]:
    """Return the layers of a model as the planner takes them: times, sent bytes, densities and norms.

    Args:
        model: name of a layer table.
        seconds: computation of a step, which is divided among the layers by their multiplications: a third
            for forward, two thirds for backward.
    """
    found = tensors(model)
    densities, work = densities_of(model), sum(tensor.multiplications for tensor in found)
    shares = [tensor.multiplications / work for tensor in found]
    return layers_of(
        [tensor.elements for tensor in found],
        densities,
        sent_bytes=[
            VALUE_BYTES * tensor.elements * density for tensor, density in zip(found, densities, strict=True)
        ],
        forward_s=[seconds * share / 3 for share in shares],
        backward_s=[seconds * share * 2 / 3 for share in shares],
        square_norms=[tensor.square_norm for tensor in found],
    )


def densities_of(model: str) -> list[float]:
    """Return the density of each tensor with `SPARSE`, from the norms of the model's initial weights: the
    fraction of its elements that is sent. Tensors of one dimension have 1."""
    found = tensors(model)
    sparse = [place for place, tensor in enumerate(found) if len(tensor.shape) > 1]
    by_norm = parse_compressor(SPARSE).options.densities(
        [math.sqrt(found[place].square_norm) for place in sparse]
    )
    assert by_norm is not None
    densities = [1.0] * len(found)
    for place, density in zip(sparse, by_norm, strict=True):
        densities[place] = density
    return densities


def link_of(setup: Setup) -> Link:
    """Return the times of the link to the server while all workers send, as the planner takes them."""
    byte_s = setup.workers * FRAMING * 8 / (1e6 * setup.mbit) if setup.mbit else 0.0
    return Link(start_s=setup.workers * Costs().part_s, byte_s=byte_s)


def sparse_error(setup: Setup, method: Method, parts: int) -> float:
    """Return the sparse error of a method, as the head of this file defines it.

    parts: number of parts of the run's plan; the error is that of a plan with about as many units.
    """
    if method.compressor == "none":
        return 0.0
    layers, link, fusion = layers_at(setup.model, setup.seconds), link_of(setup), parse_fusion(method.fusion)
    links = [replace(link, start_s=link.start_s * 2 ** (power / 4)) for power in range(-24, 41)]
    plans = [fusion.groups(layers, each) for each in links]
    groups = min(plans, key=lambda each: abs(len(each) - parts))
    units = [joined(layers[group.first : group.last]) for group in groups]
    lost = sum((1 - unit.density) * unit.square_norm for unit in units)
    return lost / sum(unit.square_norm for unit in units)


def simulated(setup: Setup, method: Method) -> StepTimings:
    """Return the simulated step of a method, with `ratio=RATIO` in place of densities by norms."""
    found = tensors(setup.model)
    work = sum(tensor.multiplications for tensor in found)
    shares = [setup.seconds * tensor.multiplications / work for tensor in found]
    bandwidth = (setup.mbit or UNLIMITED) * 1e6 / 8
    profile = JobProfile(
        shapes=[tensor.shape for tensor in found],
        forward_s=[each / 3 for each in shares],
        backward_s=[each * 2 / 3 for each in shares],
        worker_bandwidth=bandwidth,
        server_bandwidth=bandwidth,
        workers=setup.workers,
    )
    compressor = f"randk:ratio={RATIO}" if method.compressor == SPARSE else method.compressor
    chosen = StepOptions(
        compressor=parse_compressor(compressor).compression(),
        overlap=method.overlap,
        fusion=method.fusion,
        part_bytes=setup.part_bytes,
        entropy="off",
    )
    step = predict(profile, chosen)
    return StepTimings(
        step_seconds=step.step_s,
        computing_seconds=setup.seconds,
        bytes_in=step.up_bytes,
        parts=step.parts,
    )


def rows_of(setup: Setup, shares: Sequence[float]) -> Iterator[tuple[list[MethodRow], list[Method]]]:
    """Measure or simulate all methods on one model, and yield rows and methods for each share."""
    sizes = [tensor.elements for tensor in tensors(setup.model)]
    found, by_daemons = methods(setup.model, sum(sizes)), setup.model not in SIMULATED
    setup = replace(setup, part_bytes=part_bytes(sizes))
    if by_daemons:
        exchange = exchange_seconds(setup, found[0])
    else:
        exchange = simulated(setup, replace(found[0], overlap="off")).step_seconds
    for share in shares:
        step_seconds = exchange + computation(exchange, share)
        fitted = replace(setup, seconds=computation(exchange, share))
        if step_seconds < SHORT_S:
            fitted = replace(fitted, warm_up=setup.warm_up + SECOND_PLAN + NORM_VERSIONS)
        rows = measure(fitted, share, found) if by_daemons else measure(fitted, share, found, simulated)
        model = setup.model if by_daemons else f"{setup.model} (simulated)"
        yield (
            [
                replace(row, model=model, sparse_error=sparse_error(fitted, method, row.parts))
                for row, method in zip(rows, found, strict=True)
            ],
            found,
        )


def measured(
    conditions: Conditions,
    *,
    models: Sequence[str],
    shares: Sequence[float],
    steps: int,
    workers: int = WORKERS,
    mbit: float = MBIT,
) -> Result:
    """Repeat table 1 of the paper. Arguments as for `of_methods`."""
    return of_methods(models, lambda setup: rows_of(setup, shares), steps=steps, workers=workers, mbit=mbit)
