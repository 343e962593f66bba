"""The address of a server, and findings about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, and the files that a client uses with it; empty for none.

    Attributes:
        host: a name or an address, without brackets.
        tls_ca: certificates of the authorities by which the server's is checked. tls_cert, tls_key: the
            client's own.
        token_file: whose first line is its token.
    """

    host: str
    port: int
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""

    @property
    def tls(self) -> bool:
        """Whether a worker with these files would speak TLS."""
        return bool(self.tls_ca or self.tls_cert)

    @classmethod
    def at(cls, address: str, **files: str) -> Target:
        """address: host:port, with brackets around IPv6 addresses."""
        host, _, port = address.rpartition(":")
        return cls(host=host.strip("[]"), port=int(port), **files)

    @property
    def address(self) -> str:
        """host:port, with brackets around IPv6 addresses."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        state: a warning keeps no worker from its work.
        remedy: what to do about it; empty if all is well.
        unreachable: nothing that could be a gc-server has answered.
    """

    check: str
    state: Literal["ok", "warning", "wrong"]
    text: str
    remedy: str = ""
    unreachable: bool = False
