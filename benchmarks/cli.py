"""gc-bench: compressors against the speed of memory, and what they cost in accuracy."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..deploy.interrupt import Interrupted
from ..deploy.processes import RunError
from ..exits import Exit
from ..spec import SpecError
from .arguments import BenchError

# Each has `add_arguments(parser)` and `run(given) -> exit code`; imported when it is asked for, because
# they import torch.
COMMANDS = {
    "compressors": ("speed, ratio and error of every compressor", "compressors"),
    "step": ("seconds per step on shaped links, beside PyTorch's DDP", "step"),
    "predicted": ("seconds per step as gc-plan predicts them, beside what they are", "predicted"),
    "auto": ("what --compressor auto gains where compressing pays, and loses where it does not", "auto"),
    "fusion": ("greedy merging of the papers beside the best that there is", "fusion"),
    "memory": ("bytes per parameter at server and workers", "memory"),
    "strangers": ("what a server loses to callers who have no part in its job", "strangers"),
    "durability": ("what --state costs per step, and how long a journal takes to be read", "durability"),
    "modes": ("speed and accuracy of every mode, also with slow workers and lost ones", "modes"),
    "coded": ("bytes and time of coded exchanges on shaped links, beside what they compete with", "coded"),
    "paper": ("what the papers measured, with their numbers beside ours", "papers"),
    "accuracy": ("accuracy of every compressor on digits, at 10 x and 100 x", "compressor_accuracy"),
    "adam": ("loss of a small GPT with every compressor and AdamW, and what to do instead", "adam"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="gc-bench", description=__doc__)
    parser.add_argument("--version", action="version", version=f"gc-bench {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, module) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if arguments[:1] == [name]:
            chosen = importlib.import_module(f".{module}", __package__)
            command.description = chosen.__doc__
            chosen.add_arguments(command)
            command.set_defaults(run=chosen.run)
    given = parser.parse_args(arguments)
    return exit_code(f"gc-bench {given.command}", lambda: given.run(given))


def exit_code(program: str, run: Callable[[], int]) -> int:
    """What `run` returns, or what stands for the error that it raises, which standard error tells."""
    try:
        return run()
    except (BenchError, SpecError, RunError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.code if isinstance(error, RunError) else Exit.USAGE
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except Interrupted as interrupted:
        return 128 + interrupted.number


if __name__ == "__main__":
    sys.exit(main())
