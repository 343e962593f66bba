"""Telemetry of every daemon: logs on stderr, and /metrics, /livez, /readyz over HTTP."""

from __future__ import annotations

import errno
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, exposition

from .configuration import Effective, UsageError
from .naming import printable

# What a JSON line says of its process, and of a worker if the line is about one (`extra=` of the call).
LOG_FIELDS = ("job", "worker", "rank", "version")

LogFields = Callable[[], Mapping[str, object]]


class _JsonLines(logging.Formatter):
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
    """Lines for people. Only a record begins at the left edge: further lines of it, such as a traceback, are
    indented, and no character moves the cursor, whatever a worker has called itself."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(printable, super().format(record).split("\n")))


def set_up_logging(log_format: str, level: str = "INFO") -> None:
    """Log to stderr. log_format: "text" for people, "json" for programs."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(_TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("numba").setLevel(logging.WARNING)


def add_log_fields(fields: LogFields) -> None:
    """Add fields of `LOG_FIELDS` to every JSON line from now on. fields: called for each line."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _JsonLines):
            handler.formatter.fields = fields


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """One thread per request: a slow scrape does not hold up a probe."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the peer went away
            super().handle_error(request, client_address)


class _ThreadingServerV6(_ThreadingServer):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 10  # seconds for a peer to send its request

    def log_message(self, format: str, *args: Any) -> None:
        logging.getLogger("gradwire.http").debug(format, *args)


class HttpEndpoint:
    """Serves /metrics, /livez and /readyz on a thread of its own until `close`."""

    def __init__(
        self,
        effective: Effective[Any],
        host: str,
        registry: CollectorRegistry,
        stopping: Callable[[], bool],
        state: Callable[[], str],
        hung: Callable[[], str] = str,
        failing: Callable[[], str] = str,
    ) -> None:
        """
        Args:
            effective: its option `http_port` is 0 for a free port and below for no endpoint. When the port is
                taken that is its default, which nobody chose, any free one is used.
            hung: why the process should be restarted, which /livez says then; empty while it is well.
            stopping, state: /readyz says whether the daemon is stopping, and otherwise its state in words.
            failing: why it is not ready although it goes on; empty while it is.

        Raises:
            UsageError: the port cannot be listened on.
        """
        self._server: WSGIServer | None = None
        port = effective.settings.http_port
        if port < 0:
            return
        untyped: Any = exposition
        metrics = untyped.make_wsgi_app(registry)

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "/")
            if path == "/metrics":
                return cast("Iterable[bytes]", metrics(environ, start_response))
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
                status, text = "404 Not Found", "try /metrics, /livez or /readyz"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{text}\n".encode()]

        kind = _ThreadingServerV6 if ":" in host else _ThreadingServer
        try:
            self._server = make_server(host, port, app, kind, _QuietHandler)
        except OSError as error:
            if effective.chosen("http_port") or error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"--http-port {port} on {host}: {error.strerror}; choose another port, 0 for a "
                    "free one, or -1 for none"
                ) from None
            self._server = make_server(host, 0, app, kind, _QuietHandler)
            logging.getLogger("gradwire.http").warning("port %d is taken", port)
        logging.getLogger("gradwire.http").info("metrics and probes on port %d", self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="http")
        self._thread.start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
