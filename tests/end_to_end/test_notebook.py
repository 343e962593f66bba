"""The notebook in examples/, cell by cell."""

from __future__ import annotations

from daemons import Daemons

STEPS = 11  # in an epoch of 1408 samples


def test_its_cells_train_are_interrupted_and_run_again(daemons: Daemons) -> None:
    server = daemons.server("--script", "--epochs", "20", "--batch-size", "128", "--compressor", "none")
    notebook = daemons.program("script_notebook", "run", server.address)
    assert notebook.wait() == 0, notebook.log
    found = {name: notebook.fields(f"^{name}$") for name in ("interrupted", "train", "continue", "again")}
    versions = {name: each["version"] for name, each in found.items()}
    assert versions == {"interrupted": 9, "train": 2 * STEPS, "continue": 4 * STEPS, "again": 6 * STEPS}
    assert found["continue"]["steps"] == 4 * STEPS + 1  # one is begun twice
    assert notebook.fields("^connected$")["version"] == 4 * STEPS
    assert found["again"]["accuracy"] > 0.75
    server.wait_for(r"after \d+ epochs, version 44: accuracy")
    server.wait_for(r"rank 0 \(.*\) left: the script has ended")
