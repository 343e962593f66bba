"""The address of a server, and findings about its reachability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    def address(self) -> str:
        """The address as "host:port", with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
