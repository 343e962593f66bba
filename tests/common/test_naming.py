"""Names that users choose are not taken for structure: in file names, logs, metrics, reports and plots."""

from __future__ import annotations

import dataclasses
import logging
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gradwire.common.configuration import UsageError, read
from gradwire.common.naming import NAME_RULE, file_name, own_name, printable, why_no_label, why_no_name
from gradwire.common.telemetry import set_up_logging
from gradwire.deploy.plot import write_plot
from gradwire.deploy.report import RunResult, result_of, table_of
from gradwire.proto.messages import EpochStatus
from gradwire.server.metrics import NAMES, ServerMetrics
from gradwire.settings import COMMANDS, WorkerSettings

from ..deploy.test_run_report import OPTIONS, shown, status

HOSTILE = [
    *("", ".", "..", "../../x", "/etc/passwd", "a/b", "a\\b", "~", "~root", "-rf", ".hidden", "w0.", "CON"),
    *("W0", "w0", "w0~", "\u00e9", "e\u0301", "\u017f", "s", "\u212a", "k", "x" * 128, "x" * 5000, "\udcff"),
    *("a\nb", "a\r\nb", "a\x1b[2Jb", "a\0b", "\u202ea", "a\u2028b", "\x85", "12:00:00 I a line"),
    *('{"base64": "AA=="}', "$bytes", "base64", '"} 1\nx{y="', "%s %d %n", "{0.__class__}", "${HOME}"),
    *("[/x]", "[red]acc", "[", "\\[b]", ":fire:", r"$\frac$", "$x^2$", r"\$x$", "a$", "$$", "_loss"),
    *("w0#f", "w0?x=1", "w%2F0", "user:pass@host", "[red]w0[/]", "name:key=value,other=1", "__metadata__"),
]
NAMES_OF_USERS = st.sampled_from(HOSTILE) | st.text(max_size=200)


def test_names_of_workers_have_one_rule() -> None:
    for good in ("w0", "W-0_a.b", "0", "x" * 128, "host.example.org-12345", own_name()):
        assert why_no_name(good) == ""
    good_here = {"CON", "W0", "w0", "w0.", "s", "k", "x" * 128, "base64"}
    for bad in {*HOSTILE} - good_here:
        assert why_no_name(bad).startswith(f"expected {NAME_RULE}, got "), bad
        assert why_no_name(bad).isprintable()


@pytest.mark.parametrize("host", ["", "-.-", "héte_1", "a b\n", "x" * 300])
def test_a_worker_without_a_name_has_one_that_is_good(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert why_no_name(own_name()) == ""
    assert own_name() == own_name()


def test_a_flag_for_a_name_says_the_rule() -> None:
    with pytest.raises(UsageError, match=r"--worker-id .*expected 1 to 128 characters, of ASCII letters"):
        read(WorkerSettings, COMMANDS, argv=["--server", "localhost", "--worker-id", "a/b"], environ={})


@given(st.lists(NAMES_OF_USERS, min_size=1, max_size=3), st.lists(NAMES_OF_USERS, min_size=1, max_size=3))
def test_different_names_have_different_files_on_every_disk(one: list[str], other: list[str]) -> None:
    for names in (one, other):
        name = file_name(*names)
        assert re.fullmatch(r"[a-z0-9][a-z0-9._~-]{0,240}", name), name  # no separator, and one case
        assert ".." not in name
        assert not name.endswith(".")
        assert file_name(*names) == name
    assert (file_name(*one) == file_name(*other)) == (one == other)


def test_short_names_in_lower_case_stay_readable() -> None:
    assert file_name("9f86d081884c", "w0") == "9f86d081884c.w0"
    assert re.fullmatch(r"job-desktop-1~[0-9a-f]{20}", file_name("job", "DESKTOP-1"))


@given(st.text())
def test_a_text_that_is_shown_is_one_line_without_controls(text: str) -> None:
    assert printable(text).isprintable()
    assert text.isprintable() == (printable(text) == text)
    if not why_no_label(text):
        assert printable(text) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES_OF_USERS.filter(str.isascii) | st.text(max_size=200))
def test_a_log_has_one_line_at_its_edge_for_each_record(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    handlers = logging.getLogger().handlers[:]
    capsys.readouterr()
    try:
        set_up_logging("text")
        logging.getLogger("gradwire.server").warning("%s is lost: %r", name, name)
        try:
            raise ValueError(name)
        except ValueError:
            logging.getLogger("gradwire.server").exception("failed")
    finally:
        logging.getLogger().handlers[:] = handlers
    lines = capsys.readouterr().err.removesuffix("\n").split("\n")
    at_the_edge = [line for line in lines if not line.startswith("    ")]
    assert [line[9:11] for line in at_the_edge] == ["W ", "E "], lines
    assert all(line.isprintable() for line in lines)


@given(st.lists(NAMES_OF_USERS.filter(lambda name: "\udcff" not in name), max_size=NAMES, unique=True))
def test_metrics_are_read_again_as_they_were_exported(names: list[str]) -> None:
    """Also those that a server would have refused."""
    metrics = ServerMetrics("none")
    measured = {name: float(place) for place, name in enumerate(names)}
    metrics.evaluated(measured)
    metrics.job_id = 'a"b\\c\nd'
    families = {
        each.name: each for each in text_string_to_metric_families(generate_latest(metrics.registry).decode())
    }
    found = {each.labels["metric"]: each.value for each in families["gradwire_server_validation"].samples}
    assert found == measured
    assert families["gradwire_server_members"].samples[0].labels["job_id"] == 'a"b\\c\nd'


def run_that_measured(name: str) -> RunResult:
    evaluations = tuple(EpochStatus(epoch=epoch, version=11 * epoch, metrics={name: 0.5}) for epoch in (1, 2))
    return result_of(OPTIONS, status(evaluations=evaluations))


@settings(deadline=None)
@given(NAMES_OF_USERS.filter(lambda name: len(name) <= 128 and name == name.strip()))
def test_a_table_shows_a_metric_by_its_name(name: str) -> None:
    """A name is neither markup nor a line break, also if the server would have refused it."""
    run = run_that_measured(name)
    console_text = shown(table_of(run, run), width=2000)
    assert f" validation {printable(name)} " in console_text


@settings(max_examples=3, deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20))
@example(r"$\frac$")
@example("$x^2$")
@example(r"\$x$")
def test_a_plot_shows_task_and_metric_by_their_names(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    path = tmp_path_factory.mktemp("plot") / "plot.svg"
    run = dataclasses.replace(run_that_measured(name), task=name)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        write_plot(path, [run, run])
    drawn = {"".join(each.itertext()) for each in ElementTree.parse(path).iter() if each.tag.endswith("text")}
    assert drawn >= {
        f"validation {name}",
        f"{name.capitalize()} over epochs",
        f"{name}: {run.workers} workers, seed {run.seed}",
    }


def test_processes_with_the_same_host_name_and_number_have_different_names() -> None:
    """Containers that share the host's network are such."""
    program = (
        "import os; os.getpid = lambda: 1\nfrom gradwire.common.naming import own_name; print(own_name())"
    )
    names = {subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(2)}
    assert len(names) == 2
    assert all("-1-" in name for name in names)
