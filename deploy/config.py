"""What gc-run can be told. What is accepted, the daemons decide: see `daemons.check_daemon_options`."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import at_least, option

SPEC = "NAME[:KEY=VALUE,...]"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of gc-run. What the daemons know and gc-run does not may be set for them as GC_<OPTION>."""

    task: str = option("digits", "what to train: a built-in task or module:function", metavar=SPEC)
    workers: int = option(4, "worker processes", check=at_least(1))
    compressor: str = option("4bit", "how gradients are compressed", metavar=SPEC)
    mode: str = option(
        "sync", "how pushes become versions: sync, stale, async, local or coded", metavar="NAME"
    )
    backup: int = option(0, "sync: members that a round does without", check=at_least(0))
    redundancy: str = option(
        "1", "sync, coded: workers that compute the same, to send less", metavar="N|auto"
    )
    straggler_code: int = option(0, "sync: members that a round does without, by coding", check=at_least(0))
    staleness: int = option(
        4, "stale: clocks ahead of the slowest at which a step may begin", check=at_least(0)
    )
    staleness_lr: str = option("none", "stale, async: inverse divides by staleness", metavar="NAME")
    delay_compensation: float = option(0.0, "stale, async: lambda of the correction", check=at_least(0))
    local_steps: str = option("adaptive", "local: steps per round", metavar="N|adaptive[:KEY=VALUE,...]")
    correction: float = option(0.1, "local: part of the way back that each step takes", check=at_least(0))
    outer_optimizer: str = option("sgd", "local: applied to the mean change", metavar=SPEC)
    outer_rate: float = option(1.0, "local: its learning rate", check=at_least(0))
    downlink: str = option("none", "compressor of the updates that go to the workers", metavar=SPEC)
    aggregation: str = option("mean", "of the server: how gradients become one", metavar=SPEC)
    epochs: int = option(30, "passes over the training samples", check=at_least(1))
    batch_size: int = option(32, "samples per worker and step", check=at_least(1))
    seed: int = option(1, "of initial parameters, sample order and compressors", check=at_least(0))
    optimizer: str = option("sgd", "of the server", metavar=SPEC)
    learning_rate: float = option(0.1, "base learning rate", check=at_least(0))
    schedule: str = option("constant", "of the learning rate", metavar=SPEC)
    baseline: bool = option(True, "train a second time without compression, to compare with")
    json: str = option("", "also write the report to this file, once everything is done", metavar="FILE")
    out: str = option("", "directory for logs, report and plot (default: a new one in runs/)", metavar="DIR")
