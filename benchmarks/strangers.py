"""`gc-bench strangers`: throughput that a server loses to calls from outside its job.

A job of real daemons on this machine, with tokens. In windows of time a stranger makes the calls listed in
`stranger`, all of which have to be refused; between these windows it is silent. The ratio compares the median
versions per second in windows with and without calls. It includes the stranger's own use of this machine's
cores. The same job without a stranger has to end with the same parameters.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.exits import Exit
from ..deploy.daemons import at, server_arguments, worker_arguments
from ..deploy.engine import PARAMETERS, free_port
from ..deploy.processes import Child, Children
from ..deploy.status import Ask, asking
from ..proto.messages import Phase, StatusResponse
from ..settings import RunSettings
from . import output
from .arguments import BenchError, amount, at_least_one, json_option, option
from .jobs import wait_for

TOKEN, INSIDER = "of-this-job-0123456789", "of-an-insider-0123456789"
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class StrangersReport:
    """The measurements of a job, in windows without calls (calm) and with calls (disturbed).

    Attributes:
        sha256: hash of the final parameters.
        calm_per_s, disturbed_per_s: versions per second in each window.
        calm_rss_mib, disturbed_rss_mib: the server's resident memory after each window, in MiB.
        made: number of calls, by kind.
        answered: number of calls, by status code.
    """

    sha256: str
    calm_per_s: list[float]
    disturbed_per_s: list[float]
    calm_rss_mib: list[float]
    disturbed_rss_mib: list[float]
    made: dict[str, int]
    answered: dict[str, int]

    @property
    def ratio(self) -> float:
        """Median versions per second in disturbed windows, relative to calm ones."""
        return statistics.median(self.disturbed_per_s) / statistics.median(self.calm_per_s)


HEADINGS = ("calls", "per second", "answered OK", "throughput", "server's memory, MiB", "same parameters")


def cells(outcome: StrangersReport, rate: float, calm_sha256: str) -> list[object]:
    """Return the cells of the table's row, in the order of `HEADINGS`.

    Args:
        outcome: measurements of the job with the stranger.
        rate: calls per second.
        calm_sha256: hash of the final parameters of the job without the stranger.
    """
    rss = outcome.calm_rss_mib[0], outcome.disturbed_rss_mib[-1]
    return [
        sum(outcome.made.values()),
        f"{rate:g}",
        outcome.answered.get("OK", 0),
        f"{outcome.ratio:.3f}",
        f"{rss[0]:.0f} to {rss[1]:.0f}",
        "yes" if outcome.sha256 == calm_sha256 else "**no**",
    ]


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def trained(
    settings: RunSettings, directory: Path, windows: int, window_s: float, rate: float, seed: int
) -> StrangersReport:
    """Run a job to its end, with a stranger unless `windows` is 0, and return the measurements.

    Args:
        settings: options of the job.
        directory: for logs, tokens and parameters.
        windows: number of pairs of a calm and a disturbed window.
        window_s: duration of a window.
        rate: calls per second in disturbed windows.
        seed: determines the kinds of calls.

    Raises:
        BenchError: if a process fails, or the job is over before the windows.
    """
    files = {name: directory / name for name in ("tokens", "token", "insider")}
    directory.mkdir(parents=True, exist_ok=True)
    files["tokens"].write_text(f"{TOKEN}\ninsider:{INSIDER}\n", encoding="utf-8")
    files["token"].write_text(TOKEN, encoding="utf-8")
    files["insider"].write_text(INSIDER, encoding="utf-8")
    own, port = ("--token-file", str(files["token"])), free_port()
    with Children(directory) as children:
        arguments = server_arguments(settings, port, directory / PARAMETERS)
        server = children.start(
            "server", "gradwire.server.cli", [*arguments, "--token-file", str(files["tokens"])]
        )
        for rank in range(settings.workers):
            arguments = [*worker_arguments(settings, port, rank), *own]
            children.start(f"worker-{rank}", "gradwire.worker.cli", arguments)
        with asking(at(port), files={"token_file": str(files["token"])}) as ask:
            _wait(ask, server, lambda status: status.version > 0)
            found: dict[str, list[float]] = {"calm": [], "disturbed": []}
            rss: dict[str, list[float]] = {"calm": [], "disturbed": []}
            told: dict[str, Any] = {"made": {}, "answered": {}}
            if windows:
                call = [at(port), str(files["insider"]), f"{rate:g}", f"{seed}"]
                stranger = children.start("stranger", "gradwire.benchmarks.stranger", call)
                wait_for(lambda: "ready" in stranger.log.read_text(encoding="utf-8") or None, [stranger])
                for window in range(2 * windows):
                    name = "disturbed" if window % 2 else "calm"
                    found[name].append(_pace(ask, window_s))
                    rss[name].append(rss_mib(server.pid))
                    output.say(f"{name}: {found[name][-1]:.1f} versions per second, {rss[name][-1]:.0f} MiB")
                    stranger.send(signal.SIGUSR1)
                stranger.send(signal.SIGTERM)
                wait_for(lambda: stranger.code == 0 or None, [stranger])
                told = json.loads(stranger.log.read_text(encoding="utf-8").splitlines()[-1])
            end = _wait(ask, server, lambda status: status.phase is Phase.FINISHED)
    return StrangersReport(
        sha256=end.parameters_sha256,
        calm_per_s=found["calm"],
        disturbed_per_s=found["disturbed"],
        calm_rss_mib=rss["calm"],
        disturbed_rss_mib=rss["disturbed"],
        made=told["made"],
        answered=told["answered"],
    )


def _wait(ask: Ask, server: Child, until: Callable[[StatusResponse], bool]) -> StatusResponse:
    """Poll the server until its status satisfies `until`, and return that status."""
    return wait_for(lambda: status if (status := ask()) is not None and until(status) else None, [server])


def _pace(ask: Ask, seconds: float) -> float:
    """Return the versions per second over the next `seconds`.

    Raises:
        BenchError: if the job is over by then.
    """
    began, first = time.monotonic(), ask()
    time.sleep(seconds)
    last, now = ask(), time.monotonic()
    if first is None or last is None or last.phase is not Phase.RUNNING:
        raise BenchError("the job ended before the last window; give more --epochs")
    return (last.version - first.version) / (now - began)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--windows", at_least_one, 10, "N", "number of windows with calls, and of those without")
    option(parser, "--seconds", amount, 10, "N", "seconds of each window")
    option(parser, "--rate", amount, 1000, "N", "calls per second in windows with calls")
    option(parser, "--epochs", at_least_one, 600, "N", "epochs of the job")
    option(parser, "--seed", int, 1, "N", "seed of the calls")
    json_option(parser, "the figures")


def run(given: argparse.Namespace) -> int:
    """Measure the job with and without a stranger; return 0 if both have the same parameters."""
    settings = RunSettings(
        task="gradwire.benchmarks.paced:digits:seconds=0.0005",
        workers=WORKERS,
        epochs=given.epochs,
        compressor="4bit",
        downlink="4bit",
        seed=1,
        http_port=-1,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = trained(settings, Path(folder) / "a", given.windows, given.seconds, given.rate, given.seed)
        calm = trained(settings, Path(folder) / "b", 0, 0.0, 0.0, 0)
    print(output.table(HEADINGS, [cells(found, given.rate, calm.sha256)]))
    for name, number in found.made.items():
        output.say(f"{name}: {number}")
    output.write_json(given.json, asdict(found))
    return Exit.DONE if found.sha256 == calm.sha256 else Exit.INTERNAL
