"""The life of a gc-server process: start, serve, shut down in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import grpc.aio
import torch
import uvloop

from ..common import machine
from ..common.configuration import Effective, UsageError
from ..common.exits import Exit
from ..common.telemetry import HttpEndpoint, add_log_fields
from ..common.version import __version__
from ..compressors import Plan, set_threads
from ..optim.optimizer import Optimizer, OptimizerGroup
from ..planning import parse_fusion, parse_order, parse_replan
from ..proto.channel import SERVER_OPTIONS, Identity, listen
from ..proto.manifest import Manifest
from ..proto.service import generic_handler
from ..proto.standard import Health, reflect
from ..settings import ServerSettings, parse_evaluate_every
from ..storage.backends import shown
from .calls.access import Access, TokenFileError
from .calls.service import Service
from .conductor import Conductor
from .durable.folder import StateError, StateFolder, job_at
from .durable.recorder import Recorder
from .durable.resuming import ResumeError, read_model
from .job.aggregation import parse_aggregation
from .job.core import Core
from .job.modes import registry
from .job.modes.options import ModeOptions
from .metrics import ServerMetrics
from .plans.planner import Planner
from .recovery.checkpoints import checkpoint, first_checkpoint, pause
from .recovery.recovery import recover
from .shard.local import LocalShard
from .shard.store import Float32, Store

log = logging.getLogger("gradwire.server")

LOOPBACK = "127.0.0.1"
PAUSE_S = 15.0  # for what has begun to end, where the job goes on later
GRACE_S = 5.0  # for calls and streams to end after the members were told
LINGER_S = 5.0  # for the parameters to be fetched, and the status asked for, when the job is done


def run(effective: Effective[ServerSettings]) -> int:
    """Serve until told to stop. Returns the exit code; raises UsageError for a port that is taken."""
    options = effective.settings
    if options.threads:
        torch.set_num_threads(options.threads)
        set_threads(options.threads)
    return uvloop.run(_serve(effective))


def _shard(options: ServerSettings, mode: ModeOptions) -> LocalShard:
    optimizer, rate = mode.optimizer(options)
    job = OptimizerGroup(options=optimizer, learning_rate=rate)

    def build(manifest: Manifest, values: Sequence[Float32], plan: Plan) -> Store:
        groups, group_of = manifest.optimizer_groups(job), manifest.groups_of_parts(plan)
        if mode.workers_step:  # what is stepped here is no gradient
            groups = (job,) * len(groups)
        return Store(
            manifest,
            values,
            options.downlink,
            lambda parameters: Optimizer.of_groups(groups, parameters, group_of),
            options.seed,
            parse_aggregation(options.aggregation),
            mode.delay_compensation,
            keep_last=bool(options.output),
            plan=plan,
            clip_norm=options.clip_norm,
        )

    return LocalShard(build)


def _conductor(options: ServerSettings, mode: ModeOptions, recorder: Recorder) -> Conductor:
    metrics = ServerMetrics(options.downlink)
    if mode.staleness_bound is not None:
        metrics.staleness_bound.set(mode.staleness_bound)
    planner = Planner(
        parse_fusion(options.fusion),
        parse_order(options.order),
        parse_replan(options.replan),
        options.part_bytes,
        at_once=options.overlap == "off",
        machine=machine.name(),
        cores=machine.cores(),
    )
    return Conductor(
        Core(options, mode),
        metrics,
        shard=_shard(options, mode),
        planner=planner,
        output=Path(options.output) if options.output else None,
        keep_best=bool(options.keep),
        recorder=recorder,
        checkpoint=checkpoint,
    )


# Options that may change when a server continues a job: addresses, logs, files, timeouts.
_MAY_CHANGE = frozenset(
    {
        *("host", "port", "http_host", "http_port", "insecure", "reflection"),
        *("stay", "threads", "log_format"),
        *("tls_ca", "tls_cert", "tls_key", "token_file"),
        *("lease_seconds", "max_model_bytes", "output"),
        *("state", "durability", "checkpoint_every", "resume"),
    }
)


class _Kept:
    """The folder of --state, which this process holds from now on, and the job in it.

    Attributes:
        job: id of the job.
    """

    def __init__(self, options: ServerSettings) -> None:
        """Raises UsageError."""
        names = (each.name for each in fields(options) if each.name not in _MAY_CHANGE)
        self._options = {name: getattr(options, name) for name in names}
        try:
            self.folder = StateFolder(options.state, syncs=options.durability == "fsync")
            known = job_at(options.state)
            # Members that wait for a job to begin know its id already; its options count once it has begun.
            self.job: str = _new_id() if known is None else known["job"]
            if known is not None and self.folder.begun():
                _same_job(known["options"], self._options, options.state)
        except StateError as error:
            raise UsageError(str(error)) from None

    def serve(self, *, goes_on: bool) -> None:
        """Claim the folder, and write job.json for a job that has not begun. Called after recovery and after
        the port is bound, so a start that fails before that neither writes job.json nor displaces the server
        at a URL.

        Args:
            goes_on: whether the job has begun before.

        Raises:
            UsageError: the folder cannot be written to, or another server at the URL wrote a checkpoint
                after this one had recovered an older one.
        """
        try:
            self.folder.claim()
            if not goes_on:
                self.folder.put_job({"job": self.job, "gradwire": __version__, "options": self._options})
        except StateError as error:
            raise UsageError(str(error)) from None


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _same_job(before: Mapping[str, Any], given: Mapping[str, Any], state: str) -> None:
    """Raises UsageError for options with which the job cannot continue."""
    for name in given:
        if before.get(name, given[name]) != given[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} {given[name]}: the job in --state {state} was begun with {before[name]}, "
                f"and goes on only with that; leave {flag} as it was, or begin another job in another folder"
            )


async def _serve(effective: Effective[ServerSettings]) -> int:
    options = effective.settings
    mode = registry.parse(options.mode)
    try:
        access = Access(options)
    except TokenFileError as error:
        raise UsageError(str(error)) from None
    kept = _Kept(options) if options.state else None
    job, recorder = _new_id() if kept is None else kept.job, Recorder()
    if kept is not None:
        every = parse_evaluate_every(options.checkpoint_every)
        recorder = Recorder(kept.folder, every, job=job, recorded=options.durability != "none")
    conductor = _conductor(options, mode, recorder)
    add_log_fields(lambda: {"job": job, "version": conductor.core.version})
    stopping = asyncio.Event()
    received = _heed_signals(stopping)
    # Probes have an answer while the journal is read, however long that takes.
    not_yet = "not listening yet" if kept is None else f"--state {options.state} is being read"
    http = HttpEndpoint(
        *(effective, options.http_host or (options.host if access.remote else LOOPBACK)),
        conductor.metrics.registry,
        stopping=stopping.is_set,
        state=lambda: conductor.core.phase.name.lower(),
        failing=lambda: not_yet or recorder.failing,
    )
    try:
        goes_on = kept is not None and await recover(conductor, kept.folder)
        resumed = read_model(options.resume) if options.resume and not goes_on else None
    except (StateError, ResumeError) as error:
        raise UsageError(str(error)) from None
    if options.resume and goes_on:
        text = "--resume %s is not looked at: the job in --state %s goes on"
        log.info(text, shown(options.resume), options.state)
    first = first_checkpoint if recorder.keeps else None
    service = Service(conductor, options, mode, job, access, resumed, first)
    del resumed  # which the service lets go of
    metrics = conductor.metrics
    metrics.info.labels(__version__, options.mode, service.job.id).set(1)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = generic_handler(
        service.handlers(), sent=metrics.sent, received=metrics.received, admit=access.admit
    )
    server.add_generic_rpc_handlers((handler,))
    health = Health(server)
    if options.reflection:
        reflect(server)
    port = _listen(server, options)
    if kept is not None:
        kept.serve(goes_on=goes_on)
    await server.start()
    not_yet = ""
    await health.serving()

    log.info(
        "gc-server %s listening on %s:%d; job %s: %s, mode %s",
        *(__version__, options.host, port),
        *(service.job.id, "scripts" if options.script else options.task, options.mode),
    )
    if not access.remote:
        log.info(
            "protected mode: only peers on this machine are answered; TLS with a token or with certificates "
            "of clients lifts it, and so does --insecure"
        )
    elif not options.tls_cert:
        seen = ", and the tokens" if options.token_file else ""
        log.warning("nothing is encrypted: whoever can read the traffic reads the parameters%s", seen)

    conductor.start()
    await _until_stopped(conductor, stopping, stay=options.stay)
    await health.stopping()  # not ready first, then the rest
    going_on = not conductor.failed.is_set() or conductor.unwritten
    comes_back = recorder.keeps and going_on and not conductor.finished.is_set()
    if comes_back and not conductor.unwritten:
        await pause(conductor, PAUSE_S)
    await conductor.stop(conductor.failure or "it was told to stop", comes_back=comes_back)
    await recorder.close()
    await server.stop(GRACE_S)
    http.close()
    log.info("stopped at version %d", conductor.core.version)
    return exit_code(
        finished=conductor.finished.is_set(),
        received=received[0] if received else None,
        failed=conductor.failed.is_set(),
        diverged=conductor.diverged,
        unsaved=conductor.output.unsaved,
        unwritten=conductor.unwritten,
    )


def _listen(server: grpc.aio.Server, options: ServerSettings) -> int:
    host = f"[{options.host}]" if ":" in options.host else options.host
    if bool(options.tls_cert) != bool(options.tls_key) or (options.tls_ca and not options.tls_cert):
        raise UsageError("--tls-cert, --tls-key: expected both, and both with --tls-ca")
    identity = Identity(cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca)
    try:
        port = listen(server, f"{host}:{options.port}", identity)
    except OSError as error:
        raise UsageError(f"--tls-cert, --tls-key, --tls-ca: {error.filename}: {error.strerror}") from None
    except RuntimeError:
        port = 0
    if port == 0:
        raise UsageError(
            f"--port {options.port}: cannot listen on {options.host}:{options.port}; is --host an address "
            "of this machine, and the port free? Choose another port, or 0 for a free one"
        )
    return port


def _heed_signals(stopping: asyncio.Event) -> list[signal.Signals]:
    """Set the event at the first signal, and return a list that receives it. A second signal ends the process
    at once."""
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        if received:
            log.warning("second signal: ending at once")
            os._exit(128 + number)
        log.info("%s: shutting down", number.name)
        received.append(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return received


async def _until_stopped(conductor: Conductor, stopping: asyncio.Event, *, stay: bool) -> None:
    """Wait for a signal, for the job to fail, or, unless the server shall stay, for its end."""
    waits = [asyncio.create_task(event.wait()) for event in (stopping, conductor.failed)]
    if not stay:
        waits.append(asyncio.create_task(_over(conductor)))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    stopping.set()
    if conductor.failed.is_set() and not conductor.finished.is_set():
        log.error("%s", conductor.failure)


async def _over(conductor: Conductor) -> Literal[True]:
    """Return once the job is done, all members have heard of it, and clients had `LINGER_S` to fetch it."""
    await conductor.dispersed()
    log.info("the job is done and the server ends in %g s; --stay keeps it", LINGER_S)
    await asyncio.sleep(LINGER_S)
    return True


def exit_code(
    *,
    finished: bool,
    received: signal.Signals | None,
    failed: bool,
    diverged: bool,
    unsaved: bool,
    unwritten: bool = False,
) -> int:
    """Return the exit code of a server that has ended in order. A failure decides before a signal.

    Args:
        finished: whether the job was.
        received: the signal that told the server to stop.
        failed: whether the job could not continue.
        diverged: whether it failed because its parameters are not finite.
        unwritten: whether it failed because its journal cannot be written.
        unsaved: whether the last parameters are not where they were to be written.
    """
    if failed and not finished and not unwritten:
        return Exit.DIVERGED if diverged else Exit.INTERNAL
    if unsaved or unwritten:
        return Exit.UNWRITTEN
    if finished or received is None:
        return Exit.DONE
    return 128 + received
