"""Tables 3.5 and 4.5 of the thesis: the share of compressing in an iteration, on VGG's and ResNets' shapes.

The thesis: four nodes with a GPU each, CIFAR-10, batches of 128. It does not say at which ratio these tables
were made. In table 4.5 the time includes computing, T_calculate + T_compress, and an iteration of k-RNGC with
a delay of 3 is three batches. Erratum: table 3.5 has every compressor slower than the baseline.

Compressing is the whole call of a worker, in one thread, on noise, as if each worker had a core for it. The
step is one of real daemons on shaped links with emulated computation, and nothing overlaps; four workers that
share two cores make it longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.benchmarks import Setup, check_network, interleaved
from gradwire.compressors import LayerRule, ModelCompressor, TensorSpec, set_threads
from gradwire.planning import tensors

from .emulated import MBIT, WORKERS, Method, computation, exchange_seconds, record, split
from .result import Conditions, Result

# By model and compressor: compressing as a fraction of the iteration, and the iteration's time relative to
# that of the baseline.
TABLE_3_5: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "vgg16-cifar": {
        **{"GCAC": (0.4209, 828.70 / 640.99), "L1": (0.4192, 828.17 / 640.99)},
        **{"Top-K": (0.4853, 862.27 / 640.99), "DGC": (0.6591, 1375.42 / 640.99)},
    },
    "resnet56": {
        **{"GCAC": (0.6906, 333.28 / 157.33), "L1": (0.6861, 335.80 / 157.33)},
        **{"Top-K": (0.7019, 395.59 / 157.33), "DGC": (0.8246, 557.86 / 157.33)},
    },
    "resnet110": {
        **{"GCAC": (0.6073, 629.85 / 289.08), "L1": (0.6490, 612.90 / 289.08)},
        **{"Top-K": (0.7562, 653.27 / 289.08), "DGC": (0.8120, 1067.71 / 289.08)},
    },
}
TABLE_4_5: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "vgg16-cifar": {
        "k-RNGC, delay 1": (0.3003, 916.11 / 640.99),
        "k-RNGC, delay 3": (0.5383, 1188.43 / 640.99),
        "k-RNGC, delay 5": (0.7139, 2183.81 / 640.99),
    },
    "resnet56": {
        "k-RNGC, delay 1": (0.2917, 227.93 / 157.33),
        "k-RNGC, delay 3": (0.5503, 430.04 / 157.33),
        "k-RNGC, delay 5": (0.7503, 714.49 / 157.33),
    },
    "resnet110": {
        "k-RNGC, delay 1": (0.2859, 301.40 / 289.08),
        "k-RNGC, delay 3": (0.5192, 797.08 / 289.08),
        "k-RNGC, delay 5": (0.7359, 1204.74 / 289.08),
    },
}
RATIO = 100
REPEATS = 5
DELAYS = (1, 3, 5)  # batches in an iteration of k-RNGC
BASELINE = Method(name="baseline")


@dataclass(frozen=True, kw_only=True)
class CompressingRow:
    """A row of the table: a compressor on a model's shapes. An iteration has as many batches as the delay.

    Attributes:
        model: name of the model.
        name: the thesis's name of the compressor.
        compressor: our spec of it.
        compressing_seconds: seconds of compressing a batch's gradient.
        step_seconds: seconds of a batch.
        of_baseline: time of an iteration relative to that of the uncompressed run.
        paper_share: compressing as a fraction of the iteration in the thesis; None if it has none.
        paper_of_baseline: `of_baseline` in the thesis; None if it has none.
    """

    model: str
    name: str
    compressor: str
    compressing_seconds: float
    step_seconds: float
    of_baseline: float
    paper_share: float | None
    paper_of_baseline: float | None

    @property
    def share(self) -> float:
        """Compressing as a fraction of the iteration, 0 to 1."""
        return self.compressing_seconds / self.step_seconds


HEADINGS = (
    *("model", "", "compressor", "ms compressing", "ms per batch"),
    *("share", "thesis's", "iteration, of baseline's", "thesis's"),
)


def cells(row: CompressingRow) -> list[str]:
    """Return the cells of a row of the table, in the order of `HEADINGS`."""
    return [
        *(row.model, row.name, f"`{row.compressor}`", f"{row.compressing_seconds * 1e3:.1f}"),
        *(f"{row.step_seconds * 1e3:.0f}", f"{row.share:.3f}"),
        "–" if row.paper_share is None else f"{row.paper_share:.3f}",
        f"{row.of_baseline:.2f}",
        "–" if row.paper_of_baseline is None else f"{row.paper_of_baseline:.2f}",
    ]


def compressors(ratio: int) -> dict[str, tuple[str, int]]:
    """Return the spec of each of our compressors, without warm-up, and its delay in batches, by the thesis's
    name for it."""
    plain = {"GCAC": "gcac", "L1": "l1", "Top-K": "topk", "DGC": "dgc"}
    fixed = {"GCAC": "", "L1": "", "Top-K": "", "DGC": ",warmup=0"}
    found = {name: (f"{each}:ratio={ratio}{fixed[name]}", 1) for name, each in plain.items()}
    for delay in DELAYS:
        found[f"k-RNGC, delay {delay}"] = f"krngc:ratio={ratio},warmup=0,delay={delay}", delay
    return found


class Compressing:
    """A worker's compression of noise with a model's shapes. Each call compresses one step."""

    def __init__(self, setup: Setup, compressor: str) -> None:
        generator = torch.Generator().manual_seed(1)
        found = tensors(setup.model)
        specs = [
            TensorSpec(name=each.name, shape=each.shape, flops=2.0 * each.multiplications) for each in found
        ]
        self._gradients = [torch.randn(each.shape, generator=generator) * 1e-2 for each in found]
        plan = setup.plan(compressor)
        self._compressor = ModelCompressor(specs, compressor, LayerRule(), seed=0, rank=0, plan=plan)
        self._step = 0

    def __call__(self) -> None:
        self._step += 1
        self._compressor.compress(self._gradients, 32, version=self._step, step=self._step, workers=4)


def compressing_seconds(setup: Setup, compressors: Mapping[str, tuple[str, int]]) -> dict[str, float]:
    """Time each compressor (spec and delay) in turn, in one thread; return the seconds per batch by name."""
    set_threads(1)
    torch.set_num_threads(1)

    def call(compressor: str, delay: int) -> Callable[[], None]:
        """Return a function that compresses `delay` batches: a delayed compressor selects in one of them."""
        step = Compressing(setup, compressor)

        def several() -> None:
            for _ in range(delay):
                step()

        return several

    taken = interleaved([call(*each) for each in compressors.values()], REPEATS)
    return {
        name: seconds / delay for (name, (_, delay)), seconds in zip(compressors.items(), taken, strict=True)
    }


def rows_of(setup: Setup, share: float, ratio: int) -> Iterator[CompressingRow]:
    """Measure each compressor on one model, and yield a row for each."""
    found = compressors(ratio)
    compressing = compressing_seconds(setup, found)
    exchange = exchange_seconds(setup, BASELINE)
    setup = replace(setup, seconds=computation(exchange, share))
    baseline = record(setup, BASELINE).step_seconds
    paper = {**TABLE_3_5.get(setup.model, {}), **TABLE_4_5.get(setup.model, {})}
    for name, (compressor, delay) in found.items():
        steps = -(-setup.steps // delay) * delay
        recorded = record(replace(setup, steps=steps), Method(name=name, compressor=compressor))
        step_seconds, _ = split(recorded, setup.warm_up, setup.warm_up + steps)
        theirs = paper.get(name, (None, None))
        yield CompressingRow(
            model=setup.model,
            name=name,
            compressor=compressor,
            compressing_seconds=compressing[name],
            step_seconds=step_seconds,
            of_baseline=delay * step_seconds / baseline,
            paper_share=theirs[0],
            paper_of_baseline=theirs[1],
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
    """Repeat tables 3.5 and 4.5 of the thesis. Arguments as for `of_methods`."""
    check_network()
    found = [
        row
        for model in models
        for share in shares
        for row in rows_of(Setup(model=model, workers=workers, mbit=mbit, steps=steps), share, RATIO)
    ]
    return Result(
        settings=f"ratio {RATIO}, {workers} workers, {mbit:g} Mbit/s, {steps} steps, emulated computation",
        ours=", ".join(f"{row.model} {row.name} {100 * row.share:.0f} %" for row in found),
        headings=HEADINGS,
        rows=[cells(row) for row in found],
    )
