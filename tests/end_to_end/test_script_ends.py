"""The end of a job, as scripts meet it: several jobs in one script, and scripts that come too late."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from daemons import TASKS, Daemon, Daemons, Server, stop
from torch import nn

from gradwire.worker.training.sharding import epoch_order

sys.path.append(str(TASKS))
import script_ends as loops
from script_loops import data

JOB = ("--script", "--batch-size", "8", "--seed", "3", "--downlink", "none")


def serve(daemons: Daemons, workers: int, *more: str, epochs: int = 2) -> Server:
    return daemons.server(*JOB, "--min-workers", str(workers), "--epochs", str(epochs), *more)


def scripts(daemons: Daemons, loop: str, count: int, *servers: Server) -> list[Daemon]:
    return daemons.programs("script_ends", loop, *(server.address for server in servers), count=count)


@pytest.mark.parametrize(
    ("loop", "workers", "mode"),
    [("nested", 3, "sync"), ("zipped", 2, "sync"), ("zipped", 2, "local:steps=2")],
)
def test_a_script_of_two_jobs_waits_in_neither_for_the_other(
    daemons: Daemons, loop: str, workers: int, mode: str
) -> None:
    servers = [serve(daemons, workers, "--mode", mode) for _ in "ab"]
    both = scripts(daemons, loop, workers, *servers)
    assert [script.wait(60) for script in both] == [0] * workers, both[0].log
    for server in servers:
        server.wait_for("the job is finished at version")
        assert any("after 2 epochs, version" in line for line in server.messages), server.log


def test_a_script_without_the_loop_over_epochs_ends_and_nothing_is_warned_of(daemons: Daemons) -> None:
    server = serve(daemons, 2)
    both = scripts(daemons, "without_epochs", 2, server)
    assert [script.wait(60) for script in both] == [0, 0]
    server.wait_for("the job is finished at version 12")
    warned = [line for line in server.messages if "no member is left" in line]
    assert all('"level": "warning"' not in line for line in warned), warned


def test_a_script_that_was_away_at_the_end_goes_on_after_its_loop(daemons: Daemons) -> None:
    server = serve(daemons, 2, "--lease-seconds", "2", "--stay")
    away, other = scripts(daemons, "slow", 2, server)
    away.wait_for("stepped")
    away.signal(signal.SIGSTOP)
    try:
        assert other.wait(60) == 0, other.log
        server.wait_for("the job is finished")
    finally:
        away.signal(signal.SIGCONT)
    assert away.wait(60) == 0, away.log
    assert away.fields("^ended$")["done"]
    assert away.fields("^ended$")["progress"] == 1
    assert "This worker was away at the end" in away.log
    late = daemons.program("script_ends", "slow", server.address)
    assert late.wait(60) == 0, late.log
    assert "this script has trained nothing: the job has finished" in late.log
    assert "Traceback" not in late.log
    catching = daemons.program("script_ends", "catching", server.address)
    assert catching.wait(60) == 0
    catching.wait_for("caught: the job has finished: all of its 2 epochs are done")


# Script, its option, and its last words. The file TOKEN has the job's token. The first one trains until
# the server is killed.
EXPECTED = [
    ("slow", "--token-file TOKEN", r"UnreachableError: .*: is gc-server running, on this port"),
    ("slow", "--token-file NOWHERE", r"UsageError: --token-file .*NOWHERE: cannot be read: No such file"),
    ("slow", "--token-file WRONG", r"Refused: token: .* start the worker with --token-file FILE"),
    ("slow", "--tls-ca TOKEN", r"UnreachableError: .*check that --tls-ca, .* are PEM files"),
    ("slow", "--connect-seconds soon", r"UsageError: connect_seconds .*: expected .*number, got 'soon'"),
    ("other_data", "--token-file TOKEN", r"Refused: .*, epoch: .*; give every worker the same data set"),
    ("other_release", "--token-file TOKEN", r"Refused: protocol: .*install the same release of gradwire"),
]


def test_an_expected_end_is_one_line_with_its_remedy(daemons: Daemons, tmp_path: Path) -> None:
    for name in ("TOKEN", "WRONG"):
        (tmp_path / name).write_text(name * 8)
    server = serve(daemons, 1, "--token-file", str(tmp_path / "TOKEN"), epochs=10**6)
    started = list[Daemon]()
    for loop, given, _ in EXPECTED:
        option, value = given.split()
        value = str(tmp_path / value) if value.isupper() else value
        more = (option, value, "--give-up-seconds", "1")
        started.append(daemons.program("script_ends", loop, server.address, *more))
        if len(started) == 1:
            started[0].wait_for("stepped")
    for script in started[1:]:
        assert script.wait() == 1, script.log
    server.signal(signal.SIGKILL)
    for script, (_, _, words) in zip(started, EXPECTED, strict=True):
        assert script.wait() == 1, script.log
        assert "Traceback" not in script.log
        (line,) = [each for each in script.messages if each.startswith("gradwire.")]
        assert re.search(rf"^gradwire\.{words}.* \(script_ends.py, line \d+\)$", line.strip()), line


@pytest.mark.parametrize("mode", ["sync", "local:steps=2", "stale:bound=1", "async"])
def test_a_script_ends_the_job_for_all(daemons: Daemons, mode: str, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    server = serve(daemons, 2, "--mode", mode, "--output", str(output), epochs=50)
    both = scripts(daemons, "early", 2, server)
    assert [script.wait(60) for script in both] == [0, 0], both[0].log
    ended = [script.fields("^ended$") for script in both]
    assert all(each["done"] for each in ended)
    assert all(max(each["epochs"]) < 10 for each in ended)
    server.wait_for(r"the job ends: good enough \(asked for by rank \d \(w\d\)\)")
    version = int(server.wait_for(r"the job is finished at version (\d+)")[1])
    assert version == max(each["version"] for each in ended)
    assert any(f"version {version}: accuracy 0.5000" in line for line in server.messages), server.log
    assert stop(server) == 0
    assert output.exists()
    assert not any("ends before the job" in script.log for script in both)


@pytest.mark.parametrize(
    ("mode", "steps"), [("sync", "server"), ("sync", "local"), ("local:steps=2", "local")]
)
def test_a_plateau_is_found_by_all_ranks_before_the_same_step(
    daemons: Daemons, mode: str, steps: str
) -> None:
    server = serve(daemons, 2, "--mode", mode, epochs=4)
    both = daemons.programs("script_ends", "plateau", server.address, "--steps", steps, count=2)
    assert [script.wait(60) for script in both] == [0, 0], both[0].log
    first, second = (script.fields("^ended$") for script in both)
    assert first["rates"] == second["rates"]
    assert first["seen"] == second["seen"] == [-1.0, 0.9, 0.8, 0.85]
    # The third evaluation is worse than the second, and known from the second step of the fourth epoch on.
    round_ = 2 if mode.startswith("local") else 1
    assert first["rates"][3] == [0.1] * round_ + [0.05] * (len(first["rates"][3]) - round_)
    assert all(rate == 0.1 for epoch in first["rates"][:3] for rate in epoch)


@pytest.mark.parametrize("mode", ["sync", "local:steps=2"])
def test_unequal_rates_of_local_steps_are_named_once(daemons: Daemons, mode: str) -> None:
    server = serve(daemons, 2, "--mode", mode, epochs=4)
    both = scripts(daemons, "unequal", 2, server)
    assert [script.wait(60) for script in both] == [0, 0], both[0].log
    server.wait_for("the job is finished")
    (said,) = [line for line in server.messages if "unequal learning rates" in line]
    assert re.search(
        r"local steps have unequal learning rates: rank 0 \(w\d\) 0.05; rank 1 \(w\d\) 0.1\.", said
    )


def test_the_best_values_are_known_to_the_next_evaluator(daemons: Daemons) -> None:
    server = serve(daemons, 2, epochs=4)
    both = scripts(daemons, "best", 2, server)
    assert [script.wait(60) for script in both] == [0, 0], both[0].log
    known = [script.fields("^ended$")["known"] for script in both]
    first, second = sorted(known, key=lambda each: bool(each and each[0]))
    assert first == [{}, {"accuracy": 0.5, "loss": 0.5}]
    assert second == [{"accuracy": 0.7, "loss": 0.3}, {"accuracy": 0.7, "loss": 0.3}]


def test_two_models_of_one_job_are_trained_as_with_an_optimizer_for_each(daemons: Daemons) -> None:
    server = serve(daemons, 2)
    both = scripts(daemons, "gan", 2, server)
    generator, discriminator = loops.adversaries()
    models = nn.ModuleDict({"g": generator, "d": discriminator})
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (generator, discriminator)]
    inputs = data().tensors[0]
    for epoch in range(2):
        order = epoch_order(3, epoch, len(inputs))
        for number, start in enumerate(range(0, len(order), 16)):
            turn_of_d = number % 2 == 0
            models.zero_grad()
            loops.adversarial_loss(models, inputs[order[start : start + 16]], turn_of_d).backward()
            optimizers[turn_of_d].step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in models.parameters()])
    assert [script.wait(60) for script in both] == [0, 0], both[0].log
    for script in both:
        found = torch.tensor(script.fields("^ended$")["parameters"])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
