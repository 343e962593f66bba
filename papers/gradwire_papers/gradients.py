"""Measurements of gradients (distribution, size by layer, thresholds, centroids), and the sizes of models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire import Task, load_task
from gradwire.benchmarks import interleaved, say
from gradwire.compressors import LayerRule, ModelCompressor, TensorSpec, decode, set_threads
from gradwire.planning import tensors

from .result import Conditions, Panel, Result

DIGITS = "digits:model=mlp"
LARGE = 0.4  # gradients above this are counted in the 4-bit paper
SUMMED = 32.0  # factor from PyTorch's mean gradient to MXNet's sum over a batch of 32
BINS = 60
STEPS_IN_EPOCH = 11
# Millions of parameters.
TABLES_1_1_AND_2_1 = {"vgg19": 143.0, "resnet50": 25.6}
TABLE_1 = {
    "first": ((0.04, 0.07, 0.1, 0.2, 0.3, 0.4, 0.6), "0.1 to 0.5"),
    "second": ((0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9), "above 0.5"),
    "third": ((0.01, 0.03, 0.05, 0.06, 0.07, 0.08, 0.09), "below 0.1"),
}


def gradients_of(task: Task, *, steps: int, batch: int, rate: float = 0.1) -> dict[str, torch.Tensor]:
    """Train with plain SGD in this process; return the gradients of the last step by name."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    network = task.model()
    named = [(name, each) for name, each in network.named_parameters() if each.requires_grad]
    draw = np.random.default_rng(1)
    found: Sequence[torch.Tensor] = ()
    for _ in range(steps):
        loss = task.loss(network, task.batch(draw.integers(task.train_samples, size=batch)))
        found = torch.autograd.grad(loss, [each for _, each in named])
        with torch.no_grad():
            for (_, parameter), gradient in zip(named, found, strict=True):
                parameter.sub_(gradient, alpha=rate)
    return {name: gradient for (name, _), gradient in zip(named, found, strict=True)}


def layers(conditions: Conditions, *, model: str, steps: int) -> Result:
    """Repeat figures 2 to 5 of the 4-bit paper: large gradients and mean gradient of each layer.

    Args:
        model: a network of the task cifar10.
        steps: number of training steps; the gradients of the last one are measured.
    """
    task = conditions.task(f"cifar10:model={model}", f"cifar10:synthetic=200,model={model}")
    found = gradients_of(load_task(task), steps=steps, batch=32)
    summed = {name: each * SUMMED for name, each in found.items() if each.dim() > 1}
    shares = [float((each.abs() > LARGE).double().mean()) for each in summed.values()]
    means = [float(each.abs().double().mean()) for each in summed.values()]
    rows = [
        (name, f"{100 * share:.2f} %", f"{mean:.4f}")
        for name, share, mean in zip(summed, shares, means, strict=True)
    ]
    names = list(summed)
    highest = names[shares.index(max(shares))]
    most = names[means.index(max(means))]
    numbers = list(range(1, len(summed) + 1))
    return Result(
        settings=f"`{task}`, step {steps}, a batch of 32, gradients × {SUMMED:g} as MXNet sums them",
        ours=f"most above {LARGE}: {100 * max(shares):.1f} % (`{highest}`), median layer "
        f"{100 * float(np.median(shares)):.1f} %; largest mean {max(means):.3f} (`{most}`), "
        f"median {float(np.median(means)):.3f}",
        headings=("layer", f"above {LARGE}", "mean magnitude"),
        rows=rows,
        panels=[
            Panel(title=f"Gradients above {LARGE}", x="layer", y="share", lines={model: (numbers, shares)}),
            Panel(title="Mean magnitude", x="layer", y="gradient", lines={model: (numbers, means)}),
        ],
    )


def distribution(conditions: Conditions) -> Result:
    """Repeat figures 3.1 and 3.3 of the thesis: gradients before and after selection, for two compressors."""
    found = gradients_of(load_task(DIGITS), steps=STEPS_IN_EPOCH, batch=128)
    name, gradient = max(found.items(), key=lambda each: each[1].numel())
    set_threads(1)
    spec = TensorSpec(name=name, shape=tuple(gradient.shape))
    lines: dict[str, np.ndarray] = {"before": gradient.flatten().numpy()}
    for compressor in ("topk:ratio=10", "gcac:ratio=10"):
        one = ModelCompressor([spec], compressor, LayerRule(), seed=0, rank=0)
        (payload,) = one.compress([gradient], 32, version=1, step=1, workers=1)
        lines[compressor] = decode(payload).reshape(-1)
    edges = np.histogram_bin_edges(lines["before"], BINS)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    rows: list[tuple[str, ...]] = []
    for label, values in lines.items():
        kept = values[values != 0]
        rows.append(
            (
                f"`{label}`",
                f"{len(kept)}",
                f"{np.median(kept):.5f}",
                f"{np.abs(kept).min():.5f}",
                f"{kept.max():.5f}",
            )
        )
    return Result(
        settings=f"`{DIGITS}`, layer `{name}` with {gradient.numel()} elements, step {STEPS_IN_EPOCH}",
        ours=f"10×: both keep {rows[1][1]} of {gradient.numel()}; least magnitude {rows[1][3]} (Top-K), "
        f"{rows[2][3]} (GCAC)",
        headings=("", "elements that are not 0", "median", "least magnitude", "largest"),
        rows=rows,
        panels=[
            Panel(
                title=label,
                x="gradient",
                y="elements",
                lines={label: (middles, np.histogram(values[values != 0], edges)[0].tolist())},
            )
            for label, values in lines.items()
        ],
    )


def thresholds(conditions: Conditions) -> Result:
    """Compare table 1 of the 4-bit paper with the values that `4bit:levels=groups` sends."""
    ours: dict[str, tuple[float, ...]] = {}
    for group, (theirs, _) in TABLE_1.items():
        ours[group] = values_sent(theirs)
    return Result(
        settings="the values that `4bit:levels=groups` sends",
        ours="equal" if all(ours[group] == theirs for group, (theirs, _) in TABLE_1.items()) else "not equal",
        headings=("group", "ours", "paper", "mean gradient"),
        rows=[
            (group, ", ".join(map(str, ours[group])), ", ".join(map(str, theirs)), means)
            for group, (theirs, means) in TABLE_1.items()
        ],
    )


def values_sent(thresholds: Sequence[float]) -> tuple[float, ...]:
    """Return the magnitudes above 0 that `4bit:levels=groups` sends, ascending, for one group of thresholds.

    The compressor chooses its group by the mean magnitude of a gradient. So it gets a made gradient whose
    mean magnitude is about the mean of `thresholds`, and whose largest element exceeds all of them.
    """
    middle = float(np.mean(thresholds))
    gradient = torch.cat([torch.linspace(0, 2 * middle, 10_001), torch.full((10_000,), middle)])
    gradient = torch.cat([gradient, torch.tensor([2.0 * max(thresholds)])])
    specs = [TensorSpec(name="layer", shape=(1, len(gradient)))]
    one = ModelCompressor(specs, "4bit:levels=groups,scale=sum", LayerRule(), seed=0, rank=0)
    (payload,) = one.compress([gradient.view(1, -1)], 1, version=1, step=1, workers=1)
    sent = np.unique(np.abs(decode(payload)))
    return tuple(round(float(each), 6) for each in sent if each)


def sizes(conditions: Conditions) -> Result:
    """Compare the parameters of tables 1.1 and 2.1 of the thesis with our layer tables."""
    found = {name: sum(each.elements for each in tensors(name)) / 1e6 for name in TABLES_1_1_AND_2_1}
    return Result(
        settings="the layer tables of `gc-plan`",
        ours=", ".join(f"{name} {millions:.1f} M" for name, millions in found.items()),
        headings=("model", "millions of parameters", "paper"),
        rows=[(name, f"{found[name]:.2f}", f"{theirs:g}") for name, theirs in TABLES_1_1_AND_2_1.items()],
    )


def exact_centroid(values: torch.Tensor) -> float:
    """Return the element with the least summed distance to all others, by comparing every pair."""
    columns: Sequence[torch.Tensor] = [
        values[start : start + 512, None] for start in range(0, len(values), 512)
    ]
    sums = torch.cat([(column - values).abs().sum(dim=1) for column in columns])
    return float(values[sums.argmin()])


def centroid(conditions: Conditions, *, elements: int) -> Result:
    """Repeat table 3.6 of the thesis: the time of the exact centroid and that of GCAC's selection."""
    torch.set_num_threads(1)
    set_threads(1)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(elements, generator=generator) * 1e-2
    one = ModelCompressor(
        [TensorSpec(name="layer", shape=(1, elements))], "gcac:ratio=100", LayerRule(), seed=0, rank=0
    )
    gradient = values.view(1, elements)
    number = 0

    def ours() -> None:
        nonlocal number
        number += 1
        one.compress([gradient], 32, version=number, step=number, workers=1)

    exact, fast = interleaved([lambda: exact_centroid(values), ours], 3)
    found, median = exact_centroid(values), float(values.sort().values[elements // 2])
    say(f"centroid: {exact * 1e3:.1f} ms by pairs, {fast * 1e3:.2f} ms by the median")
    return Result(
        settings=f"a layer of {elements} elements of noise, one thread",
        ours=f"{exact * 1e3:.1f} ms by pairs, {fast * 1e3:.2f} ms for all of `gcac`",
        headings=("", "ms", "centroid", "paper: ms of VGGNet-16"),
        rows=[
            ("every pair", f"{exact * 1e3:.2f}", f"{found:.6f}", "8342.78"),
            ("`gcac`, by the median, the whole call", f"{fast * 1e3:.2f}", f"{median:.6f}", "347.18"),
        ],
    )
