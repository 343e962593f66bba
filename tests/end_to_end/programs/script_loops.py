"""Scripts of users: `script_loops LOOP ...`, where the rest is options of gradwire.connect.

All train the same small model on the same data, each in a loop such as a person would write, and say in the
end which parameters they have.
"""

from __future__ import annotations

import copy
import io
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import gradwire
from gradwire.proto.refusal import Refused

SAMPLES = 96
LONG = 40  # epochs in which a killed worker has time to come back
Optimizer = torch.optim.Optimizer


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    here: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    inputs = torch.randn(SAMPLES, 12, **here)
    return TensorDataset(inputs, inputs @ torch.randn(12, 4, **here))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    """Two groups: biases do not decay, and have a rate of their own."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups: list[Any] = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def adagrad(model: nn.Module) -> Optimizer:
    """Two groups, of which one has a rate of its own."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups: list[Any] = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.05}]
    return torch.optim.Adagrad(groups, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1)


class Shifted(nn.Module):
    """The network, whose outputs 300 parameters shift."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.shifts = nn.ParameterList(torch.full((4,), 0.01 * number) for number in range(300))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = self.network(inputs) + torch.stack([*self.shifts]).mean(0)
        return shifted


def many_groups(model: nn.Module) -> Optimizer:
    """A group for each parameter, with a rate of its own."""
    groups = [{"params": [each], "lr": 0.01 + 1e-5 * n} for n, each in enumerate(model.parameters())]
    return torch.optim.AdamW(groups)


def warm_up(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


Loop = Callable[[gradwire.Job, nn.Module, Optimizer], None]
# Computes the gradients of a batch from the job, the attached model, inputs and targets.
Backward = Callable[[gradwire.Job, nn.Module, torch.Tensor, torch.Tensor], None]


def whole(job: gradwire.Job, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    loss = mse_loss(model(inputs), targets)
    job.log(loss=loss)
    loss.backward()


def halves(job: gradwire.Job, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Two backward passes, without telling anybody."""
    half = len(inputs) // 2
    (mse_loss(model(inputs[:half]), targets[:half]) / 2).backward()
    (mse_loss(model(inputs[half:]), targets[half:]) / 2).backward()


def told_halves(job: gradwire.Job, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    half = len(inputs) // 2
    with job.no_sync():
        (mse_loss(model(inputs[:half]), targets[:half]) / 2).backward()
    (mse_loss(model(inputs[half:]), targets[half:]) / 2).backward()


def by_hand(job: gradwire.Job, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Half of the loss, and gradients that are doubled by hand, past autograd's counters."""
    (mse_loss(model(inputs), targets) / 2).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(2)


def loop(backward: Backward = whole, *, to_none: bool = True, warm: bool = False, **attach: Any) -> Loop:
    """Return the usual loop. `warm` adds a schedule of its own; `attach` are options of `job.attach`."""

    def run(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
        model, step = job.attach(model, optimizer, **attach)
        schedule = warm_up(step) if warm else None
        for _ in job.epochs():
            for inputs, targets in job.batches(data()):
                backward(job, model, inputs, targets)
                step.step()
                step.zero_grad(set_to_none=to_none)
                if schedule is not None:
                    schedule.step()

    return run


trained = loop()


def swapped(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Evaluates averages in place of the parameters after some steps, copies and saves the model there, and
    converts it to float16 and back after each."""
    model, step = job.attach(model, optimizer)
    average = AveragedModel(model)
    for _ in job.epochs():
        for number, (inputs, targets) in enumerate(job.batches(data())):
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            step.step()
            step.zero_grad()
            average.update_parameters(model)
            if number % 2:
                kept = [each.data for each in model.parameters()]
                for each, other in zip(model.parameters(), average.parameters(), strict=True):
                    each.data = other.data
                with torch.no_grad():
                    job.log(average=mse_loss(model(inputs), targets))
                for each, value in zip(model.parameters(), kept, strict=True):
                    each.data = value.clone()
                torch.save(copy.deepcopy(model), io.BytesIO())
                torch.save(model, io.BytesIO())
            model.half().float()


def cosine(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """A schedule over all epochs of two workers, that follows the job."""
    model, step = job.attach(model, optimizer)
    schedule = job.follow(torch.optim.lr_scheduler.CosineAnnealingLR(step, LONG * SAMPLES // 16))
    say(f"comes at version {job.version}")
    for _ in job.epochs():
        for inputs, targets in job.batches(data()):
            mse_loss(model(inputs), targets).backward()
            step.step()
            step.zero_grad()
            schedule.step()
            say(f"version {job.version}, rate {schedule.get_last_lr()[0]!r}")


def closures(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Computes gradients as often as the optimizer wants them."""
    model, step = job.attach(model, optimizer, steps="local")

    def evaluate(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        step.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in job.epochs():
        for inputs, targets in job.batches(data()):
            say(f"loss {step.step(partial(evaluate, inputs, targets)).item():.6f}")


def rounds(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Says at which version each step leaves it."""
    model, step = job.attach(model, optimizer)
    for _ in job.epochs():
        for number, (inputs, targets) in enumerate(job.batches(data())):
            if number == 5:  # does without this one
                continue
            step.zero_grad()
            loss = mse_loss(model(inputs), targets)
            job.log(loss=loss)
            loss.backward()
            step.step()
            say(
                f"{len(inputs)} samples, version {job.version}, {'applied' if job.applied else 'not applied'}"
            )


def rated_late(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """The same schedule by hand, just before the step."""
    model, step = job.attach(model, optimizer)
    steps = 0
    for _ in job.epochs():
        for inputs, targets in job.batches(data()):
            mse_loss(model(inputs), targets).backward()
            steps += 1
            for group in step.param_groups:
                group["lr"] = 0.1 * min(1.0, steps / 4)
            step.step()
            step.zero_grad()


def rated_by_version(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """The same by the version of the parameters, also of who has missed some: `w0` is slow at first."""
    model, step = job.attach(model, optimizer)
    steps = 0
    for _ in job.epochs():
        for inputs, targets in job.batches(data()):
            for group in step.param_groups:
                group["lr"] = 0.1 * min(1.0, (job.version + 1) / 20)
            time.sleep(0.4 if job.rank == 0 and not steps else 0.1)
            mse_loss(model(inputs), targets).backward()
            step.step()
            step.zero_grad()
            steps += 1
    say(f"{steps} steps")


def loader(processes: int = 1) -> DataLoader[Any]:
    """Return a loader of the script's own, which shuffles, in a process of its own."""
    order = torch.Generator().manual_seed(7)
    return DataLoader(data(), batch_size=8, shuffle=True, generator=order, num_workers=processes)


def own_loader(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    model, step = job.attach(model, optimizer)
    batches = loader()
    for _ in job.epochs():
        for inputs, targets in job.steps(batches):
            loss = mse_loss(model(inputs), targets)
            say(f"loss {loss.item():.6f}")
            loss.backward()
            step.step()
            step.zero_grad()


def scaled(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """With a GradScaler, whose third step of this worker overflows."""
    model, step = job.attach(model, optimizer)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    steps = 0
    for _ in job.epochs():
        for inputs, targets in job.batches(data()):
            steps += 1
            loss = mse_loss(model(inputs), targets) * (float("inf") if steps == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(step)
            scaler.update()
            say(f"step {steps}: {'applied' if job.applied else 'not applied'}")
            step.zero_grad()


def logged(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Metrics of its own, and a batch that it does without."""
    model, step = job.attach(model, optimizer)
    for epoch in job.epochs():
        for number, (inputs, targets) in enumerate(job.batches(data(), batch_size=8)):
            if number == 1:
                continue
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            step.step()
            job.log(loss=loss, batch=len(inputs))
            step.zero_grad()
        if job.evaluating:
            job.log(error=mse_loss(model(data().tensors[0]), data().tensors[1]), epoch=epoch)


def normed() -> nn.Module:
    """With BatchNorm, and a frozen parameter."""
    model = nn.Sequential(nn.BatchNorm1d(12), network())
    next(model[1].parameters()).requires_grad_(False)
    return model


def odd() -> TensorDataset:
    """One sample more than three rounds of three workers have."""
    return TensorDataset(*(each[:73] for each in data().tensors))


def evaluated(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """BatchNorm, a remainder of one sample, and an error that the script measures by itself."""
    _, step = job.attach(model, optimizer)
    for _ in job.epochs():
        model.train()
        for inputs, targets in job.batches(odd()):
            mse_loss(model(inputs), targets).backward()
            step.step()
            step.zero_grad()
        if job.evaluating:
            job.log(error=error_of(model))


@torch.no_grad()
def error_of(model: nn.Module) -> float:
    inputs, targets = odd().tensors
    return float(mse_loss(model.eval()(inputs), targets))


def hanging(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Train like `trained`. In a process with HANGS in its environment one of the samples never comes."""

    class Stuck(TensorDataset):
        fetched = 0

        def __getitem__(self, index: int) -> Any:
            type(self).fetched += 1
            if "HANGS" in os.environ and self.fetched > 100:
                time.sleep(3600)
            untyped: Any = super()
            return untyped.__getitem__(index)

    model, step = job.attach(model, optimizer)
    stuck = Stuck(*data().tensors)
    for _ in job.epochs():
        for inputs, targets in job.batches(stuck):
            mse_loss(model(inputs), targets).backward()
            step.step()
            step.zero_grad()


def saved(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Writes a file of its own after each epoch, as many scripts do, and continues from one that is there.
    SAVES is where, and UNTIL the epoch in which it ends; all in the cosine that follows the steps."""
    path, until = Path(os.environ["SAVES"]), int(os.environ.get("UNTIL", "-1"))
    model, step = job.attach(model, optimizer)
    batches = job.batches(data())
    schedule = job.follow(torch.optim.lr_scheduler.CosineAnnealingLR(step, job.total_steps))
    start = 0
    if path.exists():
        found: dict[str, Any] = torch.load(path)
        model.load_state_dict(found["model"])
        step.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        start = found["epoch"] + 1
    for epoch in job.epochs(start=start):
        if epoch == until:
            job.leave()
            return
        assert len(batches) == SAMPLES // (8 * int(os.environ["WORKERS"]))
        for inputs, targets in batches:
            mse_loss(model(inputs), targets).backward()
            step.step()
            step.zero_grad()
            schedule.step()
        # Every worker is told the same; the one that writes has the lowest rank.
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": step.state_dict()}
        if job.rank == 0:
            torch.save({**state, "schedule": schedule.state_dict(), "epoch": epoch}, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
        sums = [
            float(value.double().sum())
            for of in state["optimizer"]["state"].values()
            for value in of.values()
        ]
        say(f"epoch {epoch}, {job.total_steps} steps", sums=sums)


def other_defaults(job: gradwire.Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Train like `trained` after the script has changed torch's defaults."""
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    trained(job, model, optimizer)


LOOPS: dict[str, tuple[Loop, Callable[[nn.Module], Optimizer]]] = {
    "trained": (trained, sgd),
    "groups": (loop(warm=True), adamw),
    "adagrad": (trained, adagrad),
    "many_groups": (trained, many_groups),
    "cosine": (cosine, sgd),
    "rmsprop": (loop(steps="local"), lambda model: torch.optim.RMSprop(model.parameters())),
    "steps_here": (loop(steps="local"), sgd),
    "closures": (closures, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)),
    "at_the_step": (loop(halves, overlap="off"), sgd),
    "rounds": (rounds, adamw),
    "rated_late": (rated_late, sgd),
    "rated_by_version": (rated_by_version, sgd),
    "clipped": (loop(clip_norm=0.5), sgd),
    "swapped": (swapped, sgd),
    "own_loader": (own_loader, sgd),
    "accumulated": (loop(told_halves, to_none=False), sgd),
    "twice": (loop(halves), sgd),
    "doubled": (loop(by_hand), sgd),
    "scaled": (scaled, sgd),
    "logged": (logged, sgd),
    "adamw": (trained, adamw),
    "other_defaults": (other_defaults, adamw),
    "saved": (saved, sgd),
    "saved_adam": (saved, lambda model: torch.optim.Adam(model.parameters(), lr=0.01)),
    "saved_adamw": (saved, adamw),
    "saved_adagrad": (saved, adagrad),
    "hanging": (hanging, sgd),
    "evaluated": (evaluated, sgd),
}


MODELS: dict[str, Callable[[], nn.Module]] = {"evaluated": normed, "many_groups": Shifted}


def say(message: str, **more: Any) -> None:
    print(json.dumps({"message": message, **more}), file=sys.stderr, flush=True)


def main(name: str, *options: str) -> int:
    torch.set_num_threads(1)
    loop, optimizer = LOOPS[name]
    given: dict[str, Any] = dict(
        zip((each[2:].replace("-", "_") for each in options[::2]), options[1::2], strict=True)
    )
    try:
        with gradwire.connect(**given) as job:
            model = MODELS.get(name, network)()
            loop(job, model, optimizer(model))
            values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
            say("trained", parameters=values.tolist(), version=job.version)
    except (gradwire.ScriptError, Refused) as error:
        say(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
