"""Models, optimizers and gradients that a script attaches, and what is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from looping import BATCH, DATA, Connect, Server, attached, network, take
from torch import nn

import gradwire
from gradwire import ScriptError
from gradwire.common.configuration import UsageError
from gradwire.compressors import AbsentPayload
from gradwire.proto import messages as m


def test_a_script_takes_the_jobs_compressor_unless_it_names_one(connect: Connect) -> None:
    server = Server(preset="low-communication", compressor="1bit:block=4096,decay=0.9")
    assert connect(server, compressor="")[1]._member.compressor.text == "1bit:block=4096,decay=0.9"  # pyright: ignore
    assert connect(server, compressor="8bit")[1]._member.compressor.text == "8bit"  # pyright: ignore


def test_a_script_whose_optimizer_does_not_suit_the_preset_is_refused(connect: Connect) -> None:
    _, job = connect(preset="low-communication")
    model = network()
    with pytest.raises(ScriptError, match="optimizer SGD: the server's --preset low-communication expects"):
        job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    job.attach(model, torch.optim.AdamW(model.parameters()))


def incomplete(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters][1:], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer_of", "message"),
    [
        (
            torch.optim.LBFGS,
            r"LBFGS: the server steps SGD, Adam, .* and Adagrad.*attach\(\.\.\., steps='local'\)",
        ),
        (partial(torch.optim.Adam, amsgrad=True), r"group 0: amsgrad=True: the server has no amsgrad"),
        (incomplete, r"parameter '0\.weight' requires a gradient, but the optimizer does not have it"),
    ],
)
def test_an_optimizer_that_cannot_be_attached_is_refused_by_name(
    connect: Connect, optimizer_of: Any, message: str
) -> None:
    _, job = connect()
    model = network()
    with pytest.raises(ScriptError, match=message):
        job.attach(model, optimizer_of(model.parameters()))


def test_steps_outside_of_the_loop_and_other_batches_than_the_jobs_are_refused(connect: Connect) -> None:
    _, job = connect()
    _, optimizer = attached(job)
    with pytest.raises(ScriptError, match=r"call it in the loop over job\.batches"):
        optimizer.step()
    with pytest.raises(ScriptError, match=f"the job has {BATCH}; start gc-server with --batch-size 64"):
        job.batches(DATA, batch_size=64)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"optimizer": "adam"}, "optimizer SGD: the server was started with --optimizer adam; leave"),
        ({"learning_rate": 0.5}, r"learning rate 0\.25: .* with --learning-rate 0\.5; leave"),
    ],
)
def test_what_contradicts_the_scripts_optimizer_is_refused_by_name(
    connect: Connect, terms: dict[str, Any], message: str
) -> None:
    model = network()
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.25}, {"params": others, "lr": 0.125}]
    _, job = connect(optimizer="sgd:momentum=0.9", learning_rate=0.125)
    job.attach(model, torch.optim.SGD(groups, lr=1.0))
    _, job = connect(**terms)
    with pytest.raises(ScriptError, match=message):
        job.attach(model, torch.optim.SGD(groups, lr=1.0))


def test_a_script_may_insist_on_a_preset(connect: Connect) -> None:
    connect(Server(preset="sparse-sgd"), preset="sparse-sgd")
    with pytest.raises(UsageError, match="--preset diloco: job j has --preset sparse-sgd"):
        connect(Server(preset="sparse-sgd"), preset="diloco")


def test_options_of_groups_other_than_the_rate_may_not_change(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    (inputs,) = next(iter(job.batches(DATA)))
    take(model, optimizer, inputs)
    schedule.step()  # has momentum follow
    (inputs,) = next(iter(job.batches(DATA)))
    with pytest.raises(gradwire.ScriptError, match=r"group 0: .*momentum=0\.95,.*to .*cycle_momentum=False"):
        take(model, optimizer, inputs)


def test_the_servers_optimizer_begins_with_what_the_scripts_remembers(connect: Connect) -> None:
    server, job = connect()
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(DATA.tensors[0]).square().mean().backward()
    plain.step()
    _, optimizer = job.attach(model, plain)
    saved = optimizer.state_dict()
    assert saved["state"][0]["momentum_buffer"].shape == (8, 6)
    job.epochs(start=1)
    with pytest.raises(gradwire.ScriptError):  # this server begins with epoch 0 all the same
        next(iter(job.batches(DATA)))
    assert server.earlier.epoch == 1
    assert sorted(server.earlier.moments) == [0, 1, 2, 3]
    (values,) = server.earlier.moments[0].values()
    assert torch.equal(torch.from_numpy(values), saved["state"][0]["momentum_buffer"].flatten())


def loaded(optimizer: Any, **changes: Any) -> None:
    """Load a state_dict of an SGD with momentum, changed."""
    other = network()
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    other(DATA.tensors[0]).square().mean().backward()
    plain.step()
    optimizer.load_state_dict({**plain.state_dict(), **changes})


def test_a_state_that_cannot_be_continued_from_is_refused_by_name(connect: Connect) -> None:
    _, job = connect()
    model = network()
    _, optimizer = job.attach(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(gradwire.ScriptError, match=r"group 0 has no .*betas.* another kind .* than Adam"):
        loaded(optimizer)
    _, job = connect()
    model, optimizer = attached(job)
    loaded(optimizer, state={0: {"momentum_buffer": torch.zeros(2, 2)}})
    with pytest.raises(gradwire.ScriptError, match=r"of '0\.weight' has shape \(2, 2\), expected \(8, 6\)"):
        next(iter(job.batches(DATA)))
    _, job = connect()
    model, optimizer = attached(job)
    (inputs,) = next(iter(job.batches(DATA)))
    with pytest.raises(gradwire.ScriptError, match="the job has begun, and the server's optimizer"):
        loaded(optimizer)
    take(model, optimizer, inputs)
    job.leave()
    with pytest.raises(gradwire.ScriptError, match=r"state_dict\(\): this script has left the job"):
        optimizer.state_dict()


def test_the_state_of_the_servers_optimizer_is_not_read_as_an_attribute(connect: Connect) -> None:
    _, job = connect()
    model, optimizer = attached(job)
    loaded(optimizer)
    first = next(model.parameters())
    assert "momentum_buffer" in optimizer.state[first]  # until batches begin it is the script's
    (inputs,) = next(iter(job.batches(DATA)))
    with pytest.raises(gradwire.ScriptError, match=r"optimizer\.state: .* call optimizer\.state_dict\(\)"):
        _ = optimizer.state[first]
    take(model, optimizer, inputs)
    assert not deepcopy(optimizer).state


LATER = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_file_without_keys_of_schedulers_and_newer_torch_is_loaded(connect: Connect, kind: Any) -> None:
    """The optimizer loads it like torch's own."""
    server, job = connect()
    other = network()
    saved = kind(other.parameters(), lr=0.375).state_dict()
    older = [
        {key: value for key, value in group.items() if key not in LATER} for group in saved["param_groups"]
    ]
    assert all(group.keys() < saved["param_groups"][0].keys() for group in older)
    model = network()
    model, optimizer = job.attach(model, kind(model.parameters(), lr=0.1))
    job.follow(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))  # adds initial_lr
    optimizer.load_state_dict({**saved, "param_groups": older})
    (inputs,) = next(iter(job.batches(DATA)))
    take(model, optimizer, inputs)
    assert {header.learning_rates for header, _ in server.parts.values()} == {(0.375,)}
    assert LATER & optimizer.param_groups[0].keys() == LATER & saved["param_groups"][0].keys()


def test_a_rank_that_the_server_changes_is_the_scripts(connect: Connect) -> None:
    server, job = connect()
    assert job.rank == 1
    server.rank = 3
    assert job.rank == 3


def test_a_push_that_is_begun_anew_has_the_rates_of_the_step(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    for number, (inputs,) in enumerate(job.batches(DATA), start=1):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] = number / 8
        optimizer.step()
        optimizer.zero_grad()
    committed = [commit.seq for commit, _ in server.pushed]
    rates = {seq: header.learning_rates for (seq, _), (header, _) in server.parts.items()}
    assert [rates[seq] for seq in committed] == [(0.125,), (0.25,), (0.375,)]
    assert len(server.abandoned) == 1


def test_where_parts_count_at_once_a_step_is_not_taken_back(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The last tensors' parts leave first; then a gradient is found that is not finite."""
    caplog.set_level(logging.WARNING)
    server, job = connect(overlap="both")
    model, optimizer = attached(job)
    for number, (inputs,) in enumerate(job.batches(DATA)):
        model(inputs).square().mean().backward()
        if number == 1:
            first = next(model.parameters())
            assert first.grad is not None
            first.grad[0, 0] = math.inf
        optimizer.step()
        optimizer.zero_grad()
    assert server.abandoned == []
    assert [commit.seq for commit, _ in server.pushed] == [1, 2, 3]
    assert len({part for seq, part in server.parts if seq == 2}) == len(server.replica.plan.parts)
    assert not server.parts[2, len(server.replica.plan.parts) - 1][1]  # empty
    assert server.parts[2, 0][1]
    assert "parts that were sent count, the others are sent empty" in caplog.text


def test_what_the_loss_does_not_reach_and_what_is_frozen_is_not_pushed(connect: Connect) -> None:
    server, job = connect()
    model, other = network(), nn.Linear(2, 2)
    model.add_module("other", other)
    other.bias.requires_grad_(False)
    _, optimizer = job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (inputs,) = next(iter(job.batches(DATA)))
    first: nn.Module = nn.Sequential(*list(model.children())[:3])
    first(inputs).square().mean().backward()
    optimizer.step()
    assert server.manifest is not None
    names = [spec.name for spec in server.manifest.specs]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias", "other.weight", "other.bias"]
    ((_, payloads),) = server.pushed
    assert [isinstance(payload, AbsentPayload) for payload in payloads] == [False] * 4 + [True] * 2


def test_a_frozen_member_of_the_optimizer_keeps_its_dtype(connect: Connect) -> None:
    """Like the base of adapters, it is uploaded once, as it is, and is no tensor of the job."""
    server, job = connect()
    model = network()
    model.add_module("base", nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False))
    _, optimizer = job.attach(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    next(iter(job.batches(DATA)))
    assert server.manifest is not None
    assert [spec.name for spec in server.manifest.specs] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    entries = {entry.name: (entry.kind, entry.dtype) for entry in server.manifest.entries}
    assert entries == dict.fromkeys(["base.weight", "base.bias"], (m.EntryKind.FROZEN, "bfloat16"))
    optimizer.zero_grad()


@pytest.mark.parametrize("frozen", ["server", "local"])
def test_an_upload_of_a_large_base_names_the_way_without_it(
    connect: Connect, frozen: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradwire.worker.script.attached.LARGE_BYTES", 1000)
    server, job = connect()
    model = network()
    model.add_module("base", nn.Linear(20, 20).requires_grad_(False))
    job.attach(model, torch.optim.SGD(model[:3].parameters(), lr=0.1), frozen=frozen)  # type: ignore[index]
    next(iter(job.batches(DATA)))
    assert server.manifest is not None
    assert all(bool(each.digest) == (frozen == "local") for each in server.manifest.entries)
    said = "uploads 1.68e-06 GB of frozen parameters" in caplog.text
    assert said == (frozen == "server")


def test_a_closure_computes_the_gradients_of_its_step(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    (inputs,) = next(iter(job.batches(DATA)))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    ((_, payloads),) = server.pushed
    assert not any(isinstance(payload, AbsentPayload) for payload in payloads)


def test_an_optimizers_state_that_is_loaded_brings_its_rates(connect: Connect) -> None:
    server, job = connect()
    model, optimizer = attached(job)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.375
    optimizer.load_state_dict(saved)
    (inputs,) = next(iter(job.batches(DATA)))
    take(model, optimizer, inputs)
    assert {header.learning_rates for header, _ in server.parts.values()} == {(0.375,)}
