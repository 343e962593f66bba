"""gc-run's report, table, plot and progress from a canned status."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gradwire.deploy.cli import baseline_of
from gradwire.deploy.live import LiveJob
from gradwire.deploy.plot import PlotError, shown_metric, write_plot
from gradwire.deploy.progress import LineProgress, LiveProgress, progress
from gradwire.deploy.report import RunResult, ratio, result_of, size, table_of, to_json, write_atomically
from gradwire.deploy.texts import when
from gradwire.deploy.worth import rate, remark
from gradwire.planning.job import JobProfile, StepOptions
from gradwire.proto.job import job_message
from gradwire.proto.messages import (
    EpochStatus,
    LossPoint,
    LostStatus,
    MemberStatus,
    Phase,
    StatusResponse,
    Traffic,
)
from gradwire.proto.status import fraction, seconds_left
from gradwire.settings import JobTerms, RunSettings

PROMISED_KEYS = {
    *("task", "mode", "compressor", "downlink", "seed", "workers", "steps", "epochs", "seconds"),
    *("validation_accuracy", "validation_loss", "wire_bytes_up", "wire_bytes_down", "raw_bytes_up"),
    *("raw_bytes_down", "refused_pushes", "parameters_sha256", "accuracy_by_epoch"),
}
OPTIONS = RunSettings(epochs=3)


def status(**changes: object) -> StatusResponse:
    """A finished job of three epochs whose second evaluation was lost."""
    reply = StatusResponse(
        job=job_message(JobTerms(id="0123", work="gradients", epochs=3)),
        phase=Phase.FINISHED,
        waiting="",
        version=33,
        epoch=3,
        epoch_progress=0.0,
        members=(
            MemberStatus(
                worker="worker-0",
                rank=0,
                attached=True,
                heard_seconds=0.1,
                activity="computing",
                compressor="4bit",
                pushes=33,
            ),
        ),
        lost=(LostStatus(worker="worker-3", rank=3, reason="lease expired", version=20),),
        evaluations=(
            EpochStatus(epoch=1, version=11, metrics={"loss": 2.0, "accuracy": 0.25}),
            EpochStatus(epoch=3, version=33, metrics={"loss": 0.5, "accuracy": 0.875}),
        ),
        traffic=Traffic(
            wire_bytes_up=1_000_000,
            wire_bytes_down=8_000_000,
            raw_bytes_up=7_600_000,
            raw_bytes_down=8_000_000,
            payload_bytes_up=950_000,
            payload_bytes_down=950_000,
            compressed_payload_bytes_up=900_000,
            compressed_raw_bytes_up=7_200_000,
        ),
        pushes=99,
        refused_pushes=2,
        train_loss=0.4375,
        training_seconds=12.5,
        parameters_sha256="ab" * 32,
        software="0.2.0",
    )
    return dataclasses.replace(reply, **changes)  # type: ignore[arg-type]


def baseline() -> RunResult:
    traffic = Traffic(wire_bytes_up=8_000_000, wire_bytes_down=8_000_000, raw_bytes_up=7_600_000)
    options = dataclasses.replace(OPTIONS, compressor="none")
    return result_of(options, status(traffic=traffic, lost=(), refused_pushes=0, training_seconds=10.0))


def shown(renderable: object, width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_report_has_the_promised_keys_and_values() -> None:
    report = json.loads(to_json(result_of(OPTIONS, status()), baseline()))
    assert report.keys() >= {*PROMISED_KEYS, "baseline"}
    assert report["baseline"].keys() == report.keys() - {"baseline"}
    assert report["steps"] == 33
    assert report["accuracy_by_epoch"] == [0.25, None, 0.875]
    assert report["validation_accuracy"] == 0.875
    assert report["validation_loss"] == 0.5
    assert report["lost_workers"] == ["worker-3"]
    assert report["compressor"] == "4bit"
    assert report["baseline"]["compressor"] == "none"


def test_report_without_a_baseline_says_null() -> None:
    assert json.loads(to_json(result_of(OPTIONS, status()), None))["baseline"] is None


def test_a_lost_last_evaluation_is_null() -> None:
    report = json.loads(to_json(result_of(OPTIONS, status(evaluations=())), None))
    assert report["validation_accuracy"] is None
    assert report["accuracy_by_epoch"] == [None, None, None]


def test_figures_that_are_not_finite_are_null() -> None:
    evaluations = (
        EpochStatus(epoch=1, version=11, metrics={"loss": math.inf, "accuracy": math.nan}),
        EpochStatus(epoch=3, version=33, metrics={"loss": math.nan, "accuracy": 0.125}),
    )
    diverged = result_of(OPTIONS, status(evaluations=evaluations))
    text = to_json(diverged, diverged)
    report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    for one in (report, report["baseline"]):
        assert one["validation_loss"] is None
        assert one["accuracy_by_epoch"] == [None, None, 0.125]
    assert "nan" in shown(table_of(diverged, None)), "people are told"


def test_bytes_end_at_the_total() -> None:
    run = result_of(OPTIONS, status())
    assert [run.bytes_at(version) for version in (11, 22, 33)] == [3_000_000, 6_000_000, 9_000_000]


def test_a_run_without_an_accuracy_has_its_own_metrics_in_table_report_and_picture() -> None:
    evaluations = (
        EpochStatus(epoch=1, version=11, metrics={"perplexity": 9.0, "loss": 2.2}, seconds=1.0),
        EpochStatus(epoch=2, version=22, metrics={"perplexity": 8.0, "loss": 2.1}, seconds=2.0),
    )
    losses = (LossPoint(version=10, loss=2.5), LossPoint(version=20, loss=2.25))
    run = result_of(OPTIONS, status(evaluations=evaluations, losses=losses))
    text = shown(table_of(run, None))
    assert "validation perplexity" in text
    assert "8.0000" in text
    assert "accuracy" not in text
    report = json.loads(to_json(run, None))
    assert report["evaluations"][1] == {
        "version": 22,
        "epochs": 2.0,
        "seconds": 2.0,
        "metrics": {"perplexity": 8.0, "loss": 2.1},
    }
    assert report["losses"] == [[10, 2.5], [20, 2.25]]
    assert shown_metric([run]) == "loss"


def test_evaluations_by_steps_are_no_epochs() -> None:
    options = dataclasses.replace(OPTIONS, evaluate_every="5steps")
    terms = JobTerms(id="1", work="gradients", evaluate_every="5steps", max_steps=12, epochs=0)
    evaluations = (EpochStatus(epoch=1, version=5, metrics={"accuracy": 0.5}, epochs=0.4),)
    found = status(evaluations=evaluations, job=job_message(terms), version=6, training_seconds=3.0)
    run = result_of(options, found)
    assert run.accuracy_by_epoch == ()
    assert [each.epochs for each in run.evaluations] == [0.4]
    assert when(evaluations[0], terms) == "step 5/12"
    assert fraction(found) == 0.5
    assert seconds_left(found) == 3.0


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_table_compares_with_the_baseline() -> None:
    text = shown(table_of(result_of(OPTIONS, status()), baseline()))
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.count("│") > 3}
    assert text.index("compressed tensors alone") < text.index("bytes down")
    assert "0.8750" in rows["validation accuracy"]
    assert "+0.0000" in rows["validation accuracy"]
    assert "1.25× the time" in rows["training time"]
    assert "8.00× fewer" in rows["bytes up"]
    assert "8.00×" in rows["compressed tensors alone"]
    assert "worker-3" in rows["lost workers"]
    assert "same" in rows["bytes down"]
    assert text.count("7.60×") == 1


JOB = LiveJob(
    name="digits",
    profile=JobProfile(
        shapes=[(256, 64), (256,), (128, 256), (128,)],
        forward_s=[1e-3] * 4,
        backward_s=[1e-3] * 4,
        worker_bandwidth=1e12,
        server_bandwidth=1e12,
        workers=4,
    ),
    compressor="4bit",
    choice=StepOptions(),
    step_s=0.03,
)


def test_a_run_that_compression_made_slower_says_on_which_links_it_pays() -> None:
    slow, fast = (result_of(OPTIONS, status(training_seconds=seconds)) for seconds in (0.99, 0.33))
    plain = dataclasses.replace(fast, compressor="none")
    said = remark(slow, plain, JOB)
    assert said.startswith("4bit took 3.00 times as long per step as no compression: ")
    found = re.search(r"pays below about (\d+) Mbit/s per machine, for this model and 4 workers\.$", said)
    assert found, said
    # 49k weights less an eighth, of four workers and both ways, in the 20 ms that a step takes longer.
    assert 200 < int(found[1]) < 600

    for job in (None, dataclasses.replace(JOB, compressor="ours", choice=StepOptions(mode="async"))):
        said = remark(slow, plain, job)
        assert said.endswith("too fast to be worth compressing for.")
    assert "pays below" not in remark(dataclasses.replace(slow, downlink="none"), plain, JOB)


def test_nothing_is_said_of_a_run_that_was_not_slower_or_has_no_peer() -> None:
    slow, fast = (result_of(OPTIONS, status(training_seconds=seconds)) for seconds in (0.99, 0.33))
    assert remark(fast, slow, JOB) == ""
    assert remark(slow, dataclasses.replace(slow, seconds=0.98), JOB) == "", "one percent is noise"
    assert remark(slow, None, JOB) == ""
    assert remark(dataclasses.replace(slow, mode="coded:redundancy=2"), fast, JOB) == ""
    assert (rate(41e6), rate(4.1e9), rate(1.25e4)) == ("330 Mbit/s", "33 Gbit/s", "0.1 Mbit/s")


def test_table_alone_has_one_column_of_figures() -> None:
    table = table_of(result_of(OPTIONS, status()), None)
    assert len(table.columns) == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (2.5e6, "2.50 MB"), (3e15, "3000.00 TB")],
)
def test_sizes_are_for_people(count: float, text: str) -> None:
    assert size(count) == text


def test_a_ratio_of_nothing_is_a_dash() -> None:
    assert ratio(7.5, 1) == "7.50×"
    assert ratio(1, 0) == "–"


def test_plot_is_a_png_also_where_evaluations_are_lost(tmp_path: Path) -> None:
    result = result_of(OPTIONS, status())
    write_plot(tmp_path / "two.png", [result, baseline()])
    write_plot(tmp_path / "none.png", [result_of(OPTIONS, status(evaluations=()))])
    for name in ("two.png", "none.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"pip install '\.\[run\]'"):
        write_plot(tmp_path / "plot.png", [baseline()])


def test_a_terminal_gets_a_display_and_a_pipe_gets_lines() -> None:
    with progress(Console(force_terminal=True, file=io.StringIO()), "4bit", 4) as display:
        assert isinstance(display, LiveProgress)
    with progress(Console(force_terminal=False), "4bit", 4) as lines:
        assert isinstance(lines, LineProgress)


def test_live_progress_shows_epoch_accuracy_bytes_and_workers() -> None:
    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO())
    with progress(console, "4bit", 4) as display:
        display.update(status(phase=Phase.RUNNING, waiting="waiting for worker-2 since 3.1 s"), 3)
        display.note("worker-3 ended: SIGKILL")
    text = console.export_text()
    for part in (
        *(
            "4bit",
            "3/3 epochs",
            "training loss 0.4375",
            "validation accuracy 0.8750",
            "worker-3 ended: SIGKILL",
        ),
        *("up 1.00 MB (7.60×)", "down 8.00 MB (1.00×)", "workers 3/4", "waiting for worker-2 since 3.1 s"),
    ):
        assert part in text


def test_lines_come_once_per_epoch_and_waiting_is_repeated_slowly(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = LineProgress(Console(), "4bit", 4, clock=lambda: now)
    waiting = status(waiting="waiting for worker-2")
    for now in range(17):  # noqa: B007, the clock reads it
        lines.update(waiting, 4)
    for now in range(17, 60):
        lines.update(status(waiting="waiting for worker-2", version=now), 4)  # it goes on: no news
    lines.note("worker-3 ended: SIGKILL")
    printed = capsys.readouterr().out.splitlines()
    assert [line.startswith("4bit: 3/3 epochs") for line in printed].count(True) == 1
    assert printed.count("4bit: workers 4/4  waiting for worker-2") == 2
    assert printed[-1] == "4bit: worker-3 ended: SIGKILL"


def test_a_job_that_has_not_begun_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    empty = status(
        phase=Phase.EMPTY, version=0, epoch=0, evaluations=(), traffic=Traffic(), waiting="waiting"
    )
    times = iter((0.0, 5.0))
    lines = LineProgress(Console(), "4bit", 4, clock=lambda: next(times))
    lines.update(empty, 4)
    lines.update(empty, 4)
    assert capsys.readouterr().out == "4bit: workers 4/4  waiting\n"


@pytest.mark.parametrize(
    ("settings", "compressor_and_mode"),
    [
        (RunSettings(), ("none", "sync")),
        (RunSettings(compressor="none"), None),
        (RunSettings(compressor="none", downlink="none"), None),
        (RunSettings(compressor="none", downlink="4bit"), ("none", "sync")),
        (RunSettings(compressor="none", mode="stale"), None),
        (RunSettings(compressor="none", mode="coded"), ("none", "sync")),
    ],
)
def test_a_run_without_compression_has_no_baseline(
    settings: RunSettings, compressor_and_mode: tuple[str, str] | None
) -> None:
    plain = baseline_of(settings)
    assert (plain and (plain.compressor, plain.mode)) == compressor_and_mode
    assert plain is None or (plain.downlink, plain.entropy) == ("none", "off")
