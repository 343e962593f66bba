"""gc-plan: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire.common.exits import Exit
from gradwire.common.presets import PRESETS
from gradwire.compressors import parse_compressor
from gradwire.deploy.plan import main, parser, profile_of
from gradwire.planning.job import StepOptions, plan_of
from gradwire.server import cli as server
from gradwire.worker import cli as worker

GIVEN = "--model resnet20 --bandwidth 100mbit --rtt 20ms --workers 16"
HEAVY = ("torch", "grpc", "numba", "sklearn", "matplotlib")


def planned(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    assert main([*arguments.split(), "--json", "-"]) == Exit.DONE
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_recommends_a_way_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GIVEN.split()) == Exit.DONE
    said = capsys.readouterr().out
    for words in (
        "269,722 parameters, 16 workers",
        "torch ddp",
        "Recommended: ",
        "takes longest",
        "would make",
        "Memory beside programs and activations: ",
    ):
        assert words in said
    assert "gc-server --min-workers 16" in said
    assert "accuracy -0.005" in said, "what lowrank loses with SGD"


@pytest.mark.parametrize("compressor", ["topk:ratio=100", "randk:ratio=100"])
@pytest.mark.parametrize("model", ["resnet20", "resnet56", "resnet110", "vgg16-cifar", "resnet50"])
@pytest.mark.parametrize("mbit", [20, 100, 1000])
def test_seamgs_makes_about_as_few_parts_as_the_best_division_by_time(
    mbit: int, model: str, compressor: str
) -> None:
    """With one density for all tensors Q2 forbids no merge: neither because of tensors between convolutions
    that are sent whole, nor because of densities that differ by rounding."""
    profile = profile_of(parser().parse_args(["--model", model, "--bandwidth", f"{mbit}mbit"]))
    sent = parse_compressor(compressor).compression()
    by_time, accurate = (
        len(plan_of(profile, StepOptions(compressor=sent, fusion=fusion)).parts)
        for fusion in ("mgwfbp", "seamgs")
    )
    assert accurate <= 1.5 * by_time


def test_presets_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "presets" not in planned(capsys, GIVEN)
    found = planned(capsys, f"{GIVEN} --presets")["presets"]
    assert {each["preset"] for each in found} == set(PRESETS)
    times = [each["step_s"] for each in found]
    assert times == sorted(times)
    by_name = {each["preset"]: each for each in found}
    for name, preset in PRESETS.items():
        each = by_name[name]
        assert each["compressor"] == preset.sets["compressor"]
        assert str(preset.sets["mode"]).startswith(each["mode"])
    low, lowest = by_name["low-communication"], by_name["lowest-communication"]
    assert low["up_bytes"] / lowest["up_bytes"] > 3, "half as many exchanges, of fewer bytes"
    assert lowest["up_bytes"] == pytest.approx(lowest["down_bytes"]), "the same coding in both directions"
    assert main([*GIVEN.split(), "--presets"]) == Exit.DONE
    said = " ".join(capsys.readouterr().out.split())
    for name in PRESETS:
        assert name in said


@pytest.mark.parametrize(
    ("optimizer", "recommended"),
    [("adamw", {"none", "bf16", "8bit", "4bit:feedback=off"}), ("sgd", {"lowrank", "topk:ratio=100"})],
)
def test_a_compressor_that_loses_with_the_optimizer_is_not_recommended(
    optimizer: str, recommended: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, f"{GIVEN} --optimizer {optimizer}")
    fastest = next(each for each in found["predictions"] if each["mode"] == "sync")
    assert fastest["compressor"].partition(":")[0] in ("lowrank", "topk")
    eight = "lowrank:rank=8,values=8bit"
    assert (eight in {each["compressor"] for each in found["predictions"]}) == (optimizer == "adamw")
    assert found["recommended"]["compressor"] in recommended
    measured = found["losses"]["measured"]
    assert measured["topk:ratio=100"] == (1.41 if optimizer == "adamw" else -0.008)
    assert "fp16 hook" not in measured, "unknown is not 0"
    assert f"--optimizer {optimizer}" in found["recommended"]["commands"][0]
    said = "is faster, but with Adam"
    assert (said in found["recommended"]["reason"]) == (optimizer == "adamw")


def test_one_s_own_model_is_a_file_or_a_function(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms give the same plan, whose shapes have the model's order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))\n"
    )
    program = (
        "import own_network, safetensors.torch\n"
        "safetensors.torch.save_file(own_network.make().state_dict(), 'own.safetensors')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    link = "--bandwidth 100mbit --computation 10ms"
    made, read = (
        planned(capsys, f"--model {model} {link}") for model in ("own_network:make", "own.safetensors")
    )
    assert made["parameters"] == read["parameters"] == 64 * 512 + 512 + 512 * 10 + 10
    assert made["recommended"]["step_s"] == read["recommended"]["step_s"]


def test_json_has_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = planned(capsys, GIVEN)
    times = [each["step_s"] for each in found["predictions"]]
    assert times == sorted(times)
    apart = found["recommended"]["seamgs"]
    assert len(apart) == 58
    assert set(apart) <= {None, "Q1", "Q2", "group"}
    assert {each["compressor"] for each in found["predictions"]} >= {"none", "4bit", "topk:ratio=100"}
    assert {each["mode"] for each in found["predictions"]} >= {"sync", "stale", "torch ddp", "local:steps=8"}
    assert found["recommended"]["spans"]
    assert found["recommended"]["memory"]["server_bytes"] > 2 * 4 * found["parameters"]
    path = tmp_path / "plan.json"
    assert main([*GIVEN.split(), "--json", str(path)]) == Exit.DONE
    assert json.loads(path.read_text()) == found


@pytest.mark.parametrize("model", ["resnet20", "8x1048576"])
def test_what_it_recommends_are_command_lines(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = planned(capsys, f"--model {model} --bandwidth 20mbit --computation 300ms")
    for line in found["recommended"]["commands"]:
        command, *arguments = line.replace("HOST", "127.0.0.1").split()
        program = {"gc-server": server.main, "gc-worker": worker.main}[command]
        assert program([*arguments, "--print-config"]) == Exit.DONE


def test_computation_is_seconds_or_samples_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    times = [
        planned(capsys, f"{GIVEN} {text}")["computation_s"]
        for text in ("--computation 0.5", "--computation 500ms", "--computation 64/s", "")
    ]
    assert times == pytest.approx([0.5, 0.5, 0.5, 3 * 40_551_040 * 32 / 5e12], rel=1e-3)


def code_of(arguments: list[str]) -> object:
    """Return the exit code of gc-plan, also where argparse ends it."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model resnte50 --bandwidth 1gbit", "did you mean 'resnet50'?"),
        ("--model resnet50 --bandwidth 100", "expected bits per second such as 100mbit"),
        ("--model resnet50 --bandwidth 100MB", "expected bits per second such as 100mbit"),
        ("--model resnet50 --bandwidth 1gbit --rtt 3m", "expected seconds such as 0.3, 20ms"),
        ("--model resnet50 --bandwidth 1gbit --computation fast", "or samples per second such as 250/s"),
        ("--model resnet50 --bandwidth 1gbit --workers 0", "expected a whole number from 1, got '0'"),
        ("--model resnet50 --bandwidth 1gbit --compressors 4bti", "did you mean '4bit'?"),
        ("--model resnet50 --bandwidth 1gbit --compressors auto", "it chooses by measuring"),
        ("--model own.safetensors --bandwidth 1gbit", "--model own.safetensors: No such file"),
        ("--model no_module:make --bandwidth 1gbit", "there is no module 'no_module'"),
        ("--model resnet50 --bandwidth 1gbit --optimizer adma", "did you mean 'adam'?"),
        ("--model resnet50 --bandwidth 1gbit --json /nowhere/at/all", "expected a file in a folder"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(arguments.split()) == Exit.USAGE
    assert words in capsys.readouterr().err


def test_it_answers_without_importing_what_takes_long() -> None:
    """It is to take less than two seconds; importing torch alone takes longer."""
    program = f"import sys; from gradwire.deploy.plan import main; main({GIVEN.split()}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Recommended: " in done.stdout
    assert set(done.stdout.splitlines()[-1].split()).isdisjoint(HEAVY)


def test_a_thousand_workers_take_no_longer_to_plan_for(capsys: pytest.CaptureFixture[str]) -> None:
    what_if = "--model resnet50 --bandwidth 1gbit --server-bandwidth 25gbit --workers 1000"
    assert planned(capsys, what_if)["recommended"]["step_s"] > 0


def test_a_step_may_take_as_long_as_it_likes(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand workers on a slow link: hours, of which moments of a picosecond are no part."""
    found = planned(capsys, "--model resnet20 --bandwidth 1mbit --workers 1000 --compressors none 4bit")
    times = {each["compressor"]: each["step_s"] for each in found["predictions"] if each["mode"] == "sync"}
    assert times["none"] > 2 * 32 * 269_722 * 1000 / 1e6
