"""Command-line arguments that several commands declare and check alike.

A value that a command cannot use raises `argparse.ArgumentTypeError`, before the command has begun anything.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ..common.version import __version__
from ..settings import DEFAULT_PORT, parse_address

# Files for TLS and a token, as gc-worker has them.
ACCESS_FILES = {
    "tls_ca": "certificates of the authorities that the server's certificate is checked with",
    "tls_cert": "certificate of this end",
    "tls_key": "key of that certificate",
    "token_file": "file with the token of this end",
}


def command_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a command's parser, with --version."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    return parser


def add_server(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the address of the server as a positional argument, and the options for access to it."""
    default = environ.get("GC_SERVER") or f"localhost:{DEFAULT_PORT}"
    text = "address of the server (default: GC_SERVER, or localhost)"
    parser.add_argument("server", nargs="?", type=address, default=default, metavar="HOST[:PORT]", help=text)
    add_access_files(parser, environ)


def add_access_files(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    for name, text in ACCESS_FILES.items():
        variable, flag = f"GC_{name.upper()}", f"--{name.replace('_', '-')}"
        default = environ.get(variable, "")
        parser.add_argument(flag, default=default, metavar="FILE", help=f"{text} (default: {variable})")


def access_files_of(given: argparse.Namespace) -> dict[str, str]:
    """Return the files for TLS and a token by name, as `Target` takes them."""
    files: dict[str, str] = {name: getattr(given, name) for name in ACCESS_FILES}
    for name, path in files.items():
        if path and not Path(path).is_file():
            flag = f"--{name.replace('_', '-')}"
            raise argparse.ArgumentTypeError(f"{flag} {path}: expected a file that exists")
    if bool(files["tls_cert"]) != bool(files["tls_key"]):
        raise argparse.ArgumentTypeError("--tls-cert and --tls-key: expected both or neither")
    return files


def address(text: str) -> str:
    """Return host:port."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least_one(text: str) -> int:
    """Return a whole number from 1."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return found


def file_to_write(text: str) -> Path:
    """Return the path of a file that can be written, so that no work is lost for want of one."""
    path = Path(text)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        expected = "a file in a folder that exists and can be written to"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return path


def plot_to_write(text: str) -> Path:
    """Return the path of a picture, which matplotlib draws."""
    check_module("matplotlib")
    return file_to_write(text)


def check_module(name: str) -> None:
    """Raise unless this module of the extra `run` is installed."""
    if find_spec(name) is None:
        raise argparse.ArgumentTypeError(
            f"{name} is not installed; pip install '.[run]' in a checkout of Gradwire brings it"
        )
