"""The life of a gc-server process: start, serve, shut down in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from pathlib import Path
from typing import Literal

import grpc.aio
import torch
import uvloop

from .. import __version__
from ..compressors import check_downlink, set_threads
from ..exits import Exit
from ..optimizer import build_optimizer, parse_optimizer
from ..options import Effective, UsageError
from ..proto.channel import SERVER_OPTIONS
from ..proto.health import Health
from ..proto.messages import Job, Limits
from ..proto.service import generic_handler
from ..proto.wire import CHUNK_BYTES
from ..spec import SpecError
from ..telemetry import HttpEndpoint
from .conductor import Conductor
from .config import ServerConfig, check_together, parse_redundancy
from .job.core import Core
from .job.modes.interval import parse_local_steps
from .job.schedule import parse_schedule
from .job.state import Rules
from .metrics import Metrics
from .service import Service, Settings
from .shard.aggregation import parse_aggregation
from .shard.store import Store

log = logging.getLogger("gradwire.server")

GRACE_S = 5.0  # for calls and streams to end after the members were told
LINGER_S = 5.0  # for the parameters to be fetched, and the status asked for, when the job is done
HEARTBEATS_PER_LEASE = 5


def run(effective: Effective[ServerConfig]) -> int:
    """Serve until told to stop. Returns the exit code; raises UsageError for what only now can be checked."""
    config = effective.config
    _check_output(config.output)
    check_together(config)
    try:
        check_downlink(config.downlink)
    except SpecError as error:
        raise UsageError(f"--downlink {config.downlink}: {error}") from None
    if config.threads:
        torch.set_num_threads(config.threads)
        set_threads(config.threads)
    return uvloop.run(_serve(effective))


def _check_output(output: str) -> None:
    """Now, and not when the training is over. Raises UsageError."""
    folder = Path(output).absolute().parent
    if output and (Path(output).is_dir() or not os.access(folder, os.W_OK | os.X_OK)):
        raise UsageError(f"--output {output}: expected a file in a folder that exists and can be written to")


def _settings(config: ServerConfig) -> Settings:
    local = config.mode == "local"
    optimizer = parse_optimizer(config.outer_optimizer if local else config.optimizer)
    rate = config.outer_rate if local else config.learning_rate
    return Settings(
        job=Job(
            id=uuid.uuid4().hex[:12],
            task=config.task,
            mode=config.mode,
            downlink=config.downlink,
            seed=config.seed,
            batch_size=config.batch_size,
            epochs=config.epochs,
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            schedule=config.schedule,
            correction=config.correction if local else 0.0,
        ),
        limits=Limits(
            chunk_bytes=CHUNK_BYTES,
            lease_seconds=config.lease_seconds,
            heartbeat_seconds=config.lease_seconds / HEARTBEATS_PER_LEASE,
        ),
        max_model_bytes=config.max_model_bytes,
        protected=not config.insecure,
        software=__version__,
        aggregation=parse_aggregation(config.aggregation),
        build_optimizer=lambda parameters: build_optimizer(optimizer, parameters, rate),
        delay_compensation=config.delay_compensation,
        keep_last=bool(config.output),
    )


def _conductor(config: ServerConfig) -> Conductor:
    rules = Rules(
        min_workers=config.min_workers,
        batch_size=config.batch_size,
        epochs=config.epochs,
        lease_s=config.lease_seconds,
        mode=config.mode,
        learning_rate=config.learning_rate,
        schedule=parse_schedule(config.schedule),
        backup=config.backup,
        redundancy=parse_redundancy(config.redundancy),
        straggler_code=config.straggler_code,
        staleness=config.staleness,
        inverse=config.staleness_lr == "inverse",
        local_steps=parse_local_steps(config.local_steps) if config.mode == "local" else None,
    )
    metrics = Metrics(config.downlink)
    if config.mode == "stale":
        metrics.staleness_bound.set(config.staleness)

    def save(store: Store, digest: str, finished: bool) -> None:
        if not config.output:
            return
        if not finished and store.version == 0:
            log.info("no parameters written: there is no version after the initial one")
            return
        path = Path(config.output)
        if not finished:  # under another name, so that no finished model is lost to it, or mistaken for it
            path = path.with_name(f"{path.stem}.unfinished-v{store.version}{path.suffix}")
        store.save(path, digest, finished=finished)
        log.info("parameters of version %d written to %s", store.version, path)

    return Conductor(Core(rules), metrics, save=save)


async def _serve(effective: Effective[ServerConfig]) -> int:
    config = effective.config
    settings = _settings(config)
    conductor = _conductor(config)
    metrics = conductor.metrics
    metrics.info.labels(__version__, config.mode, settings.job.id).set(1)
    service = Service(conductor, settings)
    stopping = asyncio.Event()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = generic_handler(service.handlers(), sent=metrics.sent, received=metrics.received)
    server.add_generic_rpc_handlers((handler,))
    health = Health(server)
    port = _listen(server, config)
    http = None
    if config.http_port:
        http = HttpEndpoint(
            config.host,
            config.http_port,
            metrics.registry,
            alive=lambda: (True, "alive"),
            ready=lambda: _readiness(conductor, stopping),
            fallback=effective.origins["http_port"] == "default",
        )
    await server.start()
    await health.serving()

    log.info(
        "gc-server %s listening on %s:%d, %s; job %s: %s, mode %s",
        *(__version__, config.host, port, f"http on {http.port}" if http else "no http"),
        *(settings.job.id, config.task, config.mode),
    )
    if not config.insecure:
        log.info("protected mode: only peers on this machine are answered (--insecure lifts it)")

    conductor.start()
    code = await _until_stopped(conductor, stopping, stay=config.stay)
    await health.stopping()  # not ready first, then the rest
    await conductor.stop(conductor.failure or "it was told to stop")
    if conductor.unsaved and code == Exit.DONE:
        code = Exit.INTERNAL
    await server.stop(GRACE_S)
    if http is not None:
        http.close()
    log.info("stopped at version %d", conductor.core.version)
    return code


def _listen(server: grpc.aio.Server, config: ServerConfig) -> int:
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_insecure_port(f"{host}:{config.port}")
    except RuntimeError:
        port = 0
    if port == 0:
        raise UsageError(
            f"--port {config.port}: cannot listen on {config.host}:{config.port}; is --host an address "
            "of this machine, and the port free? Choose another port, or 0 for a free one"
        )
    return port


def _readiness(conductor: Conductor, stopping: asyncio.Event) -> tuple[bool, str]:
    """For /readyz: whether workers may come."""
    if stopping.is_set():
        return False, "shutting down"
    return True, conductor.core.phase.name.lower()


async def _until_stopped(conductor: Conductor, stopping: asyncio.Event, *, stay: bool) -> int:
    """Wait for a signal, for the job to fail, or, unless the server shall stay, for its end.

    Returns the exit code. A second signal ends the process at once.
    """
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
    waits = [asyncio.create_task(event.wait()) for event in (stopping, conductor.failed)]
    if not stay:
        waits.append(asyncio.create_task(_over(conductor)))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    stopping.set()
    if conductor.finished.is_set():
        return Exit.DONE
    if received:
        return 128 + received[0]
    log.error("%s", conductor.failure)
    return Exit.DIVERGED if conductor.diverged else Exit.INTERNAL


async def _over(conductor: Conductor) -> Literal[True]:
    """Return when the job is done, everybody has heard, and there was time to ask for what it came to."""
    await conductor.dispersed()
    log.info("the job is done and the server ends in %g s; --stay keeps it", LINGER_S)
    await asyncio.sleep(LINGER_S)
    return True
