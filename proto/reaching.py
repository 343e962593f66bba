"""Checks of whether a server can be reached: its name, its port, and TLS.

They use sockets alone, so that each failure has a text of its own. gRPC reports all of them as UNAVAILABLE.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Generator, Mapping

from ..common.addresses import numeric
from .findings import Finding, Target, UnreachedError

TIMEOUT_S = 5.0
EXPIRES_SOON_S = 14 * 86400.0

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # with empty SETTINGS
SETTINGS = 4  # type of the first frame that an HTTP/2 server sends
_FULL = "it may have as many connections as it accepts: its log says so"
_NO_TLS = (
    "the server does not speak TLS",
    "start gc-server with --tls-cert and --tls-key, or leave out --tls-ca and --tls-cert here",
)
_DIRECT = "; Gradwire uses no proxy, whatever http_proxy says"
TLS_RECORDS = (b"\x15\x03", b"\x16\x03")  # first bytes of an alert, and of a handshake


def reach(target: Target) -> Generator[Finding]:
    """Yield the findings of the checks of name, port and TLS, in this order, up to the first that is
    wrong.
    """
    try:
        addresses = _resolved(target)
        yield Finding(check="name", state="ok", text=f"{target.host} is {', '.join(addresses)}")
        began = time.perf_counter()
        with _connected(target):
            took_ms = 1e3 * (time.perf_counter() - began)
        yield Finding(check="port", state="ok", text=f"{target.port} is open; connected in {took_ms:.1f} ms")
        yield _tls(target) if target.tls else _plain(target)
    except UnreachedError as error:
        yield error.finding


def address_of(target: Target) -> str:
    """Return the first address of the target that accepts a connection, in gRPC's notation.

    Raises:
        UnreachedError: the name is not found, or no address of it accepts a connection.
    """
    _resolved(target)
    with _connected(target) as connected:
        where = connected.getpeername()
    host = numeric(where).replace("%", "%25")
    return f"ipv6:[{host}]:{where[1]}" if ":" in host else f"ipv4:{host}:{where[1]}"


def _resolved(target: Target) -> list[str]:
    """Return the target's IP addresses, without repetitions. Raises UnreachedError."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
        remedy = "check the spelling and this machine's DNS (gc-doctor tests both), or use an IP address"
        text = f"{target.host!r} is not found: {getattr(error, 'strerror', None) or error}"
        raise UnreachedError(_wrong("name", text, remedy, True)) from None
    return list(dict.fromkeys(numeric(each[4]) for each in found))


def _wrong(check: str, text: str, remedy: str, unreachable: bool = False) -> Finding:
    """Return a finding with the state "wrong"."""
    return Finding(check=check, state="wrong", text=text, remedy=remedy, unreachable=unreachable)


def _connected(target: Target) -> socket.socket:
    """Return a socket that is connected to the target. Raises UnreachedError."""
    try:
        connected = socket.create_connection((target.host, target.port), timeout=TIMEOUT_S)
    except TimeoutError:
        text = f"no answer from port {target.port} in {TIMEOUT_S:g} s"
        remedy = f"check the address, firewalls and network policies: packets to the server are lost{_DIRECT}"
    except OSError as error:
        text = f"port {target.port}: {error.strerror or error}"
        remedy = {
            errno.ECONNREFUSED: "nothing listens there: is gc-server running, on this port, and its --host "
            "not 127.0.0.1?",
            errno.EHOSTUNREACH: f"there is no route to that machine from here{_DIRECT}",
            errno.ENETUNREACH: f"there is no route to that network from here{_DIRECT}",
        }.get(error.errno or 0, "is gc-server running there, and its port open to this machine?")
    else:
        connected.settimeout(TIMEOUT_S)
        return connected
    raise UnreachedError(_wrong("port", text, remedy, True))


def _plain(target: Target) -> Finding:
    """Check that the server speaks HTTP/2 without TLS."""
    other = "check that it is the server's gRPC port, not its --http-port, and not another program's"
    try:
        with _connected(target) as connected:
            connected.sendall(PREFACE)
            said = connected.recv(9)
            while said and len(said) < 9 and (more := connected.recv(9 - len(said))):
                said += more
    except TimeoutError:
        text = f"no answer to an HTTP/2 greeting in {TIMEOUT_S:g} s"
        return _wrong("tls", text, f"{other}; {_FULL}", True)
    except OSError:
        said = b""
    if len(said) == 9 and said[3] == SETTINGS:
        return Finding(check="tls", state="ok", text="none: the connection is not encrypted")
    if said[:2] in TLS_RECORDS or _speaks_tls(target):
        remedy = "add --tls-ca FILE, the certificate of the authority that issued the server's"
        return _wrong("tls", "the server speaks TLS, and no file was given", remedy)
    if said:
        return _wrong("tls", f"not a gRPC server: it answers {said!r}", other, True)
    return _wrong("tls", "the server closes the connection", f"{other}; {_FULL}", True)


def _speaks_tls(target: Target) -> bool:
    """Return True if the server answers a TLS handshake."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connected(target) as connected, context.wrap_socket(connected):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


def _tls(target: Target) -> Finding:
    """Check the TLS handshake, and the dates of the server's certificate."""
    try:
        context = ssl.create_default_context(cafile=target.tls_ca or None)
        context.set_alpn_protocols(["h2"])
        if target.tls_cert:
            context.load_cert_chain(target.tls_cert, target.tls_key)
    except (OSError, ssl.SSLError) as error:
        remedy = (
            "check that --tls-ca, --tls-cert and --tls-key are PEM files, and that key and certificate match"
        )
        return _wrong("tls", f"cannot use the TLS files: {_words(error)}", remedy)
    certificate: Mapping[str, object] = {}
    try:
        with (
            _connected(target) as connected,
            context.wrap_socket(connected, server_hostname=target.name) as secured,
        ):
            certificate = secured.getpeercert() or {}
            version = secured.version() or "TLS"
            secured.sendall(PREFACE)
            if not secured.recv(9):  # in TLS 1.3 a server refuses a client's certificate after the handshake
                return _wrong("tls", *_hung_up(target))
    except ssl.SSLCertVerificationError as error:
        text = f"the server's certificate is not accepted: {error.verify_message}"
        return _wrong("tls", text, _remedy(error))
    except (ssl.SSLEOFError, ConnectionResetError):
        if certificate:
            return _wrong("tls", *_hung_up(target))
        if _plain(target).state == "ok":
            return _wrong("tls", *_NO_TLS)
        text = "the server closes the connection before it shows a certificate"
        return _wrong("tls", text, f"is it the server's gRPC port? {_FULL}", True)
    except ssl.SSLError as error:
        return _wrong("tls", *_refused(target, error))
    except OSError as error:
        remedy = "is it the server's gRPC port, and was the server started with --tls-cert and --tls-key?"
        return _wrong("tls", f"the TLS handshake ends early: {error.strerror or error}", remedy)
    if "notAfter" not in certificate:
        return Finding(check="tls", state="ok", text=version)
    left_s = ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()
    text = f"{version}; the server's certificate is valid for {left_s / 86400:.0f} days"
    if left_s < EXPIRES_SOON_S:
        return Finding(check="tls", state="warning", text=text, remedy="renew it: gc-certs")
    return Finding(check="tls", state="ok", text=text)


def _hung_up(target: Target) -> tuple[str, str]:
    """Return text and remedy for a server that closes the connection after the handshake."""
    if target.tls_cert:
        remedy = "use a valid certificate, issued by the authority that the server was started with"
        return "the server refuses this worker's certificate", remedy
    return "the server wants a certificate of the worker", "add --tls-cert and --tls-key"


def _words(error: OSError) -> str:
    """Return the reason of an error, in words."""
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else error.strerror or str(error)


def _remedy(error: ssl.SSLCertVerificationError) -> str:
    """Return the remedy for a server's certificate that this machine does not accept."""
    said = error.verify_message.lower()
    if "expired" in said:
        return "renew the server's certificate, and check the clocks of both machines"
    if "not yet valid" in said:
        return "check the clocks of both machines"
    if "mismatch" in said or "not valid for" in said:
        return "use a name in the server's certificate, or issue a certificate for this name"
    return "set --tls-ca to the authority that issued the server's certificate"


def _refused(target: Target, error: ssl.SSLError) -> tuple[str, str]:
    """Return text and remedy for a TLS handshake that failed."""
    reason = (error.reason or "").upper()
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "HANDSHAKE" in reason):
        if not target.tls_cert:
            return "the server wants a certificate of the worker", "add --tls-cert and --tls-key"
        return (
            f"the server does not accept this worker's certificate: {_words(error)}",
            "use a valid certificate, issued by the authority that the server was started with",
        )
    if any(word in reason for word in ("WRONG_VERSION", "RECORD_LAYER", "PACKET_LENGTH")):
        return _NO_TLS
    return f"the TLS handshake fails: {_words(error)}", "are both sides of the same release of gradwire?"
