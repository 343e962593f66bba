"""gc-paper NAME: every table and figure of the papers has an entry, and pages say what was measured."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire import load_task
from gradwire.benchmarks import BenchError, simulate
from gradwire.compressors import create
from gradwire_papers import gradients, measurements, pages
from gradwire_papers.catalogue import ENTRIES, MEASUREMENTS, PAPERS, Paper, entries_of
from gradwire_papers.cli import data_of, main, shares
from gradwire_papers.result import Conditions, Panel, Result

DOCS = Path(__file__).parents[1] / "docs"
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
def test_the_catalogue_has_every_table_and_figure_of_the_papers_once(paper: Paper) -> None:
    for kind, expected in (("table", TABLES[paper.key]), ("figure", FIGURES[paper.key])):
        found = [entry.number for entry in paper.entries if (entry.paper, entry.kind) == (paper.key, kind)]
        assert found == expected.split()


def test_every_entry_is_measured_or_says_why_not() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert bool(entry.measurement) != bool(entry.reason), entry.name
        assert not entry.measurement or entry.theirs != "–", entry.name
    # accuracy-seamgs repeats no table.
    assert {*measurements.measurements_of(ENTRIES), "accuracy-seamgs"} == set(MEASUREMENTS)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_measurement_is_a_call_that_its_function_takes(name: str) -> None:
    of = MEASUREMENTS[name]
    bind = inspect.signature(measurements.FUNCTIONS[of.by]).bind
    bind(Conditions(quick=False), **of.options)
    bind(Conditions(quick=True), **{**of.options, **of.quick})
    for spec in of.options.get("theirs", {}):
        if of.by == "modes":
            assert spec.partition(":")[0] in ("sync", "local", "coded", "async")
        else:
            create(spec)
    if of.by == "accuracies" and name != "warm-up":
        assert next(iter(of.options["theirs"])) == "none", "the baseline comes first"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Conditions]:
    """Replaces all measurements. Returns the conditions with which they were called."""
    seen: list[Conditions] = []

    def fake(
        conditions: Conditions, models: object = None, steps: int = 0, mbit: float = 0, **more: object
    ) -> Result:
        seen.append(conditions)
        return RESULT

    def failing(conditions: Conditions, **options: object) -> Result:
        raise BenchError("no links: need root")

    found = {name: failing if name == "target" else fake for name in measurements.FUNCTIONS}
    monkeypatch.setattr(measurements, "FUNCTIONS", found)
    return seen


def test_a_table_is_printed_beside_the_papers_numbers(
    fakes: list[Conditions],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["001-table1", "--quick", "--seeds", "3,4", "--data", "cifar10=/data/c10"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "| SEAMGS | 1.23 |" in shown
    assert entries_of("001-table1")[0].theirs in shown
    assert "`gc-paper 001-table1 --quick --data cifar10=PATH --seeds 3,4`" in shown
    assert fakes == [Conditions(quick=True, data={"cifar10": "data=/data/c10"}, seeds=[3, 4])]
    assert not list(tmp_path.iterdir()), "without --out nothing is written"


def test_what_has_no_measurement_says_why(
    fakes: list[Conditions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["002-figure14"]) == 0
    assert "needs ImageNet and a GPU" in capsys.readouterr().out
    assert fakes == []


def test_all_writes_pages_pictures_and_a_row_for_each(fakes: list[Conditions], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"# By hand\n\n{pages.BEGIN}\nold\n{pages.END}\n\nStays.\n")
    assert main(["all", "--out", str(tmp_path)]) == 1, "one of them cannot run"
    assert len(fakes) == len(MEASUREMENTS) - 2, "a shared measurement runs once"
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("# By hand\n")
    assert readme.endswith("\n\nStays.\n")
    assert "\nold\n" not in readme
    for name in measurements.measurements_of(ENTRIES):
        rows = [line for line in readme.splitlines() if f"| `{name}` |" in line]
        assert rows
        ours = "not run: no links: need root" if name == "target" else "SEAMGS 1.23"
        assert all(row.endswith(f"| {ours} |") for row in rows)
    for paper in PAPERS:
        text = (tmp_path / f"{paper.page}.md").read_text()
        assert paper.title in text
        assert paper.authors in text
        assert f"({paper.year})" in text
        assert all(
            entry.title in text and (entry.name in text or entry.reason in text) for entry in paper.entries
        )
        for name in text.split("](")[1:]:
            assert (tmp_path / name.partition(")")[0]).exists()
    assert "<svg" in (tmp_path / "001-seamgs.svg").read_text()


def test_one_entry_renews_its_own_record_alone(fakes: list[Conditions], tmp_path: Path) -> None:
    assert main(["001-table1", "--out", str(tmp_path)]) == 0
    assert main(["003", "--quick", "--out", str(tmp_path)]) == 0
    records = measurements.read(tmp_path)
    assert records["seamgs"].result == RESULT
    assert not records["seamgs"].quick
    assert records["coded-time"].quick
    assert "thesis-accuracy" not in records
    assert "Not run yet." in (tmp_path / "000-thesis.md").read_text()
    plain = json.loads((tmp_path / "results.json").read_text())
    assert list(plain) == [name for name in MEASUREMENTS if name in plain]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["000-table3.4", "--shares", "0.5"], "thesis-accuracy: leave out --shares"),
        (["all", "--epochs", "3"], "leave out --epochs"),
        (["5bit"], "got '5bit' (did you mean '4bit'"),
        (["4bit", "--models", "alexnet"], "expected one of vgg16"),
        (["4bit", "--shares", "1.5"], "expected shares above 0 and below 1"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_what_is_given_replaces_the_measurements_own(fakes: list[Conditions]) -> None:
    assert main(["seamgs", "--models", "resnet20", "--steps", "3", "--mbit", "20"]) == 0
    (conditions,) = fakes
    assert conditions.given == {"models": ["resnet20"], "steps": 3, "mbit": 20.0}
    assert shares("0.25,0.5") == [0.25, 0.5]


def test_all_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*(entry.name for entry in ENTRIES), *MEASUREMENTS))


def test_an_unknown_name_and_a_wrong_data_set_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["001-tabel1"])
    assert "001-table1" in capsys.readouterr().err
    for text in ("imagenet=/data", "cifar10", "cifar10="):
        with pytest.raises(BenchError, match="expected TASK=PATH"):
            data_of(text)


def test_the_pages_are_those_of_the_records() -> None:
    records = measurements.read(DOCS)
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
    task = load_task("digits:model=mlp")
    found = gradients.gradients_of(task, steps=1, batch=8)
    torch.manual_seed(1)
    network = task.model()
    loss = task.loss(network, task.batch(np.random.default_rng(1).integers(task.train_samples, size=8)))
    loss.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found[name], parameter.grad)


def test_a_simulated_rate_falls_from_epoch_to_epoch() -> None:
    task = load_task("digits:model=mlp")
    constant, falling, halved = (
        simulate(task, "none", seed=1, epochs=2, decay=decay, learning_rate=rate).metrics
        for decay, rate in ((1.0, 0.1), (0.5, 0.1), (0.5, 0.05))
    )
    assert constant[0] == falling[0] != halved[0], "the first epoch has the whole rate"
    assert constant[1] != falling[1]
    one, two = (simulate(task, "none", seed=1, epochs=1, count=n, batch=64 // n) for n in (1, 2))
    assert one.raw_bytes * 2 == two.raw_bytes
    assert one.metrics[0]["loss"] == pytest.approx(two.metrics[0]["loss"], rel=1e-3)


def test_with_files_the_users_data_is_trained() -> None:
    conditions = Conditions(quick=True, data={"cifar10": "data=/data/c10"})
    assert conditions.task("cifar10:model=resnet20", "digits") == "cifar10:data=/data/c10,model=resnet20"
    assert conditions.task("mnist:model=mlp", "digits") == "digits"
