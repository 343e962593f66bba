"""Benchmarks: the command gc-bench, and the functions that measurements of other packages need.

The names in `__all__` are public. `simulate` trains in one process, `train_job` by real daemons. `run_ours`
times real daemons on shaped links with emulated computation, and `coded` has the measurements of coded
exchanges. Each name is imported at its first use. papers/ is an example of their use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..deploy.processes import RunError
    from ..deploy.report import RunResult
    from . import coded
    from .arguments import BenchError, amount, at_least_one, layer_tables
    from .cli import exit_code
    from .estimates import estimate, seed_list
    from .jobs import train_job
    from .output import say, table, write_json
    from .shaped import Recorded, Setup, run_ours
    from .simulation import SimulatedRun
    from .simulation import train as simulate
    from .star import check_network
    from .timing import interleaved

__all__ = [
    "BenchError",
    "Recorded",
    "RunError",
    "RunResult",
    "Setup",
    "SimulatedRun",
    "amount",
    "at_least_one",
    "check_network",
    "coded",
    "estimate",
    "exit_code",
    "interleaved",
    "layer_tables",
    "run_ours",
    "say",
    "seed_list",
    "simulate",
    "table",
    "train_job",
    "write_json",
]
# By name: its module, and its name there if that is another.
_HOMES = {
    "BenchError": ".arguments",
    "Recorded": ".shaped",
    "RunError": "..deploy.processes",
    "RunResult": "..deploy.report",
    "Setup": ".shaped",
    "SimulatedRun": ".simulation",
    "amount": ".arguments",
    "at_least_one": ".arguments",
    "check_network": ".star",
    "estimate": ".estimates",
    "exit_code": ".cli",
    "interleaved": ".timing",
    "layer_tables": ".arguments",
    "run_ours": ".shaped",
    "say": ".output",
    "seed_list": ".estimates",
    "simulate": ".simulation:train",
    "table": ".output",
    "train_job": ".jobs",
    "write_json": ".output",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module, __name__), attribute or name)
