"""Flags for TLS and a token of the commands that come to a server, as gc-worker has them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

FILES = {
    "tls_ca": "certificates of the authorities that the server's certificate is checked with",
    "tls_cert": "certificate of this end",
    "tls_key": "key of that certificate",
    "token_file": "file with the token of this end",
}


def add_access_files(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    for name, text in FILES.items():
        variable, flag = f"GC_{name.upper()}", f"--{name.replace('_', '-')}"
        default = environ.get(variable, "")
        parser.add_argument(flag, default=default, metavar="FILE", help=f"{text} (default: {variable})")


def access_files_of(given: argparse.Namespace) -> dict[str, str]:
    """By name, as `Target` takes them. Raises ValueError for what there is not."""
    files: dict[str, str] = {name: getattr(given, name) for name in FILES}
    for name, path in files.items():
        if path and not Path(path).is_file():
            raise ValueError(f"--{name.replace('_', '-')} {path}: expected a file that exists")
    if bool(files["tls_cert"]) != bool(files["tls_key"]):
        raise ValueError("--tls-cert and --tls-key: expected both or neither")
    return files
