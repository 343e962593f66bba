"""Warnings about combinations that were measured to lose."""

from __future__ import annotations

import pytest

from gradwire.compressors import TensorSpec, advice, compressor_for, suited
from gradwire.compressors.registry import BUILT_IN, parse_compressor
from gradwire.optim.optimizer import parse_optimizer


def said(compressor: str, optimizer: str, *, local: bool = False) -> str:
    return " ".join(advice(parse_compressor(compressor), parse_optimizer(optimizer), local=local))


@pytest.mark.parametrize("optimizer", ["adam", "adamw:weight_decay=0.1"])
@pytest.mark.parametrize(
    "compressor",
    [
        *(
            "topk",
            "topk:ratio=10,values=8bit",
            "topk:warmup=2",
            "gcac",
            "krngc:momentum=0",
            "l1",
            "randk:ratio=10",
        ),
        *("1bit", "2bit", "4bit:feedback=on", "signsgd", "signsgd:feedback=off", "terngrad", "threshold"),
    ],
)
def test_a_compressor_that_loses_with_adam_is_named_with_what_to_use_instead(
    compressor: str, optimizer: str
) -> None:
    text = said(compressor, optimizer)
    assert text.startswith(f"{compressor} loses where the server's optimizer is Adam")
    assert "use 4bit" in text
    assert "--mode local" in text
    assert said(compressor, "sgd:momentum=0.9") == ""
    assert said(compressor, optimizer, local=True) == ""  # workers run it, and compress changes


@pytest.mark.parametrize("compressor", ["none", "bf16", "fp16", "8bit", "qsgd", "4bit:feedback=off"])
def test_nothing_is_said_of_what_lost_nothing(compressor: str) -> None:
    assert said(compressor, "adamw") == ""


@pytest.mark.parametrize(
    "compressor",
    ["topk:ratio=2", "topk:warmup=3", "1bit:feedback=off", "signsgd:feedback=on", "2bit:threshold=1"],
)
def test_nothing_is_said_of_what_was_not_measured(compressor: str) -> None:
    assert said(compressor, "adamw") == ""


def test_of_a_sparsifier_the_nearest_that_was_measured_is_said() -> None:
    plain, warm = (parse_compressor(spec).adam_loss for spec in ("topk", "topk:warmup=1"))
    nearest = {
        spec: parse_compressor(f"topk:{spec}").adam_loss for spec in ("ratio=10", "ratio=99", "ratio=1000")
    }
    assert plain is not None
    assert warm is not None
    assert nearest == {"ratio=10": 1.31, "ratio=99": 1.31, "ratio=1000": plain}
    assert 1 < warm < plain
    assert parse_compressor("topk:ratio=2").adam_loss is None, "not measured"


@pytest.mark.parametrize(
    ("given", "optimizer", "local", "expected"),
    [
        ("4bit", "adamw", False, "4bit:feedback=off"),
        ("4bit:scale=mean", "adam", False, "4bit:scale=mean,feedback=off"),
        ("4bit", "sgd:momentum=0.9", False, "4bit"),
        ("4bit", "adamw", True, "4bit"),
        ("4bit:feedback=on", "adamw", False, "4bit:feedback=on"),
        ("4bit:momentum=0.5", "adamw", False, "4bit:momentum=0.5"),
        ("4bit:levels=groups", "adamw", False, "4bit:levels=groups"),
        ("topk", "adamw", False, "topk"),
        ("lowrank", "adamw", False, "lowrank:rank=8,values=8bit"),
        ("lowrank:values=4bit", "adam", False, "lowrank:values=4bit,rank=8"),
        ("lowrank:values=4bit,rank=4", "adamw", False, "lowrank:values=4bit,rank=4"),
        ("lowrank", "sgd:momentum=0.9", False, "lowrank"),
    ],
)
def test_4bit_leaves_its_feedback_out_and_lowrank_sends_more_where_the_server_runs_adam(
    given: str, optimizer: str, local: bool, expected: str
) -> None:
    assert suited(parse_compressor(given), parse_optimizer(optimizer), local=local).text == expected


def test_momentum_at_both_ends() -> None:
    assert "applied twice" in said("topk:momentum=0.9", "sgd:momentum=0.9")
    assert "acts on the changes" in said("dgc", "adamw", local=True)
    assert said("dgc", "sgd") == ""


def test_the_figures_are_losses() -> None:
    losses = {name: parse_compressor(name).adam_loss for name in BUILT_IN}
    assert all(loss is not None and 1 <= loss < 10 for loss in losses.values())
    assert parse_compressor("4bit:feedback=off").adam_loss == 1.013


def test_auto_counts_the_bytes_of_a_model() -> None:
    large, small = (
        [TensorSpec(name=str(shape), shape=shape) for shape in shapes]
        for shapes in ([(256, 64), (256,)], [(16, 3, 3, 3), (16,)])
    )
    chosen = [str(compressor_for("auto", specs)[0]) for specs in (large, small)]
    assert chosen == ["lowrank:values=8bit", "4bit"]
    assert compressor_for("8bit", large)[0] == parse_compressor("8bit")
