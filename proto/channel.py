"""Channel options, alike on both ends.

Messages stay near 1 MiB whatever the model, so nobody has to raise a limit. Keepalive finds a dead peer
behind a silent middlebox in half a minute; the server accepts pings as often as the client sends them,
which is what avoids "too many pings".
"""

from __future__ import annotations

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
