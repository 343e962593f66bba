"""Scripts at the end of their jobs: `script_ends LOOP`, options of gradwire.connect, and a second address."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from script_loops import data, network, sgd
from torch import nn
from torch.nn.functional import mse_loss, softplus
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import ConcatDataset

import gradwire
import gradwire.proto.service as gradwire_service

Step = Callable[[Any], None]


def say(message: str, **more: Any) -> None:
    print(json.dumps({"message": message, **more}), file=sys.stderr, flush=True)


def begun(server: str, **options: Any) -> tuple[gradwire.Job, Any, Step]:
    """Connect to a server. Return the job, its batches, and a function that takes a step on one batch."""
    job = gradwire.connect(server=server, compressor="none", **options)
    model = network()
    model, optimizer = job.attach(model, sgd(model))

    def step(batch: Any) -> None:
        inputs, targets = batch
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return job, job.batches(data()), step


def nested(a: str, b: str, **options: Any) -> None:
    """Two jobs, whose epochs follow each other."""
    (job_a, batches_a, step_a), (job_b, batches_b, step_b) = begun(a, **options), begun(b, **options)
    for _, _ in zip(job_a.epochs(), job_b.epochs(), strict=False):
        for batch in batches_a:
            step_a(batch)
        for batch in batches_b:
            step_b(batch)
        for job in (job_a, job_b):
            if job.evaluating:
                job.log(loss=0.5)
    say("ended", versions=[job_a.version, job_b.version])


def zipped(a: str, b: str, **options: Any) -> None:
    """Two jobs that are stepped in turn."""
    (job_a, batches_a, step_a), (job_b, batches_b, step_b) = begun(a, **options), begun(b, **options)
    for _, _ in zip(job_a.epochs(), job_b.epochs(), strict=False):
        for first, second in zip(batches_a, batches_b, strict=False):
            step_a(first)
            step_b(second)
        for job in (job_a, job_b):
            if job.evaluating:
                job.log(loss=0.5)
    say("ended", versions=[job_a.version, job_b.version])


def without_epochs(server: str, **options: Any) -> None:
    job, batches, step = begun(server, **options)
    for _ in range(job.total_epochs):
        for batch in batches:
            step(batch)
    say("ended", versions=[job.version])


def slow(server: str, **options: Any) -> None:
    """It gives a test time to interrupt it."""
    job, batches, step = begun(server, **options)
    with job:
        for _ in job.epochs():
            for batch in batches:
                step(batch)
                say("stepped")
                time.sleep(0.1)
    say("ended", done=job.done, progress=job.progress)


def other_data(server: str, **options: Any) -> None:
    with gradwire.connect(server=server, **options) as job:
        model = network()
        job.attach(model, sgd(model))
        next(iter(job.batches(ConcatDataset([data(), data()]))))


def other_release(server: str, **options: Any) -> None:
    service: Any = gradwire_service
    path = service._path

    def older(method: Any) -> str:
        return str(path(method)).replace(".", "_1.", 1)

    service._path = older
    slow(server, **options)


def catching(server: str, **options: Any) -> None:
    try:
        begun(server, **options)
    except gradwire.JobFinished as error:
        say(f"caught: {error}")


def early(server: str, **options: Any) -> None:
    """The rank that evaluates ends the job after its second epoch."""
    job, batches, step = begun(server, **options)
    epochs: list[int] = []
    with job:
        for epoch in job.epochs():
            epochs.append(epoch)
            for batch in batches:
                step(batch)
            if job.evaluating:
                job.log(accuracy=0.5)
                if epoch >= 1:
                    job.stop("good enough")
    say("ended", epochs=epochs, done=job.done, version=job.version)


def plateau(server: str, steps: Any = "server", **options: Any) -> None:
    """The rate is annealed by an evaluation that improves twice and then no more."""
    job = gradwire.connect(server=server, compressor="none", **options)
    model = network()
    rates: list[list[float]] = []
    seen: list[float] = []
    with job:
        model, optimizer = job.attach(model, sgd(model), steps=steps)
        job.follow(ReduceLROnPlateau(optimizer, factor=0.5, patience=0), metric="valid")
        for epoch in job.epochs():
            rates.append([])
            for inputs, targets in job.batches(data()):
                optimizer.zero_grad()
                mse_loss(model(inputs), targets).backward()
                rates[-1].append(optimizer.param_groups[0]["lr"])
                optimizer.step()
            seen.append(job.evaluation.get("valid", -1.0))
            if job.evaluating:
                job.log(valid=[0.9, 0.8, 0.85, 0.95][epoch])
    say("ended", rates=rates, seen=seen)


def adversaries() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    generator = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
    return generator, nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))


def adversarial_loss(of: nn.ModuleDict, inputs: torch.Tensor, turn_of_d: bool) -> torch.Tensor:
    """The loss of the discriminator or of the generator."""
    made = of["d"](of["g"](inputs.flip(1)))
    return (softplus(-of["d"](inputs)) + softplus(made)).mean() if turn_of_d else softplus(-made).mean()


def gan(server: str, **options: Any) -> None:
    """Two models in one job, stepped in turn."""
    generator, discriminator = adversaries()
    both: Any = nn.ModuleDict({"g": generator, "d": discriminator})
    groups = [{"params": generator.parameters()}, {"params": discriminator.parameters()}]
    with gradwire.connect(server=server, compressor="none", **options) as job:
        both, optimizer = job.attach(both, torch.optim.Adam(groups, lr=0.01))
        for _ in job.epochs():
            for number, (inputs, _) in enumerate(job.batches(data())):
                turn_of_d = number % 2 == 0
                discriminator.requires_grad_(turn_of_d)
                generator.requires_grad_(not turn_of_d)
                optimizer.zero_grad()
                adversarial_loss(both, inputs, turn_of_d).backward()
                optimizer.step()
    values = torch.cat([parameter.detach().reshape(-1) for parameter in both.parameters()])
    say("ended", parameters=values.tolist())


def unequal(server: str, **options: Any) -> None:
    """One rank alone changes its rate."""
    job = gradwire.connect(server=server, compressor="none", **options)
    model = network()
    with job:
        model, optimizer = job.attach(model, sgd(model), steps="local")
        for _ in job.epochs():
            for inputs, targets in job.batches(data()):
                optimizer.zero_grad()
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
            if job.evaluating:
                optimizer.param_groups[0]["lr"] = 0.05


def best(server: str, **options: Any) -> None:
    """Each evaluator says which values it knows of; the first one leaves after two epochs."""
    job, batches, step = begun(server, **options)
    known: list[dict[str, float]] = []
    with job:
        for epoch in job.epochs():
            for batch in batches:
                step(batch)
            if job.evaluating:
                known.append(dict(job.best))
                job.log(accuracy=[0.5, 0.7, 0.6, 0.65][epoch], loss=[0.5, 0.3, 0.4, 0.2][epoch])
                if epoch == 1:
                    break
    say("ended", known=known)


LOOPS: dict[str, Callable[..., None]] = {
    "nested": nested,
    "zipped": zipped,
    "without_epochs": without_epochs,
    "slow": slow,
    "other_data": other_data,
    "other_release": other_release,
    "catching": catching,
    "early": early,
    "plateau": plateau,
    "best": best,
    "unequal": unequal,
    "gan": gan,
}


def main(name: str, *given: str) -> int:
    torch.set_num_threads(1)
    options: dict[str, str] = {}
    servers: list[str] = []
    rest = list(given)
    while rest:
        each = rest.pop(0)
        if each.startswith("--"):
            options[each[2:].replace("-", "_")] = rest.pop(0)
        else:
            servers.append(each)
    LOOPS[name](options.pop("server"), *servers, **options)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
