"""Preparation that gc-run runs in a process of its own before it starts any daemon.

It makes the compressor and the task, so that one process reports their errors instead of every worker. It
compiles the kernels into their cache, so that the daemons do not compile them at the same time. It is a
process of its own because the import of a user's task may have any effect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..common.exits import Exit
from ..common.spec import SpecError
from ..compressors import advice, compressor_of, parse_downlink, suited, tell_of_compiling, warm_up
from ..optim.optimizer import parse_optimizer
from ..worker.tasks import TaskError, TaskSpecError, load
from .processes import PROGRESS, WARNING


def main(argv: Sequence[str]) -> int:
    """Check the specs and compile the kernels. Print progress and warnings with the prefixes of `processes`.

    Args:
        argv: specs of compressor, downlink, task and optimizer, and the mode's kind of work. The task is
            empty for a script, which brings its own optimizer.

    Returns:
        Exit code 0; 2 for a bad spec or 6 for a task that raised, with the reason in the last line on
        standard error.
    """
    compressor, downlink, task, optimizer, work = argv
    try:
        chosen, auto = compressor_of(compressor)
        try:
            parse_downlink(downlink)
        except SpecError as error:
            raise SpecError(f"--downlink {downlink}: {error}") from None
        if task:
            load(task)
    except (SpecError, TaskError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return Exit.USAGE if isinstance(error, SpecError | TaskSpecError) else Exit.TASK
    tell_of_compiling(lambda line: print(f"{PROGRESS}{line}", flush=True))
    warm_up()
    local = work.partition(":")[0] == "local"
    steps = parse_optimizer(optimizer)
    if not task:
        return Exit.DONE
    for line in advice(chosen if auto else suited(chosen, steps, local=local), steps, local=local):
        print(f"{WARNING}{line}")
    return Exit.DONE
