"""Parameter groups and clipping in whole jobs, against a plain torch loop on the union of the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import TASKS, Daemons
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from test_training import finished, get, sample

from gradwire.deploy.daemons import free_port
from gradwire.server.job.schedule import Passed, parse_schedule
from gradwire.worker.tasks import load
from gradwire.worker.training.sharding import epoch_order

EPOCHS, BATCH, CLIP = 2, 24, 0.5
ADAMW = ("adamw:weight_decay=0.1", torch.optim.AdamW, {"weight_decay": 0.1})
SGD = ("sgd:momentum=0.9,weight_decay=0.1", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1})


def reference(make: Any, options: dict[str, Any], clip: float) -> tuple[dict[str, torch.Tensor], float]:
    """The parameters that plain torch ends with, and the norm of its last gradient."""
    task = load("small_tasks:grouped")
    torch.manual_seed(5)
    model = task.model()
    named = dict(model.named_parameters())
    assert task.groups is not None
    rest = {"params": [named["0.weight"]]}
    optimizer = make([*task.groups(model), rest], lr=0.01, **options)
    schedule, steps = parse_schedule("cosine"), task.train_samples // BATCH
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: schedule.factor(
            Passed(epochs=(step + 0.5) / steps, of_job=(step + 0.5) / steps / EPOCHS)
        ),
    )
    norm = 0.0
    for epoch in range(EPOCHS):
        order = epoch_order(5, epoch, task.train_samples)
        for start in range(0, task.train_samples, BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(model, task.batch(order[start : start + BATCH])))
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")))
            optimizer.step()
            scheduler.step()
    return {name: parameter.detach() for name, parameter in named.items()}, norm


@pytest.mark.parametrize(
    ("mode", "workers", "optimizer", "clip"),
    [
        ("sync", 4, ADAMW, CLIP),
        ("sync", 4, SGD, 0.0),
        ("local:steps=1,correction=0", 1, ADAMW, 0.0),
        ("coded:redundancy=2", 4, SGD, 0.0),
    ],
)
def test_training_with_groups_is_torchs_with_param_groups(
    daemons: Daemons,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    workers: int,
    optimizer: tuple[str, Any, dict[str, Any]],
    clip: float,
) -> None:
    spec, make, options = optimizer
    output, http = tmp_path / "model.safetensors", free_port()
    server = daemons.server(
        *("--task", "small_tasks:grouped", "--min-workers", str(workers), "--epochs", str(EPOCHS)),
        *("--batch-size", str(BATCH // workers), "--seed", "5", "--output", str(output)),
        *("--optimizer", spec, "--learning-rate", "0.01", "--schedule", "cosine", "--mode", mode),
        *("--clip-norm", str(clip), "--overlap", "both", "--http-port", str(http)),
    )
    daemons.workers(server, workers, "--compressor", "none")
    finished(server)
    trained = load_file(output)
    monkeypatch.syspath_prepend(TASKS)
    expected, norm = reference(make, options, clip)
    assert trained.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-3, atol=1e-5)
    if clip:
        assert "and --clip-norm need whole pushes" in server.log
        measured = sample(get(http, "/metrics")[1], "gradwire_server_gradient_norm")
        assert measured == pytest.approx(norm, rel=1e-3)
