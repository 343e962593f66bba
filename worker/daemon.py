"""The life of a gc-worker process: join a job, load its task, train, leave."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

import torch

from ..common.configuration import Effective, UsageError
from ..common.exits import Exit
from ..common.spec import SpecError
from ..common.telemetry import HttpEndpoint, add_log_fields, set_up_logging
from ..common.version import __version__
from ..compressors import AUTO, CompressorSpec, LayerRule, compressor_of, parse_compressor, set_threads
from ..compressors.registry import names
from ..proto.job import job_terms
from ..proto.refusal import Reason, Refused
from ..settings import JobTerms, WorkerSettings, names_in
from ..storage.backends import BackendError
from .metrics import WorkerMetrics
from .session.attempts import UnreachableError
from .session.compression import check_preset, jobs_compressor
from .session.connection import Connection, connection_of
from .session.kernels import tell_of_kernels
from .session.own_state import OwnState
from .session.replica import ModelError, Replica
from .session.session import Session
from .tasks import Task, TaskError, check_task, load_allowed
from .tasks.computation import TaskFailedError, guarded
from .tasks.groups import task_groups
from .tasks.trainer import Trainer
from .training.data import data_checksum
from .training.work import CodedExchange, parse_work

log = logging.getLogger("gradwire.worker")


CHECK_S = 0.5  # seconds between two checks whether a leaving worker should give up
AWAY_S = 3.0  # seconds without a server after which a leaving worker gives up; a broken stream is back sooner


class _Signalled(BaseException):
    """Raised in the main thread by SIGTERM and SIGINT; a BaseException so that no task swallows it."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Signals:
    """Handler of SIGTERM and SIGINT.

    While the worker trains, the first signal makes it push its residuals and leave. The handler raises
    `_Signalled` only if that takes too long or the server is away. A second signal ends the process at once.

    Attributes:
        received: number of the first signal; None before it.
        session, connection: the worker's, set once it trains; None before.
        gave_up: when and why the worker stopped trying to push its residuals, in words; empty if it did not.
    """

    def __init__(self, leave_s: float) -> None:
        """leave_s: `--leave-seconds`, seconds in which to push the residuals; 0 to leave at once."""
        self._leave_s = leave_s
        self._signalled_at = 0.0
        self.received: int | None = None
        self.session: Session | None = None
        self.connection: Connection | None = None
        self.gave_up = ""
        assert threading.current_thread() is threading.main_thread()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        os.register_at_fork(after_in_child=_reset_in_child)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Called on the first signal: make the session leave and start the timer, or raise `_Signalled` at
        once."""
        for again in (signal.SIGTERM, signal.SIGINT):
            signal.signal(again, lambda n, _: os._exit(128 + n))
        self.received = number
        if self.session is None or not self._leave_s:
            self.gave_up = "at once"
            raise _Signalled(number)
        self.session.leave()
        self._signalled_at = time.monotonic()
        every_s = min(CHECK_S, self._leave_s)
        signal.setitimer(signal.ITIMER_REAL, every_s, every_s)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        """Called every `CHECK_S` while the worker leaves: raise `_Signalled` when it is time to give up."""
        assert self.received is not None
        if time.monotonic() - self._signalled_at >= self._leave_s:
            self.gave_up = f"after {self._leave_s:g} s"
        elif self.connection is not None and self.connection.away_s >= AWAY_S:
            self.gave_up = f"while the server has been away for {self.connection.away_s:.0f} s"
        if self.gave_up:
            self.stop_timer()
            raise _Signalled(self.received)

    def stop_timer(self) -> None:
        """Stop the timer, so that a leaving worker is not interrupted any more."""
        signal.setitimer(signal.ITIMER_REAL, 0)


def _reset_in_child() -> None:
    """Reset the signal handlers in a process that a task has forked, such as a DataLoader's.

    The process that forked it ends it. It ignores Ctrl-C: the worker still needs its data to push the
    residuals.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def check(settings: WorkerSettings) -> tuple[CompressorSpec, bool] | None:
    """Check the options that can be checked without a server, and import the module of a task of one's own.

    Returns:
        The compressor, and True if it is to be turned off where it loses time (`auto`); None if the job is to
        name it.

    Raises:
        UsageError: the compressor or the device does not exist.
        TaskError: the task does not exist, or its module raised an exception.
    """
    try:
        chosen = compressor_of(settings.compressor) if settings.compressor else None
    except SpecError as error:
        raise UsageError(f"--compressor: {error}") from None
    _choose_device(settings.device)
    if settings.task:
        check_task(settings.task)
    return chosen


def run(effective: Effective[WorkerSettings], own: tuple[CompressorSpec, bool] | None) -> int:
    """Run the worker until the job is done, and return the exit code.

    Raises:
        UsageError: the port for probes cannot be listened on.
    """
    settings = effective.settings
    set_up_logging(settings.log_format)
    if effective.foreign:
        log.warning("%s", effective.foreign)
    if settings.threads:
        torch.set_num_threads(settings.threads)
        set_threads(settings.threads)
    metrics = WorkerMetrics(settings.compressor.partition(":")[0])
    connection: Connection | None = None
    leaving = threading.Event()

    def hung() -> str:
        return "" if connection is None else connection.progress.hung()

    http = HttpEndpoint(
        effective,
        settings.http_host,
        metrics.registry,
        leaving.is_set,
        lambda: "running",
        hung,
    )
    signals = _Signals(settings.leave_seconds)
    try:
        connection = connection_of(settings, metrics)
        code, reason = _train(connection, settings, metrics, signals, own)
        signals.stop_timer()
        connection.leave(reason, failed=code not in (Exit.DONE, Exit.TERMINATED, Exit.INTERRUPTED))
        return code
    except _Signalled as signalled:
        signals.stop_timer()
        leaving.set()
        name = signal.Signals(signalled.number).name
        session = signals.session
        held_back, pushes = (session.held_back, session.open_pushes) if session else (0.0, 0)
        if held_back or pushes:
            kept = session.saving.kept if session else None
            where = "lost" if kept is None else f"kept in this worker's own state of version {kept}"
            log.warning(
                "%s: leaving %s; residuals of norm %.3g are %s, and %d pushes are unconfirmed",
                *(name, signals.gave_up, held_back, where, pushes),
            )
        else:
            log.info("%s: leaving", name)
        if connection is not None:
            connection.leave(f"stopped by {name}", failed=False)
        return 128 + signalled.number
    finally:
        if connection is not None:
            connection.close()
        http.close()


def _train(
    connection: Connection,
    settings: WorkerSettings,
    metrics: WorkerMetrics,
    signals: _Signals,
    own: tuple[CompressorSpec, bool] | None,
) -> tuple[Exit, str]:
    """Join the job, load its task and train it to the end. Return the exit code and the reason to leave with.
    own: this worker's own compressor, and True if it is to be turned off where it loses time; None to take
    the job's.
    """
    device = _choose_device(settings.device)
    try:
        named = settings.compressor if settings.compressor == AUTO or not own else str(own[0])
        reply = connection.join(__version__, named, names())
        job = job_terms(reply.job)
        known: dict[str, object] = {"job": job.id, "worker": connection.worker, "rank": reply.rank}
        add_log_fields(lambda: known)  # the version is added once there is a replica
        if job.script:
            raise UsageError(
                f"job {job.id} has no task, because its workers are scripts: run your script, which calls "
                "gradwire.connect(), instead of gc-worker"
            )
        log.info(
            "joined job %s as %s, rank %d: %s, mode %s, %d epochs",
            *(job.id, connection.worker, reply.rank, job.task, job.mode, job.epochs),
        )
        metrics.info.labels(__version__, job.mode).set(1)
        metrics.job_id = job.id
        check_preset(settings, job)
        if isinstance(parse_work(job.work), CodedExchange):
            compressor, auto = _without_compressor(settings.compressor), False
        else:
            compressor, auto = own or jobs_compressor(job)
        metrics.name_compressor("auto" if auto else compressor.name)
        tell_of_kernels(connection)
        connection.activity = "loading the task"
        task = load_allowed(job.task, own=settings.task, allowed=names_in(settings.allow_task))
        replica = _replica(task, job, device)
        add_log_fields(lambda: {**known, "version": replica.version})
        trainer = Trainer(
            connection,
            reply,
            task,
            replica,
            device=device,
            compressor=compressor,
            auto=auto,
            rule=LayerRule(
                dense=names_in(settings.dense_layers), compressed=names_in(settings.compressed_layers)
            ),
            metrics=metrics,
            own=OwnState(settings.state, job=job.id, worker=connection.worker) if settings.state else None,
        )
        signals.session, signals.connection = trainer.session, connection
        done = trainer.run()
        if not done:
            assert signals.received is not None
            name = signal.Signals(signals.received).name
            log.info("%s: leaving, all residuals pushed", name)
            return Exit(128 + signals.received), f"stopped by {name}"
        log.info("the job has ended at version %d", replica.version or 0)
        return Exit.DONE, "done"
    except Refused as refused:
        if refused.refusal.reason is Reason.JOB_FINISHED:
            if signals.session is None:
                log.warning(
                    "this worker has trained nothing: %s. To train again, start gc-server with another "
                    "--state; on Kubernetes give the overlay another nameSuffix",
                    refused.refusal.message,
                )
            else:
                log.info("%s; leaving", refused.refusal.message)
            return Exit.DONE, "done"
        log.error("refused: %s", refused)
        stopped = refused.refusal.reason is Reason.STOPPING
        return (Exit.STOPPED if stopped else Exit.REFUSED), f"refused: {refused.refusal.message}"
    except (UnreachableError, UsageError, BackendError) as error:
        log.error("%s", error)
        return (Exit.UNREACHABLE if isinstance(error, UnreachableError) else Exit.USAGE), str(error)
    except SpecError as error:  # from the server; the worker's own specs were checked at the start
        log.error("%s; install the same release of gradwire on both sides", error)
        return Exit.REFUSED, str(error)
    except (TaskError, TaskFailedError, ModelError) as error:
        log.error("%s", error, exc_info=error.__cause__)
        return Exit.TASK, str(error)
    except Exception as error:
        log.exception("gc-worker failed; please report this")
        return Exit.INTERNAL, f"failed: {error!r}"


def _replica(task: Task, job: JobTerms, device: torch.device) -> Replica:
    """Return the initial replica of the task's model; raise TaskError, TaskFailedError or ModelError."""
    torch.manual_seed(job.seed)
    model = guarded(f"task {task.name!r}: model", task.model)
    data = guarded(f"task {task.name!r}: batch", lambda: data_checksum(task.batch, task.train_samples))
    return Replica(model.to(device), task.train_samples, task_groups(task, model, job), data)


def _without_compressor(spec: str) -> CompressorSpec:
    """Return the compressor `none`; raise UsageError if the user has chosen another one.

    spec: value of --compressor, empty for the job's.
    """
    if spec not in ("", "none"):
        raise UsageError(
            f"--compressor {spec}: the job's mode, coded, exchanges gradients in fixed point; use "
            "--compressor none"
        )
    return parse_compressor("none")


def _choose_device(name: str) -> torch.device:
    """Return the device for `--device`; raise UsageError if it is cuda and there is no such device."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("--device cuda: torch finds no usable CUDA device on this machine; use auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")
