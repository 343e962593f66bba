"""`gc-bench errors`: the error of compressors on real gradients, and on the changes that local steps make.

One worker trains a task, uncompressed, so that all compressors see the same values. Two kinds of values are
compressed: the gradient of every step of SGD, and the change that `--steps` local steps of an optimizer make,
as `--mode local` sends it. Two errors are measured, both relative to the Euclidean norm of the whole model's
values, and averaged over the second half of the messages and over the seeds:

- alone: of a message without a residual, |x - decode(compress(x))| / |x|;
- kept: the residual that error feedback still keeps after the message, |sum of x - sum of decoded| / |x|.
  With decay, values that are forgotten count as kept.

A residual that is several times as large as the values is late by about that number of messages.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..common.parts import divide
from ..common.spec import parse_spec
from ..compressors import LayerRule, ModelCompressor, decode, parse_compressor, wire_bytes
from ..optim.combined import MuonWithAdamW
from ..optim.matrices import declared
from ..optim.optimizer import Optimizer, parse_optimizer
from ..optim.steps import Muon
from ..worker.session.replica import Replica
from ..worker.tasks import load
from . import output
from .arguments import amount, at_least_one, json_option, option
from .estimates import seed_list
from .simulation import BATCH, LEARNING_RATE

Values = list[torch.Tensor]
_OF_FEEDBACK = ("decay", "momentum", "masking")  # options that need feedback
SPECS = ("1bit", "1bit:block=32768", "1bit:block=4096", "1bit:block=512", "1bit:block=64", "4bit", "8bit")


def messages(
    task_spec: str, optimizer: str, learning_rate: float, steps: int, count: int, seed: int
) -> tuple[Replica, Iterator[Values]]:
    """Return the model of a worker, and an iterator that trains it and yields the values of each message.

    Args:
        task_spec: spec of the task.
        optimizer: spec of the optimizer.
        learning_rate: learning rate of all steps.
        steps: number of local steps per message, whose change is yielded; 0 to yield each step's gradient.
        count: number of messages.
        seed: seed of the initial parameters and of the order of samples.
    """
    task = load(task_spec)
    torch.manual_seed(seed)
    network = task.model()
    replica = Replica(network, task.train_samples)
    parameters = list(replica.parameters)
    options = parse_optimizer(optimizer)
    stepper: Optimizer | MuonWithAdamW
    if isinstance(options, Muon):
        groups = declared(network, task.groups(network) if task.groups else (), options)
        stepper = MuonWithAdamW(network, groups, learning_rate)
    else:
        stepper = Optimizer(options, parameters, learning_rate)
    order = np.random.default_rng(seed)

    def batches() -> Iterator[npt.NDArray[np.int64]]:
        while True:
            samples = order.permutation(task.train_samples)
            yield from samples[: samples.size // BATCH * BATCH].reshape(-1, BATCH)

    def train() -> Iterator[Values]:
        network.train()
        given = batches()
        for _ in range(count):
            before = [parameter.detach().clone() for parameter in parameters]
            gradients = Values()
            for _ in range(steps or 1):
                gradients = list(torch.autograd.grad(task.loss(network, task.batch(next(given))), parameters))
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                stepper.step()
            pairs = zip(before, parameters, strict=True)
            yield [old - new.detach() for old, new in pairs] if steps else gradients

    return replica, train()


class _Subject:
    """One compressor without feedback, and with it.

    Attributes:
        alone, kept: errors of each message so far, relative to the norm of its values.
        sent: bytes of all messages.
    """

    def __init__(self, spec: str, replica: Replica) -> None:
        specs = replica.manifest.specs
        elements = [each.elements for each in specs]
        plan = divide(elements, 4 * sum(elements))  # in one part: parts do not affect the bits
        make = partial(ModelCompressor, specs, rule=LayerRule(), seed=0, rank=0, plan=plan)
        named = parse_spec("compressor", spec)
        own = {key: value for key, value in named.options.items() if key not in _OF_FEEDBACK}
        without = str(replace(named, options={**own, "feedback": "off"}))
        self._without = make(spec if parse_compressor(spec).lossless else without)
        self._with = make(spec)
        self._owed = np.zeros(sum(elements))
        self.alone: list[float] = []
        self.kept: list[float] = []
        self.sent = 0

    def take(self, values: Values, version: int) -> None:
        flat = np.concatenate([each.reshape(-1).double().numpy() for each in values])
        norm = float(np.linalg.norm(flat)) or math.inf
        alone = self._without.compress(values, BATCH, version=version)
        self.alone.append(float(np.linalg.norm(flat - np.concatenate([*map(decode, alone)]))) / norm)
        payloads = self._with.compress(values, BATCH, version=version)
        self._owed += flat - np.concatenate([*map(decode, payloads)])
        self.kept.append(float(np.linalg.norm(self._owed)) / norm)
        self.sent += sum(map(wire_bytes, payloads))


def measure(specs: Sequence[str], seeds: Sequence[int], trained: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each compressor, as a JSON object.

    Args:
        specs: specs of the compressors.
        seeds: seeds of the trainings.
        trained: arguments of `messages` other than the seed.
    """
    found: dict[str, list[_Subject]] = {spec: [] for spec in specs}
    raw = 0
    for seed in seeds:
        replica, given = messages(**trained, seed=seed)
        subjects = [_Subject(spec, replica) for spec in specs]
        for version, values in enumerate(given):
            for subject in subjects:
                subject.take(values, version)
            raw += replica.manifest.raw_bytes
        for spec, subject in zip(specs, subjects, strict=True):
            found[spec].append(subject)
    half = trained["count"] // 2
    return [
        {
            "name": spec,
            "ratio": raw / sum(subject.sent for subject in subjects),
            "alone": fmean(fmean(subject.alone[half:]) for subject in subjects),
            "kept": fmean(fmean(subject.kept[half:]) for subject in subjects),
        }
        for spec, subjects in found.items()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--task", str, "digits:model=cnn", "SPEC", "task to train")
    parser.add_argument(
        "--compressors", nargs="+", default=list(SPECS), metavar="SPEC", help="compressors to measure"
    )
    option(parser, "--messages", at_least_one, 100, "N", "messages of each kind, half of which are measured")
    option(parser, "--steps", at_least_one, 8, "N", "local steps per message")
    option(parser, "--optimizer", str, "adamw", "SPEC", "optimizer of the local steps")
    option(parser, "--learning-rate", amount, 3e-3, "RATE", "learning rate of the local steps")
    option(parser, "--seeds", seed_list, "1,2,3", "N,...", "seeds of the trainings")
    json_option(parser)


def run(given: argparse.Namespace) -> None:
    """Measure every compressor on gradients and on changes, and print a table of both."""
    local = {"optimizer": given.optimizer, "learning_rate": given.learning_rate, "steps": given.steps}
    kinds = {
        "gradients": {"optimizer": "sgd", "learning_rate": LEARNING_RATE, "steps": 0},
        f"changes of {given.steps} local steps": local,
    }
    rows: list[dict[str, Any]] = []
    for kind, how in kinds.items():
        output.say(kind)
        trained = {"task_spec": given.task, "count": given.messages, **how}
        rows += [{"values": kind, **row} for row in measure(given.compressors, given.seeds, trained)]
    headings = "values", "compressor", "float32 bytes / bytes", "alone", "kept"
    cells = (
        (
            row["values"],
            f"`{row['name']}`",
            f"{row['ratio']:.1f}",
            f"{row['alone']:.3f}",
            f"{row['kept']:.2f}",
        )
        for row in rows
    )
    print(output.table(headings, cells))
    output.write_json(given.json, rows)
