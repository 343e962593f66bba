"""The certificate that a server shows, read again while the server runs.

Files that cannot serve are not used: the last good ones stay in force, and the log says why. A certificate
cannot serve if it has expired or is not valid yet, if its key does not belong to it, or if one of the files
cannot be read.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

log = logging.getLogger("gradwire.server")

SOON_DAYS = 14
REMEDY = "renew it (gc-certs makes certificates), and replace certificate and key by renaming"

Contents = tuple[bytes, bytes, bytes | None]  # key, certificate, authorities or None


class CertificateError(ValueError):
    """Raised when the files of a server's identity cannot serve. The message names file, reason, remedy."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The files that prove a server's identity to its clients by TLS.

    Attributes:
        cert: path of the server's certificate, PEM; empty for no TLS.
        key: path of the certificate's private key, PEM; empty for no TLS.
        ca: path of the authorities of which clients need a certificate, PEM; empty if they need none.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""


class Certificates:
    """The newest files of an identity that can serve. Any thread may call it.

    Attributes:
        contents: contents of these files.
        expires_at: end of the certificate's validity, in seconds since the epoch.
    """

    def __init__(self, identity: Identity) -> None:
        """Read the files.

        Raises:
            CertificateError: they cannot serve.
        """
        self._identity = identity
        self._lock = threading.Lock()
        self._said: object = None  # the last line of the log was about this
        self.contents, self.expires_at = self._read(time.time())

    def renewed(self) -> bool:
        """Read the files again, and return True if they have changed and can serve. Log why they cannot."""
        with self._lock:
            now = time.time()
            try:
                contents, expires_at = self._read(now)
            except CertificateError as error:
                stay = "the files that were read before stay in force"
                then = "no client can connect until then" if self.failing else stay
                self._say(str(error), f"{error}; {then}")
                return False
            days = int((expires_at - now) / 86400)
            if days < SOON_DAYS:
                why = f"expires in {days} days, {_date(expires_at)}; {REMEDY}"
                self._say((expires_at, days), f"--tls-cert {self._identity.cert}: {why}", logging.WARNING)
            else:
                self._said = None
            if contents == self.contents:
                return False
            self.contents, self.expires_at = contents, expires_at
            log.info("--tls-cert %s: read again, valid until %s", self._identity.cert, _date(expires_at))
            return True

    @property
    def failing(self) -> str:
        """Reason why clients cannot connect; empty if they can."""
        if time.time() < self.expires_at:
            return ""
        return f"--tls-cert {self._identity.cert}: has expired, {_date(self.expires_at)}; {REMEDY}"

    def _say(self, what: object, text: str, level: int = logging.ERROR) -> None:
        """Log a line, unless the last one was about the same."""
        if what != self._said:
            self._said = what
            log.log(level, "%s", text)

    def _read(self, now: float) -> tuple[Contents, float]:
        """Return the contents of the files, and the end of validity. Raises CertificateError."""
        files = self._identity
        contents = (
            _contents("--tls-key", files.key),
            _contents("--tls-cert", files.cert),
            _contents("--tls-ca", files.ca) if files.ca else None,
        )
        begins_at, ends_at = _validity(files.cert, contents[1])
        why = f"has expired, {_date(ends_at)}" if now >= ends_at else ""
        if now < begins_at:
            why = f"is not valid before {_date(begins_at)}"
        if why:
            raise CertificateError(f"--tls-cert {files.cert}: {why}; {REMEDY}, and check the clock")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A password would be asked for on the terminal.
            context.load_cert_chain(files.cert, files.key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            why = (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
            both = f"--tls-cert {files.cert} and --tls-key {files.key}"
            raise CertificateError(f"{both}: cannot be used together: {why}; {REMEDY}") from None
        if files.ca:
            try:
                context.load_verify_locations(files.ca)
            except (OSError, ssl.SSLError):
                raise CertificateError(f"--tls-ca {files.ca}: no certificates in PEM; {REMEDY}") from None
        return contents, ends_at


def _contents(flag: str, path: str) -> bytes:
    """Return the contents of a file. Raises CertificateError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CertificateError(f"{flag} {path}: cannot be read: {error.strerror}") from None


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _validity(path: str, pem: bytes) -> tuple[float, float]:
    """Return begin and end of the validity of the first certificate, in seconds since the epoch.

    Raises:
        CertificateError: there is no certificate.
    """
    try:
        text = pem.decode()
        begin, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        return validity(ssl.PEM_cert_to_DER_cert(text[begin:end]))
    except (ValueError, IndexError):
        raise CertificateError(f"--tls-cert {path}: no certificate in PEM; {REMEDY}") from None


def validity(der: bytes) -> tuple[float, float]:
    """Return begin and end of a certificate's validity, in seconds since the epoch (RFC 5280, 4.1).

    The standard library reads the dates of peers' certificates only.

    Raises:
        ValueError, IndexError: it is no certificate.
    """

    def element(at: int) -> tuple[int, int, int]:
        """Return tag, begin and end of the contents of the element at an offset."""
        tag, size, begin = der[at], der[at + 1], at + 2
        if size & 0x80:
            begin += size & 0x7F
            size = int.from_bytes(der[at + 2 : begin])
        return tag, begin, begin + size

    _, at, _ = element(0)  # the certificate
    _, at, _ = element(at)  # its signed part
    if der[at] == 0xA0:  # version, which may be missing
        at = element(at)[2]
    for _ in ("serial number", "signature algorithm", "issuer"):
        at = element(at)[2]
    _, at, _ = element(at)
    times: list[float] = []
    for _ in ("not before", "not after"):
        tag, begin, at = element(at)
        year = "%y" if tag == 0x17 else "%Y"
        read = datetime.strptime(der[begin:at].decode(), f"{year}%m%d%H%M%SZ")
        times.append(read.replace(tzinfo=UTC).timestamp())
    return times[0], times[1]
