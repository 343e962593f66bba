"""Command-line arguments of gc-bench's commands, checked before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from ..deploy.arguments import at_least_one as at_least_one
from ..deploy.arguments import check_module as check_module
from ..deploy.arguments import file_to_write as file_to_write
from ..planning.models import tensors

MBIT = "Mbit/s of each link in each direction; 0 for no limit"  # help of --mbit


class BenchError(argparse.ArgumentTypeError):
    """A benchmark that cannot run or continue; the message names the reason and the remedy."""


def option(
    parser: argparse.ArgumentParser, flag: str, read: Any, default: Any, metavar: str, text: str
) -> None:
    """Add an option to a parser, with its default at the end of its help text."""
    shown = f"{text} (default: %(default)s)"
    parser.add_argument(flag, type=read, default=default, metavar=metavar, help=shown)


def json_option(parser: argparse.ArgumentParser, content: str = "every row") -> None:
    """Add the option --json, the path of a file for the results, which `content` names in the help."""
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help=f"file for {content}, as JSON")


def whole_numbers(text: str) -> list[int]:
    """Parse whole numbers separated by commas, such as `1,2,3`; return [] if one is invalid."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return []


def amount(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise BenchError(f"expected a finite number of at least 0, got {text!r}")
    return found


def amounts(text: str) -> list[float]:
    """Parse finite numbers of at least 0, separated by commas."""
    return [amount(part) for part in text.split(",")]


def layer_tables(text: str) -> list[str]:
    """Parse names of layer tables of `planning.models`, separated by commas."""
    found = text.split(",")
    for name in found:
        try:
            tensors(name)
        except ValueError as error:
            raise BenchError(str(error)) from None
    return found


def numbers(most: int) -> Callable[[str], list[int]]:
    """Return a function that parses whole numbers from 1 to `most`, separated by commas."""

    def parse(text: str) -> list[int]:
        found = whole_numbers(text)
        if not found or not all(1 <= number <= most for number in found):
            message = f"expected whole numbers from 1 to {most:,}, separated by commas, got {text!r}"
            raise BenchError(message)
        return found

    return parse


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that parses some of these names from text, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(names):
            raise BenchError(f"expected one or more of {','.join(names)}, separated by commas, got {text!r}")
        return chosen

    return parse
