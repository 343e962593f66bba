"""The one place that listens and dials: options of channels, alike on both ends, TLS and tokens.

Messages stay near 1 MiB whatever the model, so nobody has to raise a limit. Keepalive finds a dead peer
behind a silent middlebox in half a minute; the server accepts pings as often as the client sends them,
which is what avoids "too many pings".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from ..common.naming import why_no_token
from .findings import Target
from .refusal import Reason, Refusal, Refused
from .wire import BATCH_BYTES, MAX_MESSAGE_BYTES

KEEPALIVE_MS = 20_000
MAX_BYTES = MAX_MESSAGE_BYTES + 2 * BATCH_BYTES  # of one message, and of the short ones that go with it

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent half of the traffic
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.enable_retries", 0),  # the worker resends by itself, and says so
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

AUTHORIZATION = "authorization"  # key of the metadata that a token travels in
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Files by which a server shows who it is; empty for no TLS.

    ca: of the authorities that clients have to have a certificate of; empty for none.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Raises OSError."""
        ca = Path(self.ca).read_bytes() if self.ca else None
        return Path(self.key).read_bytes(), Path(self.cert).read_bytes(), ca


def dial(target: Target) -> grpc.aio.Channel:
    """A channel to a server. Raises OSError for a file of the target that cannot be read."""
    if not target.tls:
        return grpc.aio.insecure_channel(target.address, options=CLIENT_OPTIONS)
    untyped: Any = grpc
    files = (target.tls_ca, target.tls_key, target.tls_cert)
    credentials = untyped.ssl_channel_credentials(
        *(Path(file).read_bytes() if file else None for file in files)
    )
    return grpc.aio.secure_channel(target.address, credentials, options=CLIENT_OPTIONS)


def credentials_of(target: Target) -> Metadata:
    """Return what goes with each call: the token, as its file has it now. Raises OSError, and Refused for one
    that no call can carry."""
    if not target.token_file:
        return ()
    lines = Path(target.token_file).read_text(encoding="utf-8", errors="surrogateescape").split()
    token = lines[0] if lines else ""
    if why := why_no_token(token):
        raise Refused(Refusal(reason=Reason.TOKEN, message=f"--token-file {target.token_file}: {why}"))
    return ((AUTHORIZATION, f"Bearer {token}"),)


def listen(server: grpc.aio.Server, where: str, identity: Identity) -> int:
    """Listen there; returns the port. Connections that are made after the files have changed are met with the
    new ones; those that are open go on. Raises RuntimeError and OSError."""
    if not identity.cert:
        return server.add_insecure_port(where)
    untyped: Any = grpc
    latest = identity.read()

    def configuration(files: tuple[bytes, bytes, bytes | None]) -> Any:
        key, cert, ca = files
        return untyped.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def fetch() -> Any:
        """Asked for before each handshake."""
        nonlocal latest
        try:
            found = identity.read()
        except OSError:  # they are being replaced
            return None
        if found == latest:
            return None
        latest = found
        return configuration(found)

    credentials = untyped.dynamic_ssl_server_credentials(
        configuration(latest), fetch, require_client_authentication=bool(identity.ca)
    )
    return server.add_secure_port(where, credentials)
