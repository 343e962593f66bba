"""gc-bench paper NAME: every table and figure of the papers has an entry, and pages say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.benchmarks.arguments import BenchError
from gradwire.benchmarks.cli import main
from gradwire.benchmarks.papers import catalogue, data_of, gradients, pages, repeats, trainings
from gradwire.benchmarks.papers.catalogue import BY_NAME, ENTRIES, PAPERS
from gradwire.benchmarks.papers.result import Conditions, Panel, Result
from gradwire.benchmarks.simulation import train
from gradwire.common.exits import Exit
from gradwire.compressors import create
from gradwire.server.job.modes import registry
from gradwire.worker.tasks import load

DOCS = Path(__file__).parents[2] / "docs" / "papers"
# Numbers of the tables and figures, by the captions in the papers.
TABLES = {
    "000": "1.1 2.1 2.2 2.3 3.1 3.2 3.3 3.4 3.5 3.6 4.1 4.2 4.3 4.4 4.5",
    "001": "1",
    "002": "1 2 3",
    "003": "1 2",
    "004": "1 2 3",
}
FIGURES = {
    "000": "1.1 1.2 1.3 2.1 2.2 2.3 2.4 2.5 2.6 2.7 2.8 2.9 2.10 "
    "3.1 3.2 3.3 3.4 3.5 3.6 3.7 4.1 4.2 4.3 4.4 4.5",
    "001": "1 2",
    "002": "1 2 3 4 5 6 7 8 9 10 11 12 13 14",
    "003": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    "004": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
}
RESULT = Result(
    settings="two fakes",
    ours="SEAMGS 1.23",
    headings=["method", "speed-up"],
    rows=[["SEAMGS", "1.23"]],
    panels=[Panel(title="fake", x="epoch", y="accuracy", lines={"one": ([1, 2], [0.5, 0.75])})],
)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.key)
def test_the_catalogue_has_every_table_and_figure_of_the_papers_once(paper: catalogue.Paper) -> None:
    for kind, listed, expected in (
        ("table", paper.tables, TABLES[paper.key]),
        ("figure", paper.figures, FIGURES[paper.key]),
    ):
        found = [entry.number for entry in ENTRIES if (entry.paper, entry.kind) == (paper.key, kind)]
        assert list(listed) == found == expected.split()


def test_every_entry_is_measured_or_says_why_not() -> None:
    assert len(BY_NAME) == len(ENTRIES)
    for entry in ENTRIES:
        assert bool(entry.measurement) != bool(entry.reason), entry.name
        assert not entry.measurement or entry.measurement in repeats.MEASUREMENTS, entry.name
        assert not entry.measurement or entry.theirs != "–", entry.name
    assert set(repeats.measurements_of(ENTRIES)) == set(repeats.MEASUREMENTS)


def test_what_is_trained_is_what_a_job_can_have() -> None:
    for table in (
        *(trainings.TABLE_3_4, trainings.TABLE_4_2, trainings.TABLE_4_4, trainings.TABLES_3_3_AND_4_3),
        *(trainings.FIGURE_8, trainings.STRATEGIES),
    ):
        assert next(iter(table)) == "none" or table is trainings.TABLE_4_2
        for spec in table:
            create(spec)
    for mode in (*trainings.TABLE_2_OF_004, *trainings.TABLE_3_OF_004):
        registry.parse(mode)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Conditions]:
    """Replaces all measurements. Returns the conditions with which they were called."""
    seen: list[Conditions] = []

    def fake(conditions: Conditions) -> Result:
        seen.append(conditions)
        return RESULT

    def failing(conditions: Conditions) -> Result:
        raise BenchError("no links: need root")

    found = {name: failing if name == "target" else fake for name in repeats.MEASUREMENTS}
    monkeypatch.setattr(repeats, "MEASUREMENTS", found)
    return seen


def test_a_table_is_printed_beside_the_papers_numbers(
    fakes: list[Conditions],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["paper", "001-table1", "--quick", "--seeds", "3,4", "--data", "cifar10=/data/c10"]
    assert main(arguments) == Exit.DONE
    shown = capsys.readouterr().out
    assert "| SEAMGS | 1.23 |" in shown
    assert BY_NAME["001-table1"].theirs in shown
    assert "`gc-bench paper 001-table1 --quick --data cifar10=PATH --seeds 3,4`" in shown
    assert fakes == [Conditions(quick=True, data={"cifar10": "data=/data/c10"}, seeds=[3, 4])]
    assert not list(tmp_path.iterdir()), "without --out nothing is written"


def test_what_has_no_measurement_says_why(
    fakes: list[Conditions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", "002-figure14"]) == Exit.DONE
    assert "needs ImageNet and a GPU" in capsys.readouterr().out
    assert fakes == []


def test_all_writes_pages_pictures_and_a_row_for_each(fakes: list[Conditions], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"# By hand\n\n{pages.BEGIN}\nold\n{pages.END}\n\nStays.\n")
    assert main(["paper", "all", "--out", str(tmp_path)]) == 1, "one of them cannot run"
    assert len(fakes) == len(repeats.MEASUREMENTS) - 1, "a shared measurement runs once"
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("# By hand\n")
    assert readme.endswith("\n\nStays.\n")
    assert "\nold\n" not in readme
    for entry in ENTRIES:
        (row,) = (line for line in readme.splitlines() if line.endswith(f"| `{entry.name}` |"))
        if entry.name == "001-figure2":
            assert "not run: no links: need root" in row
        else:
            assert (f"not here: {entry.reason}" if entry.reason else "SEAMGS 1.23") in row
    for paper in PAPERS:
        text = (tmp_path / f"{paper.page}.md").read_text()
        assert paper.title in text
        assert paper.authors in text
        assert f"({paper.year})" in text
        for name in text.split("](")[1:]:
            assert (tmp_path / name.partition(")")[0]).exists()
    assert "<svg" in (tmp_path / "001-seamgs.svg").read_text()


def test_one_entry_renews_its_own_record_alone(fakes: list[Conditions], tmp_path: Path) -> None:
    assert main(["paper", "001-table1", "--out", str(tmp_path)]) == Exit.DONE
    assert main(["paper", "003", "--quick", "--out", str(tmp_path)]) == Exit.DONE
    records = repeats.read(tmp_path)
    assert records["seamgs"].result == RESULT
    assert not records["seamgs"].quick
    assert records["coded-time"].quick
    assert "thesis-accuracy" not in records
    assert "Not run yet." in (tmp_path / "000-thesis.md").read_text()
    plain = json.loads((tmp_path / "results.json").read_text())
    assert list(plain) == [name for name in repeats.MEASUREMENTS if name in plain]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["001-table1", "--share", "0.5"], "--models, --share and --workers are for seamgs"),
        (["seamgs", "--quick"], "are for tables and figures"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    fakes: list[Conditions], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", *arguments]) == Exit.USAGE
    assert message in capsys.readouterr().err


def test_an_unknown_name_and_a_wrong_data_set_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["paper", "001-tabel1"])
    assert "001-table1" in capsys.readouterr().err
    for text in ("imagenet=/data", "cifar10", "cifar10="):
        with pytest.raises(BenchError, match="expected TASK=PATH"):
            data_of(text)


def test_the_pages_are_those_of_the_records() -> None:
    records = repeats.read(DOCS)
    assert pages.index(records) in (DOCS / "README.md").read_text()
    for paper in PAPERS:
        assert (DOCS / f"{paper.page}.md").read_text() == pages.page(paper, records)


def test_our_thresholds_are_the_papers() -> None:
    assert gradients.thresholds(Conditions(quick=True)).ours == "equal"


def test_the_exact_centroid_is_the_median() -> None:
    values = torch.tensor([5.0, -1.0, 0.25, 7.0, 0.5])
    assert gradients.exact_centroid(values) == 0.5
    many = torch.randn(1001, generator=torch.Generator().manual_seed(2))
    assert gradients.exact_centroid(many) == float(many.median())


def test_gradients_are_those_of_one_process() -> None:
    task = load("digits:model=mlp")
    found = gradients.gradients_of(task, steps=1, batch=8)
    torch.manual_seed(1)
    network = task.model()
    loss = task.loss(network, task.batch(np.random.default_rng(1).integers(task.train_samples, size=8)))
    loss.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found[name], parameter.grad)


def test_a_simulated_rate_falls_from_epoch_to_epoch() -> None:
    task = load("digits:model=mlp")
    constant, falling, halved = (
        train(task, "none", seed=1, epochs=2, decay=decay, learning_rate=rate).metrics
        for decay, rate in ((1.0, 0.1), (0.5, 0.1), (0.5, 0.05))
    )
    assert constant[0] == falling[0] != halved[0], "the first epoch has the whole rate"
    assert constant[1] != falling[1]
    one, two = (train(task, "none", seed=1, epochs=1, count=n, batch=64 // n) for n in (1, 2))
    assert one.raw_bytes * 2 == two.raw_bytes
    assert one.metrics[0]["loss"] == pytest.approx(two.metrics[0]["loss"], rel=1e-3)


def test_with_files_the_users_data_is_trained() -> None:
    conditions = Conditions(quick=True, data={"cifar10": "data=/data/c10"})
    assert conditions.task("cifar10", "model=resnet20", "digits") == "cifar10:data=/data/c10,model=resnet20"
    assert conditions.task("mnist", "model=mlp", "digits") == "digits"
