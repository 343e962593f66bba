"""A job on a Ray cluster: gc-server is an actor, and each worker a task that Ray starts again elsewhere.

One placement group holds them all, so a job starts as a whole or not at all. A worker that is lost returns
with its worker id. The loss of the server is the loss of the job, unless `state` is a folder that all nodes
share: then everything starts again, and the job resumes there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import (
    get_node_ip_address,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..server.cli import main
from ..worker.script.api import UnreachableError
from ..worker.script.terms import JobFinished, ScriptError

log = logging.getLogger("gradwire.integrations")

RESTARTS = 5  # of each worker, and of the whole job after the loss of its server
END_S = 90.0  # in which a job ends after its last worker, unless they left it before its end
TICK_S = 5.0
OURS = {"--host", "--port", "--state", "--token-file", "--script", "--insecure"}


def run_on_ray(
    train: Callable[[], Any],
    *,
    workers: int,
    options: Sequence[str] = (),
    state: str = "",
    server_resources: Mapping[str, float] | None = None,
    worker_resources: Mapping[str, float] | None = None,
    wait_seconds: float = 60.0,
) -> list[Any]:
    """Train with a server and workers on the Ray cluster that this process is connected to.

    Args:
        train: the script of each worker, which calls `gradwire.connect()` without an address. Ray pickles it,
            and its result.
        options: those of gc-server, such as `["--epochs", "10"]`.
        state: folder that all nodes share, or URL, from which a job resumes; empty for none.
        server_resources, worker_resources: resources of Ray for each, such as `{"GPU": 1}`; one CPU if None.
        wait_seconds: time in which the cluster must have room for all, and later for one worker.

    Returns:
        The result of `train` at each worker, in order; None for a worker that was lost near the end.

    Raises:
        ScriptError: the cluster has no room, the server has failed or is lost, or the job cannot end.
        Exception: the first one that `train` raised.
    """
    if taken := OURS & {each.partition("=")[0] for each in options}:
        raise ScriptError(f"run_on_ray: options={sorted(taken)!r} are set by it; leave them out")
    needs = [dict(each or {"CPU": 1}) for each in (server_resources, *[worker_resources] * workers)]
    for _ in range(1 + RESTARTS):
        try:
            return _Attempt(needs, wait_seconds).run(train, [f"--min-workers={workers}", *options], state)
        except RayActorError as error:
            if isinstance(error, RayTaskError):  # an actor that `train` has lost
                raise
            if not state:
                raise ScriptError(
                    f"run_on_ray: gc-server's node or process is lost, and the job with it ({error}); with "
                    "state=FOLDER, which all nodes share, or a URL, it would resume elsewhere"
                ) from None
            log.warning("run_on_ray: the server is lost; the job continues from %s", state)
    raise ScriptError(
        f"run_on_ray: the server was lost {1 + RESTARTS} times; the job in {state} has not ended"
    )


class _Attempt:
    """One start of the server and all workers, within resources that are reserved first."""

    def __init__(self, needs: list[dict[str, float]], wait_s: float) -> None:
        self._needs, self._wait_s = needs, wait_s
        self._group: Any = placement_group(needs, strategy="SPREAD")

    def _options(self, number: int) -> dict[str, Any]:
        """Return Ray's options of the server, number 0, or of a worker."""
        need = dict(self._needs[number])
        # A worker may take the place of another one, so that it returns after the loss of its node.
        place = PlacementGroupSchedulingStrategy(self._group, 0 if number == 0 else -1)
        return {
            "num_cpus": need.pop("CPU", 0),
            "num_gpus": need.pop("GPU", 0),
            "resources": need,
            "scheduling_strategy": place,
        }

    def run(self, train: Callable[[], Any], options: list[str], state: str) -> list[Any]:
        """Return the results of the workers. Raises RayActorError if the server is lost."""
        try:
            self._check(self._group.wait(self._wait_s))
            token = secrets.token_hex(32)
            server: Any = ray.remote(_Server).options(**self._options(0)).remote()
            address = ray.get(server.address.remote(state))
            port = f"--port={address.rpartition(':')[2]}"
            of_state = [f"--state={state}/state"] if state else []
            over = server.run.remote([*options, port, *of_state], token)
            # Ray otherwise gives the process of a worker, with its signal handlers, to the next one.
            work: Any = ray.remote(max_calls=1, max_retries=RESTARTS)(_work)
            tasks = list[Any]()
            for number in range(1, len(self._needs)):
                name = f"w{number - 1}"
                variables = {"GC_SERVER": address, "GC_WORKER_ID": name}
                variables |= {"GC_STATE": f"{state}/{name}"} if state else {}
                tasks.append(work.options(**self._options(number)).remote(train, variables, token, [over]))
            self._watch(over, tasks)
            return list(ray.get(tasks))
        finally:
            remove_placement_group(self._group)  # ends all that run there

    def _check(self, placed: bool) -> None:
        if not placed:
            raise ScriptError(
                f"run_on_ray: no room for a server {self._needs[0]} and {len(self._needs) - 1} workers "
                f"{self._needs[-1]} within {self._wait_s:g} s; free are {ray.available_resources()}; add "
                "nodes, lower workers=, or reserve less by server_resources= and worker_resources="
            )

    def _watch(self, over: Any, tasks: list[Any]) -> None:
        """Wait until server and workers have ended. Raises the exception that ends the job earlier."""
        left, room = [over, *tasks], time.monotonic()
        placed: float | None = room  # None after the warning
        while left:
            done, left = ray.wait(left, timeout=TICK_S)
            if placement_group_table(self._group)["state"] != "RESCHEDULING":
                placed = time.monotonic()
            elif placed and self._fits() and time.monotonic() > placed + self._wait_s:
                placed = None
                log.warning("run_on_ray: a worker waits for %s, which other jobs hold", self._needs[-1])
            for each in done:
                result = ray.get(each)
                if each == over and result[0]:
                    raise ScriptError(f"run_on_ray: gc-server ended with code {result[0]}: {result[1]}")
            if done or over not in left or (left != [over] and self._fits()):
                room = time.monotonic()
            elif left == [over] and time.monotonic() > room + END_S:
                raise ScriptError(
                    "run_on_ray: all workers returned, and the job is not finished; train must take the "
                    "batches of job.batches or job.steps until they end"
                )
            elif left != [over] and time.monotonic() > room + self._wait_s:
                raise ScriptError(
                    f"run_on_ray: no node with {self._needs[-1]} for a worker is left for "
                    f"{self._wait_s:g} s; add nodes"
                )

    def _fits(self) -> bool:
        """Return True if a node that is alive has the resources of a worker, free or not."""
        need = self._needs[-1].items()
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return any(all(node.get(name, 0) >= value for name, value in need) for node in alive)


class _Said(io.TextIOBase):
    """Standard error that keeps its last line, which says why a server has ended."""

    def __init__(self) -> None:
        self._stream, self.last = sys.stderr, ""

    def write(self, text: str, /) -> int:
        self.last = text.strip() or self.last
        return self._stream.write(text)


class _Server:
    """The actor: gc-server in its main thread."""

    def address(self, state: str) -> str:
        """Return the server's host:port, and mark the folder of `state`.

        The port is free now. If another process takes it before `run`, gc-server ends and names it.
        """
        if state and "://" not in state:
            Path(state).mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(state, "shared").touch()
        host = get_node_ip_address()
        with socket.create_server((host, 0)) as listener:
            return f"{host}:{listener.getsockname()[1]}"

    def run(self, options: Sequence[str], token: str) -> tuple[int, str]:
        """Run the server to its end; return its exit code and the last line of its log."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said := _Said()):
            code = main([*options, "--script", "--insecure", f"--token-file={_write(token, folder)}"])
        return code, said.last


def _write(token: str, folder: str) -> Path:
    path = Path(folder, "token")
    path.touch(0o600)
    path.write_text(token)
    return path


def _work(train: Callable[[], Any], variables: Mapping[str, str], token: str, over: Sequence[Any]) -> Any:
    """Train as one worker. over: the server's end, after which a worker that is started has no work."""
    if ray.wait([*over], timeout=0)[0]:
        return None
    own = variables.get("GC_STATE", "")
    if own and "://" not in own and not Path(own).with_name("shared").exists():
        raise ScriptError(
            f"run_on_ray: state={Path(own).parent} is not on a folder that all nodes share: "
            f"{get_node_ip_address()} cannot see it; choose one that they share, or a URL"
        )
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {**variables, "GC_TOKEN_FILE": str(_write(token, folder))}
        try:
            return train()
        except (JobFinished, UnreachableError):
            if not ray.wait([*over], timeout=END_S)[0]:
                raise
            return None
