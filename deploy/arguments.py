"""Command-line arguments that several commands declare and check alike.

A function that checks a value raises `argparse.ArgumentTypeError` if the command cannot use it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ..common.addresses import DEFAULT_PORT, parse_address
from ..common.version import __version__

# Options for files of TLS and the token, named as gc-worker names them: help text by field of `Target`.
ACCESS_FILES = {
    "tls_ca": "certificates of the authorities that may sign the server's certificate",
    "tls_cert": "certificate to show to the server",
    "tls_key": "private key of --tls-cert",
    "token_file": "file with the token to show to the server",
}


def command_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a command, with the option --version."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    return parser


def add_server(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the server's address as a positional argument, GC_SERVER by default, and the options for access."""
    default = environ.get("GC_SERVER") or f"localhost:{DEFAULT_PORT}"
    text = "address of the server (default: the variable GC_SERVER, else localhost)"
    parser.add_argument("server", nargs="?", type=address, default=default, metavar="HOST[:PORT]", help=text)
    add_access_files(parser, environ)


def add_access_files(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the options for the files of TLS and a token; GC_TLS_CA and the like give the defaults."""
    for name, text in ACCESS_FILES.items():
        variable, flag = f"GC_{name.upper()}", f"--{name.replace('_', '-')}"
        default = environ.get(variable, "")
        parser.add_argument(flag, default=default, metavar="FILE", help=f"{text} (default: {variable})")


def access_files_of(given: argparse.Namespace) -> dict[str, str]:
    """Return the paths of the files for TLS and a token by name, as `Target` takes them.

    Files that are not given are "".

    Raises:
        argparse.ArgumentTypeError: if a file does not exist, or there is a certificate without its key.
    """
    files: dict[str, str] = {name: getattr(given, name) for name in ACCESS_FILES}
    for name, path in files.items():
        if path and not Path(path).is_file():
            flag = f"--{name.replace('_', '-')}"
            raise argparse.ArgumentTypeError(f"{flag} {path}: expected a file that exists")
    if bool(files["tls_cert"]) != bool(files["tls_key"]):
        raise argparse.ArgumentTypeError("--tls-cert and --tls-key: expected both or neither")
    return files


def address(text: str) -> str:
    """Parse HOST[:PORT] and return host:port, with the default port if none is given."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least_one(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return found


def file_to_write(text: str) -> Path:
    """Parse the path of an output file, and check before any work is done that it can be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        expected = "a file in a folder that exists and can be written to"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return path


def check_module(name: str) -> None:
    """Raise argparse.ArgumentTypeError unless this module of the extra `run` is installed."""
    if find_spec(name) is None:
        raise argparse.ArgumentTypeError(
            f"{name} is not installed; run pip install '.[run]' in a checkout of Gradwire"
        )
