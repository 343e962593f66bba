"""The only file that listens and connects: options of channels, the same on both ends, TLS and tokens.

Messages stay near 1 MiB for any model, so no user has to raise a limit. Keepalive detects a dead peer behind
a silent middlebox in half a minute. The server accepts pings as often as the client sends them, which avoids
"too many pings".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from ..common.naming import why_no_token
from .certificates import Certificates
from .findings import Files, Target
from .refusal import Reason, Refusal, Refused
from .wire import BATCH_BYTES, MAX_MESSAGE_BYTES

KEEPALIVE_MS = 20_000
IDLE_MS = 30_000  # for which a connection may be open without a call
MAX_BYTES = MAX_MESSAGE_BYTES + 2 * BATCH_BYTES  # limit for a message and the short ones in the same batch

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
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", IDLE_MS),  # a worker's stream is open all the time
    ("grpc.so_reuseport", 0),  # a second server on the port fails, and does not take half of the traffic
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.enable_http_proxy", 0),  # a proxy for web pages rarely reaches a server, and never 127.0.0.1
    ("grpc.enable_retries", 0),  # the worker resends messages itself, and logs it
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

AUTHORIZATION = "authorization"  # metadata key of the token
Metadata = Sequence[tuple[str, str]]


def dial(target: Target, address: str, files: Files) -> grpc.aio.Channel:
    """Return a channel to a server; gRPC connects with the first call.

    Args:
        target: name of the server, which its certificate and a proxy in front of it are asked for.
        address: address of the server, as `reaching.address_of` returns it.
        files: contents of the target's files for TLS.
    """
    options = [*CLIENT_OPTIONS, ("grpc.default_authority", target.authority)]
    if not target.tls:
        return grpc.aio.insecure_channel(address, options=options)
    untyped: Any = grpc
    return grpc.aio.secure_channel(address, untyped.ssl_channel_credentials(*files), options=options)


def credentials_of(target: Target) -> Metadata:
    """Return the metadata of a call: the token that the target's token file holds at present, or nothing.

    Raises:
        OSError: the file cannot be read.
        Refused: TOKEN, if gRPC metadata cannot hold the token.
    """
    if not target.token_file:
        return ()
    lines = Path(target.token_file).read_text(encoding="utf-8", errors="surrogateescape").split()
    token = lines[0] if lines else ""
    if why := why_no_token(token):
        raise Refused(Refusal(reason=Reason.TOKEN, message=f"--token-file {target.token_file}: {why}"))
    return ((AUTHORIZATION, f"Bearer {token}"),)


def listen(
    server: grpc.aio.Server, addresses: Sequence[str], port: int, certificates: Certificates | None
) -> int:
    """Add a port to the server, and return its number.

    Connections after a renewal of the certificates use the new ones; open connections continue.

    Args:
        addresses: IP addresses, without brackets.
        port: port on all of them; 0 for any free port.
        certificates: files for TLS; None for no TLS.

    Raises:
        RuntimeError: the port cannot be opened.
    """
    if certificates is None:
        return _added(server.add_insecure_port, addresses, port)
    untyped: Any = grpc
    latest = certificates.contents

    def configuration() -> Any:
        key, cert, ca = latest
        return untyped.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def fetch() -> Any:
        """Called by gRPC before each handshake: return the new certificates, or None if there are none."""
        nonlocal latest
        certificates.renewed()
        if certificates.contents == latest:
            return None
        latest = certificates.contents
        return configuration()

    credentials = untyped.dynamic_ssl_server_credentials(
        configuration(), fetch, require_client_authentication=latest[2] is not None
    )
    return _added(lambda where: server.add_secure_port(where, credentials), addresses, port)


def _added(add: Callable[[str], int], addresses: Sequence[str], port: int) -> int:
    """Add the port on each address, and return its number. Raises RuntimeError."""
    for address in addresses:
        port = add(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    return port
