"""gc-bench: measure on this machine the speeds, bytes and accuracies that README and docs claim.

docs/reference/benchmarks.md lists every command with its options. Commands that shape links need root.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Collection, Sequence

from ..common.exits import Exit, command
from ..common.spec import SpecError
from ..deploy.arguments import command_parser
from ..deploy.interrupt import Interrupted, interrupted
from ..deploy.processes import RunError

# By command: a summary, and a module with `add_arguments(parser)` and `run(given)`, which returns an exit
# code or None. A module is imported only for its own command, because most of them import torch.
COMMANDS = {
    "compressors": ("speed, ratio and error of every compressor, and speed of sums", "compressors"),
    "accuracy": ("accuracy or loss that compressors cost, over several seeds", "accuracy"),
    "lowrank": ("loss after equal steps of lowrank and of PowerSGD, in one process", "low_rank"),
    "curve": ("loss against counted bytes, for local steps, compressors and presets", "curve"),
    "modes": ("speed and accuracy of every mode, also with slow and with lost workers", "modes"),
    "step": ("seconds per step on shaped links, beside PyTorch's DDP", "step"),
    "reach": ("time to AdamW's final loss on shaped links, for presets beside PyTorch's DDP", "reach"),
    "predicted": ("seconds per step as gc-plan predicts them, beside measured ones", "predicted"),
    "coded": ("bytes and time of coded exchanges on shaped links, beside competitors", "coded"),
}


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return a parser of one command's own arguments. Imports the command's module."""
    parser = argparse.ArgumentParser(prog=f"gc-bench {name}")
    importlib.import_module(f".{COMMANDS[name][1]}", __package__).add_arguments(parser)
    return parser


def parser(chosen: Collection[str] = COMMANDS.keys()) -> argparse.ArgumentParser:
    """Return the parser of gc-bench. Only the `chosen` commands have arguments; it imports their modules."""
    found = command_parser("gc-bench", __doc__)
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, module) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in chosen:
            imported = importlib.import_module(f".{module}", __package__)
            command.description = imported.__doc__
            imported.add_arguments(command)
            command.set_defaults(run=imported.run)
    return found


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-bench with arguments `argv`, by default those of the process; return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["paper"]:
        remedy = "pip install ./papers in a checkout of Gradwire brings it"
        print(f"gc-bench paper: is the command gc-paper now; {remedy}", file=sys.stderr)
        return Exit.USAGE
    given = parser(arguments[:1]).parse_args(arguments)
    return exit_code(f"gc-bench {given.command}", lambda: given.run(given))


@command
def exit_code(program: str, run: Callable[[], int | None]) -> int:
    """Run a benchmark and return its exit code. Print an error that ends it on standard error.

    Args:
        program: name of the command, which begins the error message.
        run: the benchmark; returns an exit code, or None for success.
    """
    try:
        with interrupted():
            return run() or Exit.DONE
    except (argparse.ArgumentTypeError, SpecError, RunError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.code if isinstance(error, RunError) else Exit.USAGE
    except Interrupted as stopped:
        return 128 + stopped.number


if __name__ == "__main__":
    sys.exit(main())
