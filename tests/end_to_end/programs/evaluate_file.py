"""Evaluate what a server has written: `evaluate_file TASK FILE` logs the metrics as JSON."""

import json
import sys

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from gradwire.worker.tasks import load


def main(task_name: str, path: str) -> None:
    torch.set_num_threads(1)
    task = load(task_name)
    model = task.model()
    model.load_state_dict(load_file(path), strict=True)
    model.eval()
    with torch.no_grad():
        metrics = {name: float(value) for name, value in task.evaluate(model).items()}
    print("metrics", json.dumps(metrics), file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:3])
