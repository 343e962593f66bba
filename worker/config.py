"""The options of gc-worker. Imports neither torch nor grpc, so that `--help` answers at once."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ..options import DEFAULT_HTTP_PORT, LOG_FORMATS, at_least, option, port_number

DEVICES = ("auto", "cpu", "cuda")


def default_worker_id() -> str:
    """Unique among the processes of a network: host name and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    server: str = option(
        help="address of the server, host:port (the port defaults to 50051)", metavar="HOST[:PORT]"
    )
    worker_id: str = option(
        "", "name of this worker, unique in the job; host name and process id if not given"
    )
    compressor: str = option("4bit", "how gradients are compressed", metavar="NAME[:KEY=VALUE,...]")
    dense_layers: str = option(
        "", "parameters to send uncompressed: name patterns such as *.head.*,embed*", metavar="PATTERN,..."
    )
    compressed_layers: str = option(
        "", "parameters to compress although they are small: name patterns", metavar="PATTERN,..."
    )
    device: str = option("auto", "where to compute; auto takes CUDA if there is one", choices=DEVICES)
    threads: int = option(
        0, "CPU threads for computing and compressing; 0 for torch's choice", check=at_least(0)
    )
    http_port: int = option(
        DEFAULT_HTTP_PORT, "port of /metrics, /livez and /readyz; 0 for none", check=port_number
    )
    connect_seconds: float = option(30.0, "how long to look for the server at first", check=at_least(0))
    give_up_seconds: float = option(
        120.0, "how long to try to come back after the connection broke", check=at_least(0)
    )
    leave_seconds: float = option(
        20.0, "when told to stop, how long to try to hand over what was not sent yet", check=at_least(0)
    )
    log_format: str = option("auto", "words, JSON lines, or words on a terminal only", choices=LOG_FORMATS)
