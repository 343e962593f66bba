"""The life of a gc-server process: start, serve, shut down in order."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import grpc.aio
import torch
import uvloop

from ..common import descriptors, machine, ports
from ..common.addresses import listening_addresses
from ..common.configuration import Effective, UsageError
from ..common.exits import Exit
from ..common.free_memory import share_arena
from ..common.parts import Plan
from ..common.telemetry import HttpEndpoint, add_log_fields
from ..common.version import __version__
from ..compressors import AUTO, compressor_for, set_threads, suited
from ..compressors.packing import Packing
from ..optim.optimizer import Optimizer, OptimizerGroup
from ..planning import parse_fusion, parse_order, parse_replan
from ..proto.certificates import CertificateError, Certificates, Identity
from ..proto.channel import IDLE_MS, SERVER_OPTIONS, listen
from ..proto.manifest import Manifest
from ..proto.service import generic_handler
from ..proto.standard import Health, reflect
from ..settings import ServerSettings, parse_evaluate_every
from ..storage.backends import is_url, shown
from .calls.access import Access, TokenFileError
from .calls.page import Page, look
from .calls.service import Service
from .conductor import Conductor
from .curves import Curves
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
from .reporting import watch_space
from .shard.local import LocalShard
from .shard.making import SteppedStore
from .shard.pending import StepRules
from .shard.store import Float32

log = logging.getLogger("gradwire.server")

PAUSE_S = 15.0  # Longest wait for rounds in progress, if another server may continue the job.
COUNT_S, RENEW_S = 2.0, 60.0  # between two counts of the open descriptors, and two looks at certificates
GRACE_S, LINGER_S = 5.0, 5.0  # for calls and streams to end, and for clients to fetch a finished job's result
SCRAPED_S = 0.25  # between two looks whether /metrics has shown the end


def run(effective: Effective[ServerSettings]) -> int:
    """Run the server until a signal, the end of the job or a failure; return the exit code. Raises UsageError
    if an option, the state folder or the port cannot be used."""
    options = effective.settings
    share_arena()
    if options.threads:
        torch.set_num_threads(options.threads)
        set_threads(options.threads)
    return uvloop.run(_serve(effective))


def _shard(options: ServerSettings, mode: ModeOptions, packing: Packing) -> LocalShard:
    """Return a shard that builds its store by these options. packing: packs its updates."""
    optimizer, rate = mode.optimizer(options)
    job = OptimizerGroup(options=optimizer, learning_rate=rate)
    rules = StepRules(
        aggregation=parse_aggregation(options.aggregation),
        delay_compensation=mode.delay_compensation,
        clip_norm=options.clip_norm,
        takes_norms=parse_fusion(options.fusion).takes_norms,
        keep_last=bool(options.output),
    )

    def build(manifest: Manifest, values: Sequence[Float32], plan: Plan) -> SteppedStore:
        groups = manifest.optimizer_groups(job)
        compressor, why = compressor_for(options.compressor, manifest.specs)
        if options.compressor == AUTO:
            log.info("compressor auto: %s, because %s", compressor, why)
        if mode.workers_step:  # the server steps by the change of a worker's parameters, which has no groups
            groups = (job,) * len(groups)
        if manifest.clip_norm and not options.clip_norm:
            log.info("the scripts have the mean gradient clipped to a norm of %g", manifest.clip_norm)
        # A worker adapts its compressor to the same optimizer, of which a script's groups have all one kind.
        steps = groups[0].options if options.script else optimizer
        return SteppedStore(
            manifest,
            values,
            options.downlink,
            lambda parameters: Optimizer.of_groups(groups, parameters, manifest.group_of, manifest.ends),
            options.seed,
            replace(rules, clip_norm=options.clip_norm or manifest.clip_norm),
            plan,
            suited(compressor, steps, local=mode.workers_step),
            packing,
        )

    return LocalShard(build)


def _conductor(options: ServerSettings, mode: ModeOptions, recorder: Recorder) -> Conductor:
    """Return the conductor of a job with these options."""
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
    packing = Packing(options.entropy)
    return Conductor(
        Core(options, mode),
        metrics,
        shard=_shard(options, mode, packing),
        packing=packing,
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
        *("stay", "threads", "log_format", "preset"),  # of a preset the values are compared
        *("tls_ca", "tls_cert", "tls_key", "token_file"),
        *("lease_seconds", "max_model_bytes", "output", "entropy", "tensorboard"),
        *("state", "durability", "checkpoint_every", "resume"),
    }
)


class _Kept:
    """The folder of --state, which this process holds from now on, and the job in it."""

    def __init__(self, options: ServerSettings) -> None:
        """Open the folder, and compare the options with those of its job. Raises UsageError."""
        names = (each.name for each in fields(options) if each.name not in _MAY_CHANGE)
        self._options = {name: getattr(options, name) for name in names}
        try:
            self.folder = StateFolder(options.state, syncs=options.durability == "fsync")
            known = job_at(options.state)
            # Before a job begins, waiting members know its id already, but its options may still change.
            self.job: str = _new_id() if known is None else known["job"]
            if known is not None and self.folder.begun():
                _same_job(known["options"], self._options, options.state)
        except StateError as error:
            raise UsageError(str(error)) from None

    def serve(self, *, continued: bool) -> None:
        """Take possession of the folder, and write job.json for a job that has not begun.

        Called after recovery and after the port is bound. A start that fails earlier therefore neither writes
        job.json nor displaces the server at a URL.

        Args:
            continued: whether the job has begun under an earlier server.

        Raises:
            UsageError: the folder cannot be written to, or another server at the URL wrote a checkpoint after
                this one had recovered an older one.
        """
        try:
            self.folder.claim()
            if not continued:
                self.folder.put_job({"job": self.job, "gradwire": __version__, "options": self._options})
        except StateError as error:
            raise UsageError(str(error)) from None


def _new_id() -> str:
    """Return a random id for a job."""
    return uuid.uuid4().hex[:12]


def _same_job(before: Mapping[str, Any], now: Mapping[str, Any], state: str) -> None:
    """Raise UsageError for the first option with which the job in the folder cannot continue."""
    for name in now:
        if before.get(name, now[name]) != now[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} {now[name]}: the job in --state {state} was started with {before[name]}; "
                f"restore {flag} {before[name]}, or use another folder for another job"
            )


async def _serve(effective: Effective[ServerSettings]) -> int:
    """Start all parts of the server, wait until it has to stop, shut down in order, and return the exit
    code."""
    options = effective.settings
    limit = descriptors.raise_limit()
    mode = registry.parse(options.mode)
    try:
        access = Access(options)
    except TokenFileError as error:
        raise UsageError(str(error)) from None
    certificates = _certificates(options)
    kept = _Kept(options) if options.state else None
    job, recorder = _new_id() if kept is None else kept.job, Recorder()
    if kept is not None:
        every = parse_evaluate_every(options.checkpoint_every)
        recorder = Recorder(kept.folder, every, job=job, recorded=options.durability != "none")
    conductor = _conductor(options, mode, recorder)
    metrics = conductor.metrics
    metrics.job_id = job
    metrics.set_phase(conductor.core.state.phase)
    add_log_fields(lambda: {"job": job, "version": conductor.core.state.version})
    stopping = asyncio.Event()
    received = _handle_signals(stopping)
    # Probes are answered while the journal is read, which may take long.
    not_yet = "not listening yet" if kept is None else f"--state {options.state} is being read"
    page = Page(lambda: not_yet, lambda: look(conductor, service.job))
    http = HttpEndpoint(
        *(effective, options.http_host or (options.host if access.remote else "")),
        metrics.registry,
        stopping=stopping.is_set,
        state=lambda: conductor.core.state.phase.name.lower(),
        failing=lambda: not_yet or recorder.failing or (certificates.failing if certificates else ""),
        pages={"/": page.html, "/status.json": page.data},
    )
    try:
        continued = kept is not None and await recover(conductor, kept.folder)
        resumed = read_model(options.resume) if options.resume and not continued else None
    except (StateError, ResumeError) as error:
        raise UsageError(str(error)) from None
    if options.resume and continued:
        text = "--resume %s: ignored, because the job in --state %s continues"
        log.info(text, shown(options.resume), options.state)
    first = first_checkpoint if recorder.keeps else None
    service = Service(conductor, options, mode, job, access, resumed, first)
    del resumed  # frees the memory once the service has used it
    curves = Curves(options.tensorboard, conductor.core, metrics) if options.tensorboard else None
    metrics.info.labels(__version__, options.mode).set(1)

    most = descriptors.most_connections(limit)
    server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most)])
    handler = generic_handler(
        service.handlers(), sent=metrics.sent, received=metrics.received, admit=access.admit
    )
    server.add_generic_rpc_handlers((handler,))
    health = Health(server)
    if options.reflection:
        reflect(server)
    port = _listen(server, options, certificates)
    if kept is not None:
        kept.serve(continued=continued)
    await server.start()
    not_yet = ""
    await health.serving()
    log.info(
        "gc-server %s listening on %s:%d; job %s: %s, mode %s",
        *(__version__, options.host, port),
        *(service.job.id, "scripts" if options.script else options.task, options.mode),
    )
    ports.announce("grpc", port)
    if not access.remote:
        log.info(
            "protected mode: only peers on this machine are answered; to admit others, use TLS with a token "
            "or with certificates of clients, or --insecure on networks you trust"
        )
    elif not options.tls_cert:
        seen = " and the tokens" if options.token_file else ""
        log.warning(
            "no encryption: the traffic shows the parameters%s to everyone on its way; use --tls-cert", seen
        )

    watching = [asyncio.create_task(_watch_descriptors(limit))]
    if options.state and not is_url(options.state):
        watching.append(asyncio.create_task(watch_space(options.state, metrics)))
    if curves is not None:
        watching.append(asyncio.create_task(curves.draw()))
    if certificates is not None:
        watching.append(asyncio.create_task(_renew(certificates, metrics)))
    conductor.start()
    await _until_stopped(conductor, stopping, http, stay=options.stay)
    for task in watching:
        task.cancel()
    await health.stopping()  # report "not ready" before anything else ends
    may_continue = not conductor.tasks.failed.is_set() or conductor.tasks.unwritten
    resumable = recorder.keeps and may_continue and not conductor.finished.is_set()
    if resumable and not conductor.tasks.unwritten:
        await pause(conductor, PAUSE_S)
    await conductor.stop(conductor.tasks.failure or "it was told to stop", resumable=resumable)
    if curves is not None:
        await curves.close()
    await recorder.close()
    await server.stop(GRACE_S)
    http.close()
    log.info("stopped at version %d", conductor.core.state.version)
    return exit_code(
        finished=conductor.finished.is_set(),
        received=received[0] if received else None,
        failed=conductor.tasks.failed.is_set(),
        diverged=conductor.tasks.diverged,
        unsaved=conductor.output.unsaved,
        unwritten=conductor.tasks.unwritten,
    )


def _certificates(options: ServerSettings) -> Certificates | None:
    """Return the server's certificates; None for no TLS. Raises UsageError."""
    if bool(options.tls_cert) != bool(options.tls_key) or (options.tls_ca and not options.tls_cert):
        raise UsageError("--tls-cert, --tls-key: expected both, and both with --tls-ca")
    if not options.tls_cert:
        return None
    try:
        return Certificates(Identity(cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca))
    except CertificateError as error:
        raise UsageError(str(error)) from None


async def _renew(certificates: Certificates, metrics: ServerMetrics) -> None:
    """Watch the certificates' files, also without connections, and export the end of their validity."""
    while True:
        await asyncio.to_thread(certificates.renewed)
        metrics.certificate_expiry.set(certificates.expires_at)
        await asyncio.sleep(RENEW_S)


async def _watch_descriptors(limit: int) -> None:
    """Warn, each time anew, when connections take all file descriptors that they may."""
    most, warned = descriptors.most_connections(limit), False
    while True:
        await asyncio.sleep(COUNT_S)
        used = descriptors.in_use()
        if used >= most and not warned:
            log.warning(
                "%d of %d file descriptors are in use, and more than %d connections are refused; those "
                "without a call end after %d s. Raise the limit for more workers (ulimit -n, LimitNOFILE=); "
                "keep strangers from the port by a firewall or a network policy",
                *(used, limit, most, IDLE_MS // 1000),
            )
        warned = used >= most


def _listen(server: grpc.aio.Server, options: ServerSettings, certificates: Certificates | None) -> int:
    """Bind the port, and return its number. Raises UsageError."""
    try:
        addresses = listening_addresses(options.host)
    except OSError as error:
        raise UsageError(f"--host {options.host}: {error.strerror}; use an IP address") from None
    try:
        port = listen(server, addresses, options.port, certificates)
    except RuntimeError:
        port = 0
    if port == 0:
        raise UsageError(
            f"--port {options.port}: cannot listen on {options.host}:{options.port}; check that --host is an "
            "address of this machine and that the port is free; choose another port, or 0 for a free one"
        )
    return port


def _handle_signals(stopping: asyncio.Event) -> list[signal.Signals]:
    """Set the event at the first signal, and return a list that receives the signal. A second signal ends the
    process at once."""
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        if received:
            log.warning("second signal: the process ends at once")
            os._exit(128 + number)
        log.info("%s: shutting down", number.name)
        received.append(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return received


async def _until_stopped(
    conductor: Conductor, stopping: asyncio.Event, http: HttpEndpoint, *, stay: bool
) -> None:
    """Wait for a signal, for a failure of the job or, unless `stay` is set, for its end."""
    waits = [asyncio.create_task(event.wait()) for event in (stopping, conductor.tasks.failed)]
    if not stay:
        waits.append(asyncio.create_task(linger(conductor, http)))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    stopping.set()
    if conductor.tasks.failed.is_set() and not conductor.finished.is_set():
        log.error("%s", conductor.tasks.failure)


async def linger(conductor: Conductor, http: HttpEndpoint) -> Literal[True]:
    """Return once the job is finished, all members have left, clients had `LINGER_S` to fetch the parameters,
    and a program that scrapes /metrics regularly has seen the end."""
    await conductor.dispersed()
    log.info("the job is finished, and the server ends in %g s; use --stay to keep it running", LINGER_S)
    seen = http.scrapes  # a later scrape shows the end
    await asyncio.sleep(LINGER_S)
    for _ in range(math.ceil(http.next_scrape_s / SCRAPED_S)):
        if http.scrapes > seen:
            break
        await asyncio.sleep(SCRAPED_S)
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
    """Return the exit code of a server that has shut down in order. A failure takes precedence over a signal.

    Args:
        received: the signal that stopped the server; None if there was none.
        diverged: whether it failed because its parameters are not finite.
        unsaved: whether the last parameters could not be written to their files.
        unwritten: whether it failed because its journal cannot be written.
    """
    if failed and not finished and not unwritten:
        return Exit.DIVERGED if diverged else Exit.INTERNAL
    if unsaved or unwritten:
        return Exit.UNWRITTEN
    if finished or received is None:
        return Exit.DONE
    return 128 + received
