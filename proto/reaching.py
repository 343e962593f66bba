"""Whether a server can be reached: its name, its port, and TLS, by sockets alone, so that each failure has
its own words. gRPC calls all of them UNAVAILABLE."""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Generator

from .findings import Finding, Target

TIMEOUT_S = 5.0
EXPIRES_SOON_S = 14 * 86400.0

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty SETTINGS
SETTINGS = 4  # type of the frame that a server of HTTP/2 says first
TLS_RECORDS = (b"\x15\x03", b"\x16\x03")  # an alert, or a handshake


def reach(target: Target) -> Generator[Finding]:
    """Yield the checks up to the first byte of gRPC, none after one that is wrong."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "check its spelling, and the DNS of this machine; an IP address needs neither"
        yield _wrong("name", f"{target.host!r} is not found: {error.strerror or error}", remedy, True)
        return
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    yield Finding(check="name", state="ok", text=f"{target.host} is {', '.join(addresses)}")
    reached = _port(target)
    yield reached
    if reached.state == "wrong":
        return
    yield _tls(target) if target.tls else _plain(target)


def _wrong(check: str, text: str, remedy: str, unreachable: bool = False) -> Finding:
    return Finding(check=check, state="wrong", text=text, remedy=remedy, unreachable=unreachable)


def _connected(target: Target) -> socket.socket:
    connected = socket.create_connection((target.host, target.port), timeout=TIMEOUT_S)
    connected.settimeout(TIMEOUT_S)
    return connected


def _port(target: Target) -> Finding:
    began = time.perf_counter()
    try:
        with _connected(target):
            took_ms = 1e3 * (time.perf_counter() - began)
    except TimeoutError:
        text = f"no answer from port {target.port} in {TIMEOUT_S:g} s"
        remedy = "a firewall, a network policy or a wrong address: packets to it are dropped"
    except OSError as error:
        text = f"port {target.port}: {error.strerror or error}"
        remedy = {
            errno.ECONNREFUSED: "nothing listens there: is gc-server running, on this port, and its --host "
            "not 127.0.0.1?",
            errno.EHOSTUNREACH: "there is no route to that machine from here",
            errno.ENETUNREACH: "there is no route to that network from here",
        }.get(error.errno or 0, "is gc-server running there, and its port open to this machine?")
    else:
        return Finding(check="port", state="ok", text=f"{target.port} is open; connected in {took_ms:.1f} ms")
    return _wrong("port", text, remedy, True)


def _plain(target: Target) -> Finding:
    """Check that a server speaks HTTP/2 without TLS."""
    other = "another program has that port; is it the server's gRPC port, and not its --http-port?"
    try:
        with _connected(target) as connected:
            connected.sendall(PREFACE)
            said = connected.recv(9)
            while said and len(said) < 9 and (more := connected.recv(9 - len(said))):
                said += more
    except TimeoutError:
        return _wrong("tls", f"the server says nothing for {TIMEOUT_S:g} s", other, True)
    except OSError:
        said = b""
    if len(said) == 9 and said[3] == SETTINGS:
        return Finding(check="tls", state="ok", text="none: the connection is not encrypted")
    if said[:2] in TLS_RECORDS or _speaks_tls(target):
        remedy = "add --tls-ca FILE, the certificate of the authority that issued the server's"
        return _wrong("tls", "the server speaks TLS, and no file was given", remedy)
    text = f"what answers is no gRPC server: it says {said!r}" if said else "the connection is closed"
    return _wrong("tls", text, other, True)


def _speaks_tls(target: Target) -> bool:
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
    try:
        context = ssl.create_default_context(cafile=target.tls_ca or None)
        context.set_alpn_protocols(["h2"])
        if target.tls_cert:
            context.load_cert_chain(target.tls_cert, target.tls_key)
    except (OSError, ssl.SSLError) as error:
        remedy = "--tls-ca, --tls-cert and --tls-key are PEM files, and the key that of the certificate"
        return _wrong("tls", f"the files cannot be used: {_words(error)}", remedy)
    try:
        with (
            _connected(target) as connected,
            context.wrap_socket(connected, server_hostname=target.host) as secured,
        ):
            certificate = secured.getpeercert() or {}
            version = secured.version() or "TLS"
            secured.sendall(PREFACE)
            if not secured.recv(9):  # with TLS 1.3 a server refuses a certificate only now
                return _wrong("tls", *_hung_up(target))
    except ssl.SSLCertVerificationError as error:
        text = f"the server's certificate is not accepted: {error.verify_message}"
        return _wrong("tls", text, _remedy(error))
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
    if target.tls_cert:
        remedy = "its authority has to be the one that the server was started with, and both dates valid"
        return "the server hangs up on this worker's certificate", remedy
    return "the server hangs up: it wants a certificate of the worker", "add --tls-cert and --tls-key"


def _words(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else error.strerror or str(error)


def _remedy(error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message.lower()
    if "expired" in said:
        return "renew the server's certificate, and check the clocks of both machines"
    if "not yet valid" in said:
        return "check the clocks of both machines"
    if "mismatch" in said or "not valid for" in said:
        return "use a name that the certificate has, or have one issued for this name"
    return "--tls-ca has to be the authority that has issued the server's certificate"


def _refused(target: Target, error: ssl.SSLError) -> tuple[str, str]:
    reason = (error.reason or "").upper()
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "HANDSHAKE" in reason):
        if not target.tls_cert:
            return "the server wants a certificate of the worker", "add --tls-cert and --tls-key"
        return (
            f"the server does not accept this worker's certificate: {_words(error)}",
            "it has to be issued by the authority that the server was started with, and not be expired",
        )
    if any(word in reason for word in ("WRONG_VERSION", "RECORD_LAYER", "PACKET_LENGTH", "UNEXPECTED_EOF")):
        return (
            "the server does not speak TLS",
            "start gc-server with --tls-cert and --tls-key, or leave out --tls-ca and --tls-cert here",
        )
    return f"the TLS handshake fails: {_words(error)}", "are both sides of the same release of gradwire?"
