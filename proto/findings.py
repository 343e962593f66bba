"""The address of a server, and findings about its reachability."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Files = tuple[bytes | None, bytes | None, bytes | None]  # authorities, private key, certificate


@dataclass(frozen=True, kw_only=True)
class Target:
    """The address of a server, and the files that a client uses to connect to it.

    Attributes:
        host: host name or IP address, without brackets.
        port: port number.
        tls_ca: path of the authorities by which the server's certificate is checked, PEM; empty for the
            system's.
        tls_cert, tls_key: paths of the client's own certificate and private key, PEM; empty for none.
        token_file: path of the file whose first line is the client's token; empty for none.
    """

    host: str
    port: int
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""

    @property
    def tls(self) -> bool:
        """True if a worker with these files speaks TLS."""
        return bool(self.tls_ca or self.tls_cert)

    @classmethod
    def at(cls, address: str, **files: str) -> Target:
        """Return the target at an address, with the given files.

        Args:
            address: "host:port", with brackets around an IPv6 address.
            files: paths by the name of the attribute, such as tls_ca or token_file.
        """
        host, _, port = address.rpartition(":")
        return cls(host=host.strip("[]"), port=int(port), **files)

    @property
    def name(self) -> str:
        """The host as its certificate names it: without the final dot of DNS and an interface's name."""
        return self.host.partition("%")[0].removesuffix(".")

    @property
    def authority(self) -> str:
        """Name and port, with brackets around an IPv6 address."""
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"

    def read(self) -> Files:
        """Return the contents of the files for TLS.

        Raises:
            OSError: a file cannot be read.
        """
        ca, key, cert = (
            Path(file).read_bytes() if file else None for file in (self.tls_ca, self.tls_key, self.tls_cert)
        )
        return ca, key, cert


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        state: "ok"; "warning", if workers can work nevertheless; or "wrong".
        text: description of the finding for people, one clause.
        remedy: action that mends it; empty if the state is "ok".
        unreachable: True if no process that could be a gc-server has answered.
    """

    check: str
    state: Literal["ok", "warning", "wrong"]
    text: str
    remedy: str = ""
    unreachable: bool = False


class UnreachedError(Exception):
    """Raised when no connection to a server can be opened. The message is the finding's text and remedy."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.text}; {finding.remedy}")
        self.finding = finding


# Remedies by HTTP status, with nginx' settings, and the annotations of its ingress controller for Kubernetes.
_PROXIES = {
    408: "let requests take long: client_body_timeout 1h",
    413: 'let it admit requests of any size: client_max_body_size 0 (ingress: proxy-body-size "0")',
    502: "is gc-server running behind it, and is gRPC passed on: grpc_pass (ingress: backend-protocol GRPC)?",
    503: "is gc-server running behind it, and is the proxy not overloaded?",
    504: "let requests take long: grpc_read_timeout 1h, grpc_send_timeout 1h (ingress: proxy-read-timeout)",
}
_TRANSIENT = (408, 425, 429)


def proxy_finding(status: int) -> Finding:
    """Return the finding of an HTTP status that is not 200, which only a proxy sends; `unreachable` is True
    if another attempt may succeed.
    """
    remedy = _PROXIES.get(status, "check its rules: it must pass every path and HTTP/2 on (nginx: grpc_pass)")
    return Finding(
        check="proxy",
        state="wrong",
        text=f"a proxy in front of the server answers with HTTP status {status}",
        remedy=remedy,
        unreachable=status >= 500 or status in _TRANSIENT,
    )
