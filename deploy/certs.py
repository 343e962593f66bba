"""gc-certs: certificates for a server and its workers, from an authority of their own.

Makes DIR/ca.pem and DIR/ca.key, an authority that nobody else trusts; DIR/server.pem and .key, for the
names and addresses that workers reach the server by; and one pair for each --client. Keys can be read by
their owner alone. Files that are there stay: an authority goes on to issue others.
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
from ..common.version import __version__

DAYS = 365
AUTHORITY_DAYS = 3650


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="gc-certs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--version", action="version", version=f"gc-certs {__version__}")
    found.add_argument("folder", type=Path, metavar="DIR", help="where the files go")
    text = "name or address that workers reach the server by; may be given again"
    found.add_argument("--host", action="append", default=[], metavar="NAME", help=text)
    text = "name of a client, which the certificate bears; may be given again"
    found.add_argument("--client", action="append", default=[], metavar="NAME", help=text)
    found.add_argument("--days", type=int, default=DAYS, metavar="N", help=f"validity (default: {DAYS})")
    return found


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = parser().parse_args(sys.argv[1:] if argv is None else argv)
    wrong = [name for name in given.client if not name or name in ("ca", "server") or "/" in name]
    if wrong or not (given.host or given.client) or given.days < 1:
        why = (
            f"--client {wrong[0]}: choose another name"
            if wrong
            else "expected a --host or a --client, and --days above 0"
        )
        print(f"gc-certs: {why}", file=sys.stderr)
        return Exit.USAGE
    try:
        return _issue(given.folder, given.host, given.client, given.days)
    except ModuleNotFoundError:
        remedy = "pip install '.[certs]' in a checkout of Gradwire brings it"
        print(f"gc-certs: the package cryptography is not installed; {remedy}", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"gc-certs: {error}", file=sys.stderr)
    return Exit.USAGE


def _issue(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> int:
    """Raises OSError, also for a file that is there already, and ValueError for one that is no key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    wanted = [*(["server"] if hosts else []), *clients]
    for name in wanted:
        for suffix in (".pem", ".key"):
            if (folder / f"{name}{suffix}").exists():
                raise FileExistsError(
                    f"{folder / name}{suffix} is there already; remove it, or choose another folder"
                )
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "ca.key").exists():
        key: Any = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    else:
        key, authority = _authority()
        _write(folder / "ca.key", _key_bytes(key), 0o600)
        _write(folder / "ca.pem", authority.public_bytes(serialization.Encoding.PEM), 0o644)
    for name in wanted:
        own, certificate = _certificate(name, hosts if name == "server" else (), key, authority, days)
        _write(folder / f"{name}.key", _key_bytes(own), 0o600)
        _write(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        print(f"{folder / name}.pem, {folder / name}.key: valid for {days} days")
    print(f"{folder}/ca.pem: --tls-ca of the workers, and of the server if they have certificates")
    return Exit.DONE


def _write(path: Path, data: bytes, mode: int) -> None:
    """A new file, which nobody else can read before it has its mode."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(data)


def _key_bytes(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    data: bytes = key.private_bytes(*form)
    return data


def _authority() -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gradwire")])
    return key, _signed(name, name, key, key, AUTHORITY_DAYS, authority=True, hosts=())


def _certificate(
    name: str, hosts: Sequence[str], authority_key: Any, authority: Any, days: int
) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    return key, _signed(subject, authority.subject, key, authority_key, days, authority=False, hosts=hosts)


def _signed(
    subject: Any, issuer: Any, key: Any, signed_by: Any, days: int, *, authority: bool, hosts: Sequence[str]
) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.now(UTC)
    names: list[Any] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signed_by, hashes.SHA256())


if __name__ == "__main__":
    sys.exit(main())
