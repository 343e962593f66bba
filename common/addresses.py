"""Addresses: those that users write, and those that a process listens on, for gRPC and HTTP alike."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

DEFAULT_PORT = 50051
EVERYWHERE = ("0.0.0.0", "::")
THIS_MACHINE = ("127.0.0.1", "::1")


def parse_address(text: str) -> str:
    """Return an address as host:port, with port 50051 if `text` has none. An IPv6 host is written
    [host]:port.

    Raises:
        ValueError: `text` is not host or host:port, such as a URL.
    """
    scheme, slashes, rest = text.partition("://")
    if slashes:
        bare = rest.partition("/")[0] or "host:port"
        raise ValueError(f"expected host or host:port without {scheme}://, such as {bare}, got {text!r}")
    if "/" in text or any(c.isspace() for c in text):
        raise ValueError(f"expected host or host:port, got {text!r}")
    bracket, _, inside = text.rpartition("[")
    if bracket or "[" in text or "]" in text:
        host, closed, port = inside.partition("]")
        if bracket or not closed or port[:1] not in ("", ":"):
            raise ValueError(f"expected host, host:port or [IPv6 address]:port, got {text!r}")
        colon, port = port[:1], port[1:]
    elif text.count(":") > 1:
        host, colon, port = text, "", ""
    else:
        host, colon, port = text.partition(":")
    if not host or (colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise ValueError(f"expected host:port with a port from 1 to 65535, got {text!r}")
    if ":" in host or "[" in text:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            example = "expected host, host:port or an IPv6 address, as in [::1]:50051"
            raise ValueError(f"{example}, got {text!r}") from None
        host = f"[{host}]"
    return f"{host}:{port or DEFAULT_PORT}"


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
