"""gc-certs: make certificates for a server and its workers, signed by an authority of their own.

Makes DIR/ca.pem and DIR/ca.key, an authority that only this job trusts; DIR/server.pem and .key, for the
names and addresses that workers reach the server by; and one pair for each --client. Only their owner can
read the keys. Existing files stay: an authority in DIR signs further certificates.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ..common.exits import Exit, command
from .arguments import command_parser

DAYS = 365
AUTHORITY_DAYS = 3650


def parser() -> argparse.ArgumentParser:
    """Make gc-certs' parser of command-line arguments."""
    found = command_parser("gc-certs", __doc__)
    found.add_argument("folder", type=Path, metavar="DIR", help="folder for the files")
    text = "name or address that workers reach the server by; may be repeated"
    found.add_argument("--host", action="append", default=[], metavar="NAME", help=text)
    text = "name of a client, written into its certificate; may be repeated"
    found.add_argument("--client", action="append", default=[], metavar="NAME", help=text)
    text = f"days for which the certificates are valid (default: {DAYS})"
    found.add_argument("--days", type=int, default=DAYS, metavar="N", help=text)
    return found


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run gc-certs with arguments `argv`, by default those of the process; return the exit code."""
    given = parser().parse_args(sys.argv[1:] if argv is None else argv)
    wrong = [name for name in given.client if not name or name in ("ca", "server") or "/" in name]
    if wrong or not (given.host or given.client) or given.days < 1:
        why = (
            f"--client {wrong[0]}: expected a name without /, other than ca and server"
            if wrong
            else "expected a --host or a --client, and --days above 0"
        )
        print(f"gc-certs: {why}", file=sys.stderr)
        return Exit.USAGE
    try:
        return _issue(given.folder, given.host, given.client, given.days)
    except ModuleNotFoundError:
        remedy = "run pip install '.[certs]' in a checkout of Gradwire"
        print(f"gc-certs: the package cryptography is not installed; {remedy}", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"gc-certs: {error}", file=sys.stderr)
    return Exit.USAGE


def _issue(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> int:
    """Make the certificates for the server, if it has hosts, and for each client; return the exit code.

    The folder and its authority, which signs, are made if they do not exist.

    Raises:
        OSError: if a file cannot be read or written, or exists already.
        ValueError: if the authority's files are no key and certificate, or a name is not allowed.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    wanted = [*(["server"] if hosts else []), *clients]
    for name in wanted:
        for suffix in (".pem", ".key"):
            if (folder / f"{name}{suffix}").exists():
                raise FileExistsError(
                    f"{folder / name}{suffix} exists already; remove it, or choose another folder"
                )
    folder.mkdir(parents=True, exist_ok=True)
    authority: tuple[Any, Any]
    if (folder / "ca.key").exists():
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        authority = key, x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    else:
        authority = _pair("gradwire", AUTHORITY_DAYS)
        _write(folder / "ca", *authority)
    for name in wanted:
        _write(folder / name, *_pair(name, days, hosts if name == "server" else (), authority))
        print(f"{folder / name}.pem, {folder / name}.key: valid for {days} days")
    print(f"{folder}/ca.pem: for --tls-ca of the workers, and of the server if workers have certificates")
    return Exit.DONE


def _write(path: Path, key: Any, certificate: Any) -> None:
    """Write path.key and path.pem as new files. The key is created readable by its owner alone."""
    from cryptography.hazmat.primitives import serialization

    pem = serialization.Encoding.PEM
    key_bytes = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for suffix, data, mode in ((".key", key_bytes, 0o600), (".pem", certificate.public_bytes(pem), 0o644)):
        descriptor = os.open(f"{path}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(data)


def _pair(
    name: str, days: int, hosts: Sequence[str] = (), authority: tuple[Any, Any] | None = None
) -> tuple[Any, Any]:
    """Make a private key and its certificate, for a subject and hosts. `authority` is the key and certificate
    of the issuer; without one it makes an authority, which signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer_key, issuer = (key, subject) if authority is None else (authority[0], authority[1].subject)
    names: list[Any] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # the clock of another machine may be behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return key, builder.sign(issuer_key, hashes.SHA256())


if __name__ == "__main__":
    sys.exit(main())
