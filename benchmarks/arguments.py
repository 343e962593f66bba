"""What gc-bench's commands are given, checked before anything is measured."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path


class BenchError(ValueError):
    """A command line that cannot be carried out; the message says what to change."""


def program(text: str | None) -> argparse.ArgumentParser:
    """The parser of a module that is run by itself. text: its docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def at_least_one(text: str) -> int:
    """A whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return number


def numbers(most: int) -> Callable[[str], list[int]]:
    """Whole numbers from 1 to `most`, separated by commas."""

    def parse(text: str) -> list[int]:
        try:
            found = [int(part) for part in text.split(",")]
        except ValueError:
            found = [0]
        if not all(1 <= number <= most for number in found):
            message = f"expected whole numbers from 1 to {most:,}, separated by commas, got {text!r}"
            raise argparse.ArgumentTypeError(message)
        return found

    return parse


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of these names, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"expected some of {','.join(names)}, got {text!r}")
        return chosen

    return parse


def check_files(*paths: Path | None) -> None:
    """Raise `BenchError` unless each can be written: now, and not when everything has been measured."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK)):
            raise BenchError(f"{path}: expected a file in a folder that exists and can be written to")


def check_modules(*names: str) -> None:
    """Raise `BenchError` unless these are installed; they come with the extra `run`."""
    for name in names:
        if find_spec(name) is None:
            raise BenchError(f"{name} is not installed; it comes with pip install 'gradwire[run]'")
