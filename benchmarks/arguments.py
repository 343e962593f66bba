"""What gc-bench's commands are given, checked before anything is measured."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path


class BenchError(argparse.ArgumentTypeError):
    """A command line that cannot be carried out; the message says what to change."""


def program(text: str | None) -> argparse.ArgumentParser:
    """The parser of a module that is run by itself. text: its docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def whole_numbers(text: str) -> list[int]:
    """Read `1,2,3`; nothing if one of them is no whole number."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return []


def at_least_one(text: str) -> int:
    """A whole number from 1."""
    match whole_numbers(text):
        case [number] if number >= 1:
            return number
        case _:
            raise BenchError(f"expected a whole number from 1, got {text!r}")


def amount(text: str) -> float:
    """A finite number of at least 0."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise BenchError(f"expected a finite number of at least 0, got {text!r}")
    return found


def numbers(most: int) -> Callable[[str], list[int]]:
    """Whole numbers from 1 to `most`, separated by commas."""

    def parse(text: str) -> list[int]:
        found = whole_numbers(text)
        if not found or not all(1 <= number <= most for number in found):
            message = f"expected whole numbers from 1 to {most:,}, separated by commas, got {text!r}"
            raise BenchError(message)
        return found

    return parse


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of these names, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(names):
            raise BenchError(f"expected some of {','.join(names)}, got {text!r}")
        return chosen

    return parse


def file_to_write(text: str) -> Path:
    """A file that can be written: refused now, and not when everything has been measured."""
    path = Path(text)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise BenchError(f"{path}: expected a file in a folder that exists and can be written to")
    return path


def plot_to_write(text: str) -> Path:
    """A file for a picture, which matplotlib draws."""
    check_module("matplotlib")
    return file_to_write(text)


def check_module(name: str) -> None:
    """Raise `BenchError` unless this one is installed; it comes with the extra `run`."""
    if find_spec(name) is None:
        raise BenchError(f"{name} is not installed; pip install '.[run]' in a checkout of Gradwire brings it")
