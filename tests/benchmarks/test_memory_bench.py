"""gc-bench memory: what it makes of two jobs."""

from __future__ import annotations

import pytest

from gradwire.benchmarks.cli import main
from gradwire.benchmarks.memory import HEADINGS, Peaks, accounts, cells, footprint, peaks_of
from gradwire.benchmarks.recorder import LinkRecorder, ProcessUsage, Sample
from gradwire.benchmarks.shaped import WARM_UP, Recorded
from gradwire.benchmarks.star import Star
from gradwire.benchmarks.traces import ComputedStep
from gradwire.common.exits import Exit

SMALL = Peaks(300_000, 400_000, 4 * 500.0 + 90, 4 * 500.0 + 90)
LARGE = Peaks(320_000, 418_000, 8 * 500.0 + 90, 8 * 500.0 + 90)


def test_of_the_workers_the_median_counts_until_the_last_step() -> None:
    nodes = ["server", "worker-0", "worker-1", "worker-2"]
    recorder = LinkRecorder(Star(nodes, None), nodes)
    trace = [ComputedStep(float(step), (step + 0.5,)) for step in range(WARM_UP + 4)]
    for step in range(WARM_UP + 5):
        late = 100 if step == WARM_UP + 4 else 0  # when the job ends
        peaks = dict(zip(nodes, (7 + late, 5 + late, 9 + late, 50 + late), strict=True))
        recorder.usages.append(ProcessUsage(float(step), 0.0, peaks))
        recorder.samples.append(Sample(float(step), dict.fromkeys(nodes, (10 * step, 20 * step))))
    assert peaks_of(Recorded(nodes, recorder, [trace] * 3)) == Peaks(7, 9, 10, 20)


def test_what_does_not_depend_on_the_model_is_not_counted() -> None:
    found = footprint("4bit", "both", SMALL, LARGE, 1000, 4)
    assert (found.server, found.worker) == (20.0, 18.0)
    assert found.server_account["pushes"] == 2.0
    assert found.worker_account["push"] == found.worker_account["update"] == 0.5
    assert len(cells(found)) == len(HEADINGS)


def test_the_accounts() -> None:
    server, worker = accounts("4bit", 4, up=0.5, down=0.5)
    assert (sum(server.values()), sum(worker.values())) == (4 * 4 + 4 * 0.5 + 0.5, 4 * 4 + 2 * 0.5)
    server, worker = accounts("none", 4, up=4, down=4)
    assert (sum(server.values()), sum(worker.values())) == (3 * 4 + 4 * 4 + 4, 2 * 4 + 2 * 4)


@pytest.mark.parametrize("elements", [str(16 * 2**20 + 1), str(15 * 2**20)])
def test_models_that_cannot_be_compared_are_refused(
    elements: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", "--elements", elements]) == Exit.USAGE
    assert "--elements: expected a multiple of 1,048,576 from 16,777,216" in capsys.readouterr().err
