"""What a daemon's log lines carry."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from gradwire.telemetry import LOG_FIELDS, add_log_fields, set_up_logging


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
