"""Optimizers that a script may use, and the hooks around their steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from stepping_server import INPUTS, RATE, Network, SteppingServer, flat, joined
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwire import ScriptError

Where = Literal["server", "local"]


class Hooks:
    """Clip gradients before each step, and note the calls and the parameters' sum after it."""

    def __init__(self, model: Network) -> None:
        self.model = model
        self.before = 0
        self.sums: list[float] = []

    def pre(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.before += 1
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_value_(parameters, 1e-3)

    def post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.sums.append(float(flat(self.model).sum()))


def by_plain_torch(batches: list[torch.Tensor]) -> tuple[Network, Hooks]:
    model = Network()
    optimizer, hooks = torch.optim.SGD(model.parameters(), lr=RATE), Hooks(model)
    optimizer.register_step_pre_hook(hooks.pre)
    optimizer.register_step_post_hook(hooks.post)
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, hooks


Register = Callable[[Hooks, torch.optim.Optimizer, Any], list[Any]]


def on_own(hooks: Hooks, own: torch.optim.Optimizer, attached: Any) -> list[Any]:
    return [own.register_step_pre_hook(hooks.pre), own.register_step_post_hook(hooks.post)]


def on_attached(hooks: Hooks, own: torch.optim.Optimizer, attached: Any) -> list[Any]:
    return [attached.register_step_pre_hook(hooks.pre), attached.register_step_post_hook(hooks.post)]


def on_all(hooks: Hooks, own: torch.optim.Optimizer, attached: Any) -> list[Any]:
    return [register_optimizer_step_pre_hook(hooks.pre), register_optimizer_step_post_hook(hooks.post)]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("where", ["server", "local"])
@pytest.mark.parametrize("register", [on_own, on_attached, on_all])
@pytest.mark.parametrize("overlap", ["off", "backward"])
def test_hooks_of_the_optimizer_run_once_around_each_step(
    register: Register, where: Where, scale: float, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[torch.Tensor] = []
    server = SteppingServer(1.0 if where == "local" else RATE, overlap=overlap)
    model = Network()
    own, hooks = torch.optim.SGD(model.parameters(), lr=RATE), Hooks(model)
    with joined(monkeypatch, server) as job:
        _, attached = job.attach(model, own, steps=where)
        handles = register(hooks, own, attached)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
        for _ in job.epochs():
            for batch in job.batches(INPUTS):
                batches.append(batch)
                scaler.scale(model(batch).square().mean()).backward()
                scaler.step(attached)
                scaler.update()
                attached.zero_grad()
        for handle in handles:
            handle.remove()
    expected, of_plain = by_plain_torch(batches)
    assert hooks.before == len(hooks.sums) == len(of_plain.sums) == 8
    assert hooks.sums == pytest.approx(of_plain.sums, abs=1e-5)
    assert torch.allclose(torch.from_numpy(flat(model)), torch.from_numpy(flat(expected)), atol=1e-7)


class Averaging(torch.optim.SGD):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad -= parameter.grad.mean()
        own: Any = super()
        return own.step(closure)


class Wrapping(torch.optim.Optimizer):
    """Wraps another, like Lookahead and SAM."""

    def __init__(self, base_optimizer: torch.optim.Optimizer) -> None:
        self.base_optimizer = base_optimizer
        super().__init__(base_optimizer.param_groups, base_optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        inner: Any = self.base_optimizer
        return inner.step(closure)


class NoOptimizer:
    """Has the methods of one, as some frameworks' have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def sgd(model: Network) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def averaging(model: Network) -> Any:
    return Averaging(model.parameters(), lr=RATE)


def wrapping(model: Network) -> Any:
    return Wrapping(sgd(model))


def no_optimizer(model: Network) -> Any:
    return NoOptimizer(sgd(model))


def an_object(model: Network) -> Any:
    return object()


def lbfgs(model: Network) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1)


def sparse_adam(model: Network) -> Any:
    return torch.optim.SparseAdam([model.embedding.weight])


def asgd(model: Network) -> Any:
    return torch.optim.ASGD(model.parameters(), lr=0.1)


def rprop(model: Network) -> Any:
    return torch.optim.Rprop(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("make", "where", "said"),
    [
        (averaging, "server", r"Averaging: the server steps SGD"),
        (wrapping, "server", r"Wrapping wraps SGD, .* attach the SGD \(.base_optimizer\)"),
        (no_optimizer, "server", r"NoOptimizer: expected .* attach the SGD \(.optimizer\)"),
        (no_optimizer, "local", r"NoOptimizer: expected .* attach the SGD \(.optimizer\)"),
        (an_object, "server", r"object: expected an optimizer of torch.optim"),
        (lbfgs, "local", r"LBFGS: .* curvature .* 2 workers"),
        (sparse_adam, "local", r"SparseAdam: .* gradients are dense.* torch\.optim\.Adam"),
    ],
)
def test_an_optimizer_that_would_train_something_else_is_refused_by_name(
    make: Callable[[Network], Any], where: Where, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Network()
    optimizer, server = make(model), SteppingServer()
    server.workers = 2
    with joined(monkeypatch, server) as job, pytest.raises(ScriptError, match=said):
        job.attach(model, optimizer, steps=where)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lbfgs, r"LBFGS: .* curvature"),
        (asgd, r"ASGD: its averages \('ax'\)"),
        (rprop, r"Rprop: .* signs of this worker's"),
        (wrapping, r"Wrapping wraps SGD"),
    ],
)
def test_an_optimizer_that_remembers_its_own_parameters_is_warned_of(
    make: Callable[[Network], Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Network()
    with joined(monkeypatch, SteppingServer()) as job:
        job.attach(model, make(model), steps="local")
    assert re.search(said, caplog.text)


def test_a_step_that_was_replaced_is_warned_of_and_a_schedulers_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Network()
    any_optimizer: Any = sgd(model)
    torch.optim.lr_scheduler.StepLR(any_optimizer, 5)
    with joined(monkeypatch, SteppingServer()) as job:
        job.attach(model, any_optimizer)
    assert "replaced" not in caplog.text
    any_optimizer.step = list  # anything that can be called
    with joined(monkeypatch, SteppingServer()) as job:
        job.attach(model, any_optimizer)
    assert "SGD: its step was replaced" in caplog.text


@pytest.mark.parametrize("name", ["first_step", "train"])
def test_other_methods_of_an_optimizer_are_missing_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Network()
    with joined(monkeypatch, SteppingServer()) as job:
        _, optimizer = job.attach(model, sgd(model))
        assert not hasattr(optimizer, name)
        with pytest.raises(AttributeError, match=f"{name}: call it on the optimizer that was passed to job"):
            getattr(optimizer, name)


def test_the_optimizer_of_another_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Network()
    with joined(monkeypatch, SteppingServer()) as job:
        _, optimizer = job.attach(model, sgd(model))
    with (
        joined(monkeypatch, SteppingServer()) as job,
        pytest.raises(ScriptError, match="pass the optimizer that the script made"),
    ):
        job.attach(model, optimizer)


def test_a_hook_may_change_the_closure_and_an_overflow_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Network()
    calls: list[str] = []

    def replaced(optimizer: Any, args: Any, kwargs: Any) -> Any:
        def closure() -> torch.Tensor:
            calls.append("closure")
            optimizer.zero_grad()
            loss: torch.Tensor = model(INPUTS[:4]).square().mean()
            loss.backward()
            return loss

        return (args[0], closure), kwargs

    with joined(monkeypatch, SteppingServer()) as job:
        _, attached = job.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))
        attached.register_step_pre_hook(replaced)
        batches = iter(job.batches(INPUTS))
        next(batches)
        assert attached.step() is not None
        assert calls == ["closure"]
        next(batches)
        attached.found_inf = torch.tensor(1.0)
        attached.step()
        assert calls == ["closure"]
        assert not job.applied


@pytest.mark.parametrize("overlap", ["off", "backward"])
@pytest.mark.parametrize("discarded", ["all", "hidden", "none"])
def test_gradients_that_a_script_discards_before_the_step_are_not_pushed(
    discarded: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GAN discards the discriminator's, of the generator's loss. The last loss may not reach them."""

    def loss(model: Network, batch: torch.Tensor) -> torch.Tensor:
        if discarded == "hidden":  # the step's own loss does not reach this layer
            found: torch.Tensor = model.embedding.weight.square().mean()
        else:
            found = model(batch).square().mean()
        return found

    batches: list[torch.Tensor] = []
    model = Network()
    with joined(monkeypatch, SteppingServer(overlap=overlap)) as job:
        _, optimizer = job.attach(model, sgd(model))
        for _ in job.epochs():
            for batch in job.batches(INPUTS):
                batches.append(batch)
                if discarded != "none":
                    model(batch).sum().mul(100).backward()
                    optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    plain = Network()
    plain_optimizer = sgd(plain)
    for batch in batches:
        loss(plain, batch).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert torch.allclose(torch.from_numpy(flat(model)), torch.from_numpy(flat(plain)), atol=1e-6)
