"""A job with a preset, by real processes: its workers take the compressor that it sets, or their own."""

from __future__ import annotations

import pytest
from daemons import Daemons
from test_training import finished, small_job


@pytest.mark.parametrize("preset", ["low-communication", "sparse-sgd"])
def test_the_job_tells_its_workers_and_an_option_of_a_worker_overrides_it(
    daemons: Daemons, preset: str
) -> None:
    server = small_job(daemons, "--preset", preset, workers=4)
    told = server.wait_for(f"^preset {preset} sets .*--compressor (\\S+)")[1]
    options: list[tuple[str, ...]] = [(), ("--preset", preset), ("--compressor", "8bit")]
    workers = [
        daemons.worker(server.address, "--worker-id", f"w{number}", *more)
        for number, more in enumerate(options)
    ]
    workers.append(
        daemons.worker(server.address, "--worker-id", "w3", environ={"GC_COMPRESSOR": "topk:ratio=4"})
    )
    # By its log: the job may be over before a second question.
    used = {name: server.wait_for(rf"\({name}\) joined with (\S+)$")[1] for name in ("w0", "w1", "w2", "w3")}
    assert used == {"w0": told, "w1": told, "w2": "8bit", "w3": "topk:ratio=4"}
    for worker in workers[:2]:
        worker.wait_for(f"^compressor {told}, by --preset {preset} of the server$")
    status = finished(server)
    assert [worker.wait() for worker in workers] == [0] * 4
    assert status.parameters_sha256


def test_a_worker_that_insists_on_another_preset_does_not_join(daemons: Daemons) -> None:
    server = small_job(daemons, "--preset", "sparse-sgd", workers=1)
    worker = daemons.worker(server.address, "--preset", "diloco")
    assert worker.wait() == 2
    worker.wait_for("--preset diloco: job .* has --preset sparse-sgd; start the server with --preset diloco")
