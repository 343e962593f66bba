"""Telemetry of every daemon: log lines on stderr; /metrics, /livez and /readyz over HTTP."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, exposition

from . import ports
from .addresses import listening_addresses
from .configuration import Effective, UsageError
from .naming import printable

# Fields of a JSON log line that identify its process, or, as `extra=` of the call, the worker it is about.
LOG_FIELDS = ("job", "worker", "rank", "version")

_WARNINGS = logging.WARNING - 1  # a level that `keep_warnings` recognises as its own
MOST_SCRAPE_S = 90.0  # a longer interval between two scrapes is not regular; Prometheus' default is 60 s
MOST_REQUESTS = 64  # connections over HTTP at a time; peers that send no request cannot take more

LogFields = Callable[[], Mapping[str, object]]


class Answer(NamedTuple):
    """The answer to an HTTP request: status line, type and bytes of the content, and further headers."""

    status: str
    kind: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()


class _JsonLines(logging.Formatter):
    """Formats a record as one JSON object, with the fields that `add_log_fields` adds."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: LogFields = dict[str, object]

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(self.fields())
        line.update({name: value for name, value in vars(record).items() if name in LOG_FIELDS})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _TextLines(logging.Formatter):
    """Formats a record for people to read.

    Only the first line of a record begins at the left edge: its other lines, such as a traceback, are
    indented. Control characters are escaped, also in texts that a worker sent.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(printable, super().format(record).split("\n")))


def set_up_logging(log_format: str, level: str = "INFO") -> None:
    """Send all log records to stderr, from level `level` on.

    Args:
        log_format: "text" for lines that people read, "json" for one JSON object a line.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(_TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("numba").setLevel(logging.WARNING)


def keep_warnings() -> None:
    """Have Gradwire's warnings reach a script's handlers, whichever way its frameworks have set up logging.

    `logging.config` disables loggers that it does not name, and some frameworks raise the root's level. A
    script that wants fewer lines sets the level of the logger `gradwire`.
    """
    for name, logger in [*logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "gradwire":
            logger.disabled = False
    ours = logging.getLogger("gradwire")
    if ours.level in (logging.NOTSET, _WARNINGS):
        ours.setLevel(_WARNINGS if logging.root.level > logging.WARNING else logging.NOTSET)


def add_log_fields(fields: LogFields) -> None:
    """Add the values that `fields` returns, by name out of `LOG_FIELDS`, to every JSON log line."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _JsonLines):
            handler.formatter.fields = fields


class _Server(ThreadingMixIn, WSGIServer):
    """HTTP server with one thread per request, so that a slow scrape does not delay a probe."""

    daemon_threads = True
    request_queue_size = MOST_REQUESTS

    def __init__(self, address: str, port: int, app: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._open: deque[Any] = deque()
        super().__init__((address, port), _QuietHandler)
        self.set_app(app)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            both = self.server_address[0] == "::"  # IPv4 too
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        TCPServer.server_bind(self)  # WSGIServer's would look up the name of the address
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close the oldest one if there are too many. A probe is quick."""
        self._open.append(request)
        if len(self._open) > MOST_REQUESTS:
            with contextlib.suppress(OSError):
                self._open.popleft().shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # an OSError means that the peer has disconnected
            super().handle_error(request, client_address)


class _QuietHandler(WSGIRequestHandler):
    timeout = 10  # seconds in which a peer must send its request

    def log_message(self, format: str, *args: Any) -> None:
        logging.getLogger("gradwire.http").debug(format, *args)


class HttpEndpoint:
    """HTTP endpoint that serves /metrics, /livez, /readyz and pages from its own threads until `close`.

    Attributes:
        scrapes: number of requests of /metrics.
    """

    def __init__(
        self,
        effective: Effective[Any],
        host: str,
        registry: CollectorRegistry,
        stopping: Callable[[], bool],
        state: Callable[[], str],
        hung: Callable[[], str] = str,
        failing: Callable[[], str] = str,
        pages: Mapping[str, Callable[[], Answer]] | None = None,
    ) -> None:
        """
        Args:
            effective: options of the daemon. `http_port` is 0 for a free port and negative for no endpoint.
                If it is the default and in use, a free port is used instead.
            host: address to listen on, as `listening_addresses` takes it.
            registry: metrics that /metrics exports.
            stopping: function that returns True while the daemon shuts down; /readyz then answers 503.
            state: function that returns the daemon's state in words, which /readyz shows while ready.
            hung: function that returns why the process should be restarted, for /livez with status 503; empty
                if alive.
            failing: function that returns why the process is not ready although it runs, for /readyz with
                status 503; empty if ready.
            pages: functions that return the answer to a request of further paths; threads call them.

        Raises:
            UsageError: cannot listen on the port.
        """
        self._servers: list[_Server] = []
        self._threads: list[threading.Thread] = []
        self.scrapes = 0
        self._scraped_at: deque[float] = deque(maxlen=2)
        port = effective.settings.http_port
        if port < 0:
            return
        untyped: Any = exposition
        metrics = untyped.make_wsgi_app(registry)

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "/")
            if path == "/metrics":
                self.scrapes += 1
                self._scraped_at.append(time.monotonic())
                return cast("Iterable[bytes]", metrics(environ, start_response))
            if pages and path in pages:
                page = pages[path]()
                start_response(page.status, [("Content-Type", page.kind), *page.headers])
                return [page.body]
            status, text = "200 OK", "alive"
            if path == "/livez" and (why := hung()):
                status, text = "503 Service Unavailable", why
            elif path == "/readyz" and stopping():
                status, text = "503 Service Unavailable", "shutting down"
            elif path == "/readyz" and (why := failing()):
                status, text = "503 Service Unavailable", why
            elif path == "/readyz":
                text = state()
            elif path != "/livez":
                status = "404 Not Found"
                text = f"try {'/, ' if pages else ''}/metrics, /livez or /readyz"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{text}\n".encode()]

        try:
            addresses = listening_addresses(host)
            try:
                self._servers = _serving(addresses, port, app)
            except OSError as error:
                if effective.chosen("http_port") or error.errno != errno.EADDRINUSE:
                    raise
                self._servers = _serving(addresses, 0, app)
                logging.getLogger("gradwire.http").info("HTTP port %d is in use; using a free one", port)
        except OSError as error:
            raise UsageError(
                f"--http-port {port} on {error.filename or host}: {error.strerror}; choose another port, 0 "
                "for a free one, or -1 for none"
            ) from None
        said = "metrics and probes on port %d" + ("; a browser shows the job there" if pages else "")
        logging.getLogger("gradwire.http").info(said, self._servers[0].server_port)
        ports.announce("http", self._servers[0].server_port)
        self._threads = [
            threading.Thread(target=server.serve_forever, daemon=True, name="http")
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def next_scrape_s(self) -> float:
        """Longest time in which a program that scrapes regularly will have come again, in seconds; 0 if none
        does."""
        if len(self._scraped_at) < 2:
            return 0.0
        last = self._scraped_at[-1]
        every = last - self._scraped_at[0]
        return max(0.0, last + 1.5 * every - time.monotonic()) if every <= MOST_SCRAPE_S else 0.0

    def close(self) -> None:
        """Stop serving and wait for the threads to end; do nothing if there is no endpoint."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()


def _serving(addresses: Sequence[str], port: int, app: Any) -> list[_Server]:
    """Return a server for each address, all on one port; port 0 for a free one. Raises OSError."""
    servers: list[_Server] = []
    try:
        for address in addresses:
            servers.append(_Server(address, servers[0].server_port if servers else port, app))
    except OSError as error:
        for server in servers:
            server.server_close()
        error.filename = addresses[len(servers)]
        raise
    return servers
