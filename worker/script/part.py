"""How a script's part in a job ends: by the script, by an exception, with its process, or after SIGTERM."""

from __future__ import annotations

import logging
import threading

from ..session.connection import MAX_ERROR_CHARACTERS
from . import process
from .driver import Driver
from .loading import Loading
from .membership import Membership

log = logging.getLogger("gradwire.worker")


class Part:
    """One job of this process, as `process` sees it (`process.Joined`).

    Attributes:
        key, thread: server and worker id, and the thread that has joined.
        loading: processes that fetch the script's samples, which end with the membership.
        stops: True once the script has stopped the job.
    """

    def __init__(self, key: process.Key, member: Membership, driver: Driver) -> None:
        self.key = key
        self.thread = threading.current_thread()
        self.loading = Loading((), 0)
        self.stops = False
        self._member, self._driver = member, driver
        driver.leave_after = self.leave_after

    @property
    def done(self) -> bool:
        """True once the job is over, or was left."""
        return self._member.done or self._member.left

    @property
    def leave_s(self) -> float:
        """Seconds in which to push the residual after SIGTERM."""
        return self._member.settings.leave_seconds

    @property
    def away_s(self) -> float:
        """Seconds without a stream to the server; 0 while there is one."""
        return self._member.connection.away_s

    @property
    def owes(self) -> bool:
        """True if a step is open, or part of a residual is not pushed, of a worker that leaves."""
        assignments = self._driver.assignments
        if assignments is None or self.done:
            return False
        return self._driver.open or not assignments.session.finished_leaving

    def make_last_push(self) -> None:
        """Have the next step push the whole residual; the job is left after its outcome."""
        if self._driver.assignments is not None:
            self._driver.assignments.session.leave()

    def leave_with_script(self) -> None:
        """Leave the job at the end of the script, or of the notebook's cell, that has joined it."""
        error = process.last_error()
        self.leave_after(None if error is self._driver.error_before else error)

    def leave_after(self, error: BaseException | None) -> None:
        """Leave the job after an exception that ends the script; None without one."""
        if isinstance(error, Exception):
            self.leave(f"the script failed: {error!r}"[:MAX_ERROR_CHARACTERS], failed=True)
        elif isinstance(error, SystemExit) and not process.stopped_by():
            failed = error.code not in (None, 0)
            self.leave(f"the script has ended with exit code {error.code}" if failed else "", failed=failed)
        elif error is not None:
            self.leave(process.stopped_by() or f"stopped by {type(error).__name__}")
        else:
            self.leave()

    def leave(self, reason: str = "", *, failed: bool = False) -> None:
        """Leave the job, once, as `Job.leave` says."""
        member, assignments = self._member, self._driver.assignments
        if member.left:
            return
        if assignments is not None and not member.done:
            if not (failed or reason):
                assignments.report_last()
            session = assignments.session
            present = assignments.present
            has_work = present is None or bool(present.ranges)
            if has_work and (held := session.held_back) and session.saving.kept is None:
                log.warning("leaving with residuals of norm %.3g, which the server has not received", held)
            if has_work and not (failed or self.stops):
                of = f" of {member.terms.epochs}" if member.terms.epochs else ""
                log.warning(
                    "leaving in epoch %d%s: the script ends before the job", assignments.epoch + 1, of
                )
        process.remove(self)
        self.loading.close()
        default = "done" if member.done else process.stopped_by() or "the script has ended"
        member.end(reason or default, failed=failed)

    def forget(self) -> None:
        """Note in a forked child that the job is its parent's."""
        self._member.left = True
