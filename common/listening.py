"""The addresses that a process listens on, for gRPC and for HTTP alike."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

EVERYWHERE = ("0.0.0.0", "::")
THIS_MACHINE = ("127.0.0.1", "::1")


def parse_host(text: str) -> None:
    """Raise ValueError if `text` looks like an IP address but is not one. Host names are not checked here."""
    try:
        if ":" in text:
            ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
        elif text.replace(".", "").isdecimal():
            socket.inet_aton(text)  # accepts short forms too, such as 127.1
    except (ValueError, OSError):
        raise ValueError(f"expected an IP address without a port, or a name, got {text!r}") from None


def listening_addresses(host: str) -> list[str]:
    """Return the IP addresses to listen on; those that this machine does not have are left out.

    Args:
        host: IP address, also in brackets, or name; "0.0.0.0" and "::" both stand for all addresses of both
            families, as gRPC has it; "" for this machine alone.

    Raises:
        OSError: the name is not found.
    """
    named: list[str]
    host = host.removeprefix("[").removesuffix("]")
    if host in EVERYWHERE:
        return ["::" if _is_here("::") else "0.0.0.0"]
    if host:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        named = list(dict.fromkeys(numeric(each[4]) for each in found))
    else:
        named = [*THIS_MACHINE]
    return [address for address in named if _is_here(address)] or named


def numeric(where: tuple[Any, ...]) -> str:
    """Return the IP address in a socket's address, with its interface where that belongs to it."""
    scope = where[3] if len(where) == 4 else 0
    return f"{where[0]}%{scope}" if scope else str(where[0])


def _is_here(address: str) -> bool:
    """Return True if a socket can be bound to the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as tried:
            tried.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4])
    except OSError:
        return False
    return True
