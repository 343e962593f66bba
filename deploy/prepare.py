"""What gc-run does once, in a process of its own, before it starts any daemon.

Makes the compressor and the task, so that what is wrong with them is said at once, and by one process instead
of by every worker; and compiles the kernels into their cache, which five processes would otherwise do at the
same time. A process of its own, because a user's task may do anything when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..common.exits import Exit
from ..common.spec import SpecError
from ..compressors import advice, compressor_of, parse_downlink, suited, tell_of_compiling, warm_up
from ..optim.optimizer import parse_optimizer
from ..worker.tasks import TaskError, TaskSpecError, load
from .processes import SAID, WARNING


def main(argv: Sequence[str]) -> int:
    """Check the specs and compile. Prints what takes long, in lines that begin with `SAID`, and what speaks
    against the compressor, in lines that begin with `WARNING`.

    Args:
        argv: the compressor, that of the updates, the task, the optimizer, and the kind of work that the mode
            asks of workers.

    Returns:
        0; 2 for a spec to correct, 6 for a task that raised: then the last line on standard error says why.
    """
    compressor, downlink, task, optimizer, work = argv
    try:
        chosen, auto = compressor_of(compressor)
        try:
            parse_downlink(downlink)
        except SpecError as error:
            raise SpecError(f"--downlink {downlink}: {error}") from None
        load(task)
    except (SpecError, TaskError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return Exit.USAGE if isinstance(error, SpecError | TaskSpecError) else Exit.TASK
    tell_of_compiling(lambda line: print(f"{SAID}{line}", flush=True))
    warm_up()
    local = work.partition(":")[0] == "local"
    steps = parse_optimizer(optimizer)
    for line in advice(chosen if auto else suited(chosen, steps, local=local), steps, local=local):
        print(f"{WARNING}{line}")
    return Exit.DONE
