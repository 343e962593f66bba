"""A script's membership of its job: joined when it is made, and left once.

It also holds what the server and the options say for as long as the job lasts: terms, kind of work and
compressor, and the state that this worker wrote in an earlier process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.configuration import Effective
from ...common.telemetry import HttpEndpoint
from ...common.version import __version__
from ...compressors.registry import names
from ...proto.job import job_terms
from ...settings import WorkerSettings
from ..metrics import WorkerMetrics
from ..session.connection import connection_of
from ..session.own_state import OwnState
from .terms import ScriptError, script_compressor, script_work


class Membership:
    """One worker's membership.

    Attributes:
        reply: what the server answered to the join.
        terms, work: the job's.
        compressor, auto: the compressor, and whether it is left where it loses.
        own: where this worker's state is written; None if nowhere.
        restored: version and tree of the state that this worker continues from; None if there is none, or
            once batches have begun.
        done: whether the job is over.
        left: whether `end` was called.
    """

    def __init__(self, effective: Effective[WorkerSettings]) -> None:
        """Join. Raises what `gradwire.connect` does."""
        self.settings = settings = effective.settings
        if settings.state and not settings.worker_id:
            raise ScriptError(
                "state: expected a worker_id, too, by which this worker finds again what it has written down"
            )
        self.done = self.left = False
        self.metrics = WorkerMetrics(settings.compressor.partition(":")[0])
        self.compressor, self.auto = script_compressor(settings.compressor)
        self.own: OwnState | None = None
        self.restored: tuple[int, Mapping[str, Any]] | None = None
        self.connection = connection_of(settings, self.metrics)
        self._http: HttpEndpoint | None = None
        try:
            self._http = HttpEndpoint(
                effective,
                settings.http_host or "127.0.0.1",
                self.metrics.registry,
                lambda: self.done,
                lambda: "running",
                self.connection.progress.hung,
            )
            self.reply = self.connection.join(__version__, str(self.compressor), names())
            self.terms = job_terms(self.reply.job)
            self.work = script_work(self.terms)
            if settings.state:
                self.compressor.build()  # registers the classes of its state, without which that cannot be read
                self.own = OwnState(settings.state, job=self.terms.id, worker=self.connection.worker)
                self.restored = None if self.reply.initialize else self.own.read(self.reply.version)
        except BaseException as error:
            self.end(f"failed: {error}", failed=True)
            raise
        self.metrics.info.labels(__version__, self.terms.mode, self.terms.id).set(1)

    @property
    def owner(self) -> Mapping[str, Any]:
        """The part of the restored state that is the script's; empty if there is none."""
        if self.restored is None:
            return {}
        version, tree = self.restored
        owner: Mapping[str, Any] = tree["owner"]
        if version < self.reply.version and owner["epoch"] < self.reply.epoch:
            # The pass over the loader is over.
            return {**owner, "epoch": self.reply.epoch, "loader": None, "logged": {}}
        return owner

    def end(self, reason: str, *, failed: bool) -> None:
        """Leave the job and drop the connection. failed: the member counts as lost."""
        self.left = True
        self.connection.leave(reason, failed=failed)
        self.connection.close()
        if self._http is not None:
            self._http.close()
