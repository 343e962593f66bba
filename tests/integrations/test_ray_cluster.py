"""A job on a Ray cluster whose nodes are lost, by `make check-ray`; without ray this is skipped.

A node is a raylet, whose processes end when it is killed.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gradwire

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make check-ray installs ray"),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own
]
MEMORY = {"object_store_memory": 80_000_000}
PATIENCE_S = 240
OPTIONS = ["--epochs", "0", "--max-steps", "8", "--batch-size", "2", "--http-port", "-1"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    noticed = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}  # the loss of a node
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": noticed, **MEMORY}
    found = Cluster(initialize_head=True, head_node_args=head)
    for resources in ({"ps": 1}, {"w": 1}, {"w": 1}, {"w": 1}):
        found.add_node(num_cpus=0, resources=resources, **MEMORY)
    ray.init(found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def training(folder: Path) -> Callable[[], Any]:
    """Steps that pause at version 3 until the file `continue` is there. Each worker leaves a file of its
    node, and one when it pauses. It returns the first and the last version that it saw."""

    def train() -> tuple[int, int]:
        import ray
        import torch

        import gradwire

        name, node = os.environ["GC_WORKER_ID"], ray.get_runtime_context().get_node_id()
        with gradwire.connect() as job:
            (folder / f"{name} {node}").touch()
            first = job.version
            model, optimizer = job.attach(
                net := torch.nn.Linear(4, 1), torch.optim.SGD(net.parameters(), 0.1)
            )
            for (inputs,) in job.batches(torch.utils.data.TensorDataset(torch.ones(64, 4))):
                if job.version == 3:
                    (folder / f"paused {name}").touch()
                    while not (folder / "continue").exists():
                        time.sleep(0.02)
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return first, job.version

    return train


def nodes_of(job: Future[Any], folder: Path, pattern: str, count: int) -> list[str]:
    """Wait for so many files; return the last words of their names."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := [each.name.split()[1] for each in folder.glob(pattern)]) < count:
        assert not job.done(), job.result()
        assert time.monotonic() < deadline, f"{found} of {count} {pattern}"
        time.sleep(0.05)
    return found


def remove(cluster: Any, node: str) -> None:
    (found,) = (each for each in cluster.list_all_nodes() if each.node_id == node)
    cluster.remove_node(found, allow_graceful=False)


def remove_server(cluster: Any) -> None:
    import ray

    (node,) = (each["NodeID"] for each in ray.nodes() if each["Alive"] and "ps" in each["Resources"])
    remove(cluster, node)


NEEDS: Any = {"server_resources": {"ps": 1}, "worker_resources": {"w": 1}}


def start(folder: Path, state: str = "") -> Future[list[Any]]:
    from gradwire.integrations.ray import run_on_ray

    return ThreadPoolExecutor(1).submit(
        run_on_ray, training(folder), workers=2, options=OPTIONS, state=state, **NEEDS
    )


def test_a_worker_whose_node_is_lost_returns_elsewhere(cluster: Any, tmp_path: Path) -> None:
    job = start(tmp_path)
    nodes_of(job, tmp_path, "paused *", 2)
    remove(cluster, *nodes_of(job, tmp_path, "w1 *", 1))
    nodes_of(job, tmp_path, "w1 *", 2)
    (tmp_path / "continue").touch()
    assert job.result(PATIENCE_S) == [(0, 8), (3, 8)]


def test_a_job_whose_server_is_lost_resumes_from_a_shared_folder(cluster: Any, tmp_path: Path) -> None:
    job = start(tmp_path, state=str(tmp_path / "state"))
    nodes_of(job, tmp_path, "paused *", 2)
    remove_server(cluster)
    for each in tmp_path.glob("paused *"):
        each.unlink()
    cluster.add_node(num_cpus=0, resources={"ps": 1}, **MEMORY)
    nodes_of(job, tmp_path, "paused *", 2)  # again; the lost server's process may outlive its node
    (tmp_path / "continue").touch()
    assert job.result(PATIENCE_S) == [(3, 8), (3, 8)]

    # Without such a folder the job is lost.
    (tmp_path / "continue").unlink()
    (tmp_path / "other").mkdir()
    job = start(tmp_path / "other")
    nodes_of(job, tmp_path / "other", "paused *", 2)
    remove_server(cluster)
    with pytest.raises(gradwire.ScriptError, match=r"(?s)node or process is lost.* with state=FOLDER"):
        job.result(PATIENCE_S)


def test_bad_input_is_named_with_its_remedy(cluster: Any, tmp_path: Path) -> None:
    from ray.exceptions import RayActorError

    from gradwire.integrations.ray import run_on_ray

    for asked, message in (
        (
            {"workers": 4, "wait_seconds": 1},
            r"no room for a server .*'ps'.* 4 workers .*'w'.*add nodes",
        ),
        ({"options": ["--mode", "sink"]}, "gc-server ended with code 2: .*unknown mode 'sink'"),
        ({"options": ["--port=7"]}, "'--port'.* are set by it; leave them out"),
    ):
        with pytest.raises(gradwire.ScriptError, match=message):
            run_on_ray(training(tmp_path), **{"workers": 1, **NEEDS, **asked})
    with pytest.raises(ZeroDivisionError):
        run_on_ray(lambda: 1 / 0, workers=1, **NEEDS)

    def lose() -> None:
        raise RayActorError  # of an actor of the script

    with pytest.raises(RayActorError):
        run_on_ray(lose, workers=1, **NEEDS)
