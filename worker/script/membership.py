"""A script's membership of its job, from the join to the leave.

It also holds the constants of the job's lifetime: its options, kind of work and compressor, and the state
that this worker has saved in an earlier process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ...common.configuration import Effective
from ...common.telemetry import HttpEndpoint
from ...common.version import __version__
from ...compressors.registry import names
from ...proto.job import job_terms
from ...proto.refusal import Reason, Refused
from ...settings import WorkerSettings
from ..metrics import WorkerMetrics
from ..session.compression import check_preset
from ..session.connection import connection_of
from ..session.own_state import OwnState
from .terms import JobFinished, ScriptError, script_compressor, script_work

log = logging.getLogger("gradwire.worker")


class Membership:
    """One script's membership of a job. `Job` makes and ends it.

    Attributes:
        reply: the server's reply to the join.
        terms, work: the job's options and its kind of work.
        compressor, auto: compressor of gradients; True if it is to be turned off where it loses time.
        own: storage of this worker's state; None if it is not saved.
        restored: version and tree of the saved state that this worker continues from; None if there is none,
            or once batches have begun.
        done: True once the job is over.
        left: True once `end` was called.
    """

    def __init__(self, effective: Effective[WorkerSettings]) -> None:
        """Join the job. The exceptions are those of `gradwire.connect`."""
        self.settings = settings = effective.settings
        if settings.state and not settings.worker_id:
            raise ScriptError(
                "state: expected a worker_id with it, by which this worker finds its saved state again"
            )
        self.done = self.left = False
        self.metrics = WorkerMetrics(settings.compressor.partition(":")[0])
        own = script_compressor(settings.compressor) if settings.compressor else None
        self.own: OwnState | None = None
        self.restored: tuple[int, Mapping[str, Any]] | None = None
        self.connection = connection_of(settings, self.metrics)
        self._http: HttpEndpoint | None = None
        try:
            self._http = HttpEndpoint(
                effective,
                settings.http_host,
                self.metrics.registry,
                lambda: self.done,
                lambda: "running",
                self.connection.progress.hung,
            )
            self.reply = self.connection.join(__version__, str(own[0]) if own else "", names())
            self.terms = job_terms(self.reply.job)
            self.work = script_work(self.terms)
            check_preset(settings, self.terms)
            self.compressor, self.auto = own or script_compressor(self.terms.compressor, self.terms)
            self.metrics.name_compressor("auto" if self.auto else self.compressor.name)
            if settings.state:
                # This registers the classes of the compressor's state, without which that cannot be read.
                self.compressor.build()
                self.own = OwnState(settings.state, job=self.terms.id, worker=self.connection.worker)
                self.restored = None if self.reply.initialize else self.own.read(self.reply.version)
        except BaseException as error:
            self.end(f"failed: {error}", failed=True)
            if isinstance(error, Refused) and error.refusal.reason is Reason.JOB_FINISHED:
                log.warning(
                    "this script has trained nothing: %s. To train again, start gc-server with another "
                    "--state; on Kubernetes give the overlay another nameSuffix",
                    error.refusal.message,
                )
                raise JobFinished(error.refusal) from None
            raise
        self.metrics.info.labels(__version__, self.terms.mode).set(1)
        self.metrics.job_id = self.terms.id

    @property
    def owner(self) -> Mapping[str, Any]:
        """Script's own part of the restored state: epoch, random state, logged numbers, ...; empty if there
        is none."""
        if self.restored is None:
            return {}
        version, tree = self.restored
        owner: Mapping[str, Any] = tree["owner"]
        if version < self.reply.version and owner["epoch"] < self.reply.epoch:
            # The job has moved on to a later epoch, so the saved pass over the loader is obsolete.
            return {**owner, "epoch": self.reply.epoch, "loader": None, "logged": {}}
        return owner

    def end(self, reason: str, *, failed: bool) -> None:
        """Leave the job and close the connection; with `failed` the server counts this worker as lost."""
        self.left = True
        self.connection.leave(reason, failed=failed)
        self.connection.close()
        if self._http is not None:
            self._http.close()
