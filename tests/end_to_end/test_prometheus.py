"""A real Prometheus with deploy/prometheus, which scrapes real jobs (Debian: apt install prometheus)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import PATIENCE_S, Daemon, Daemons
from same_bits_recorder import free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "gradwire.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "gradwire.json"


def test_every_alert_fires_where_it_should_and_nowhere_else() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", str(Path(__file__).with_name("rules.yml"))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def queries_of_dashboard(job: str) -> list[str]:
    """The queries of each panel for one job, and one for the list of jobs."""
    board = json.loads(DASHBOARD.read_text())
    source, jobs = board["templating"]["list"]
    assert (source["type"], jobs["name"]) == ("datasource", "job_id")
    metric = re.fullmatch(r"label_values\((\w+), job_id\)", jobs["query"]["query"])
    assert metric
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [
        f'{metric[1]}{{job_id="{job}"}}',
        *(each.replace("$job_id", job).replace("$__rate_interval", "5m") for each in found),
    ]


class Prometheus:
    def __init__(self, folder: Path, *targets: int) -> None:
        rules = folder / "rules.yml"
        rules.write_text(RULES.read_text())
        scrape = {
            "job_name": "training",
            "static_configs": [{"targets": [f"127.0.0.1:{at}" for at in targets]}],
        }
        often = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        configuration = {"global": often, "rule_files": [str(rules)], "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(json.dumps(configuration))  # which is YAML
        self._at = f"127.0.0.1:{free_port()}"
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(
                        "prometheus",
                        f"--config.file={folder}/prometheus.yml",
                        f"--web.listen-address={self._at}",
                    ),
                    f"--storage.tsdb.path={folder}/data",
                ],
                stdout=log,
                stderr=log,
            )

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of every series, once there is one."""
        url = f"http://{self._at}/api/v1/query?query={urllib.parse.quote(query)}"
        deadline = time.monotonic() + PATIENCE_S
        found: list[dict[str, Any]] = []
        while not found:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, f"no data for {query}"
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    found = json.load(answer)["data"]["result"]
            except OSError:  # it does not listen yet
                found = []
            time.sleep(0.1)
        return [(each["metric"], float(each["value"][1])) for each in found]


@pytest.fixture
def http() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture
def prometheus(tmp_path: Path, http: tuple[int, int]) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path, *http)
    yield started
    started.process.kill()
    started.process.wait()


def test_two_jobs_on_one_port_are_told_apart_and_one_is_dead(
    daemons: Daemons, prometheus: Prometheus, http: tuple[int, int], tmp_path: Path
) -> None:
    def start(name: str, slow_s: float) -> tuple[Daemon, Daemon, str]:
        task = ("--task", f"small_tasks:slow_digits:slow={slow_s}", "--epochs", "2", "--batch-size", "64")
        at = (
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--http-port",
            str(http[0]),
            "--state",
            str(tmp_path / name),
        )
        server = daemons.plain("gradwire.server.cli", *task, *at)
        port = server.wait_for(r"listening on \S+:(\d+)").group(1)
        worker = daemons.worker(f"127.0.0.1:{port}", "--http-port", str(http[1]))
        return server, worker, server.fields("listening on")["job"]

    server, worker, first = start("first", 0.3)
    assert (worker.wait(), server.wait()) == (0, 0)
    server, worker, second = start("second", 60)
    prometheus.ask(f'gradwire_server_phase{{job_id="{second}"}}')
    for query in (
        *queries_of_dashboard(first),
        "gradwire_server_state_free_bytes > 0",
        "time() - gradwire_server_checkpoint_timestamp_seconds < 600",
        "gradwire_server_min_workers == 1",
    ):
        prometheus.ask(f"last_over_time(({query})[1h:1s])")
    for each in (server, worker):
        each.signal(signal.SIGKILL)

    (labels, seen), *others = prometheus.ask(
        'max_over_time(gradwire_server_phase{phase="finished"}[1h]) == 1'
    )
    assert (labels["job_id"], labels["job"], seen, others) == (first, "training", 1, [])
    dead = prometheus.ask('ALERTS{alertname="GradwireServerGone"}')
    assert [labels["job_id"] for labels, _ in dead] == [second]
