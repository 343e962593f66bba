"""Contents of a daemon's log lines, and the place where it serves metrics."""

from __future__ import annotations

import json
import logging
import logging.config
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gradwire.common import telemetry
from gradwire.common.addresses import listening_addresses, numeric
from gradwire.common.configuration import Effective, UsageError
from gradwire.common.telemetry import LOG_FIELDS, HttpEndpoint, add_log_fields, keep_warnings, set_up_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave logging as pytest had it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_lines_say_job_worker_rank_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json")
    version = 3
    add_log_fields(lambda: {"job": "j", "worker": "w1", "rank": 0, "version": version})
    logging.getLogger("gradwire.worker").info("one")
    version = 4
    logging.getLogger("gradwire.worker").info("two")
    one, two = lines(capsys)
    assert [one[name] for name in LOG_FIELDS] == ["j", "w1", 0, 3]
    assert (two["message"], two["version"]) == ("two", 4)


def test_a_line_about_a_worker_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    """On a server, which is no worker itself."""
    set_up_logging("json")
    add_log_fields(lambda: {"job": "j", "version": 7})
    logging.getLogger("gradwire.server").warning("lost", extra={"worker": "w2", "rank": 5})
    logging.getLogger("gradwire.server").warning("other")
    about, other = lines(capsys)
    assert [about[name] for name in LOG_FIELDS] == ["j", "w2", 5, 7]
    assert "worker" not in other


def test_text_for_people_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("text")
    add_log_fields(lambda: {"job": "j"})
    logging.getLogger("gradwire.worker").info("one")
    assert capsys.readouterr().err.endswith(" I one\n")


@dataclass
class Settings:
    http_port: int


def endpoint(port: int, origin: str, hung: Callable[[], str] = str, host: str = "127.0.0.1") -> HttpEndpoint:
    effective = Effective(settings=Settings(port), origins={"http_port": origin}, print_config=False)
    return HttpEndpoint(effective, host, CollectorRegistry(), lambda: False, lambda: "running", hung)


def test_a_process_that_hangs_is_alive_no_more_and_ready_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    why = [""]
    http = endpoint(0, "flag", lambda: why[0])
    try:
        found = re.search(r"on port (\d+)", caplog.text)
        assert found
        url = f"http://127.0.0.1:{found[1]}"
        with urllib.request.urlopen(f"{url}/livez", timeout=10) as response:
            assert response.read() == b"alive\n"
        why[0] = "it hangs"
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{url}/livez", timeout=10)
        with error.value as answer:
            assert (answer.code, answer.read()) == (503, b"it hangs\n")
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as response:
            assert response.read() == b"running\n"
    finally:
        http.close()


def test_the_next_scrape_is_due_after_the_interval_of_the_last_two(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    http = endpoint(0, "flag")
    now = [0.0]
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    due = [http.next_scrape_s]
    try:
        for now[0] in (100.0, 115.0, 1000.0):
            urllib.request.urlopen(f"http://127.0.0.1:{caplog.messages[-1].split()[-1]}/metrics").close()
            due.append(http.next_scrape_s)
    finally:
        http.close()
    assert due == [0, 0, 22.5, 0]  # none, one, every 15 s, not regularly


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]"])
def test_probes_are_answered_at_every_address_that_the_host_stands_for(
    caplog: pytest.LogCaptureFixture, host: str
) -> None:
    """gRPC listens for IPv6 too at 0.0.0.0, and HTTP did not."""
    caplog.set_level("INFO")
    http = endpoint(0, "flag", host=host)
    try:
        port = int(caplog.messages[-1].rpartition(" ")[2])
        for address in listening_addresses(""):
            with socket.create_connection((address, port), timeout=10) as connected:
                connected.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
                assert connected.makefile("rb").read().endswith(b"alive\n"), address
    finally:
        http.close()


@pytest.mark.parametrize(
    ("host", "missing", "addresses"),
    [
        ("", "127.0.0.1", ["::1"]),
        ("", "::1", ["127.0.0.1"]),
        ("0.0.0.0", "127.0.0.1", ["::"]),
        ("::", "::", ["0.0.0.0"]),
        ("[::1]", "127.0.0.1", ["::1"]),
        ("127.0.0.1", "127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_a_machine_without_ipv4_or_without_ipv6_listens_at_the_other(
    monkeypatch: pytest.MonkeyPatch, host: str, missing: str, addresses: list[str]
) -> None:
    def is_here(address: str) -> bool:
        return address != missing

    monkeypatch.setattr("gradwire.common.addresses._is_here", is_here)
    assert listening_addresses(host) == addresses


def test_an_address_keeps_its_interface() -> None:
    assert numeric(("fe80::1", 7, 0, 3)) == "fe80::1%3"
    assert numeric(("::1", 7, 0, 0)) == "::1"


def test_a_default_http_port_that_is_taken_is_replaced_and_the_log_says_by_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--http-port {port} on 127.0.0.1: Address already in use"):
            endpoint(port, "flag")
        instead = endpoint(port, "default")
    try:
        refused, said = caplog.messages
        assert refused == f"HTTP port {port} is in use; using a free one"
        found = re.fullmatch(r"metrics and probes on port (\d+)", said)
        assert found, said
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/readyz", timeout=10) as response:
            assert response.read() == b"running\n"
    finally:
        instead.close()


@pytest.mark.parametrize("framework", ["disables loggers", "raises the root's level", "replaces handlers"])
def test_warnings_reach_the_handlers_of_a_framework_once(
    capsys: pytest.CaptureFixture[str], framework: str
) -> None:
    log = logging.getLogger("gradwire.worker")
    if framework == "disables loggers":
        stream = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}
        root = {"handlers": ["all"], "level": "INFO"}
        logging.config.dictConfig({"version": 1, "handlers": {"all": stream}, "root": root})
        assert log.disabled
    else:
        level = logging.ERROR if framework.startswith("raises") else logging.INFO
        logging.basicConfig(force=True, level=level)
    keep_warnings()
    log.warning("a warning")
    log.info("a line")
    shown = capsys.readouterr().err
    assert shown.count("a warning") == 1
    assert shown.count("a line") == (0 if framework.startswith("raises") else 1)
    logging.root.setLevel(logging.INFO)
    keep_warnings()
    assert log.isEnabledFor(logging.INFO)


def test_a_script_may_silence_the_logger_of_the_package() -> None:
    ours = logging.getLogger("gradwire")
    ours.setLevel(logging.ERROR)
    keep_warnings()
    assert not logging.getLogger("gradwire.worker").isEnabledFor(logging.WARNING)
    ours.setLevel(logging.NOTSET)
