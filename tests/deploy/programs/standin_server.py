"""Stands in for gc-server: answers Status as its task says, for scripts its downlink, and trains nothing.

finish: done at the eighth question. forever: never done. dies: exits with 9 at the fifth. usage: does not
start. gathering: waits for workers. finishing: writes parameters until the eighth. silent: done
at the eighth, and takes its time for the third. Exits with 2 when it cannot listen, like the real one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import grpc.aio

from gradwire.common import ports
from gradwire.common.configuration import from_text
from gradwire.proto.channel import SERVER_OPTIONS
from gradwire.proto.job import job_message
from gradwire.proto.messages import EpochStatus, MemberStatus, Phase, StatusResponse, Traffic
from gradwire.proto.service import generic_handler
from gradwire.settings import JobTerms


def main(argv: Sequence[str]) -> int:
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in argv if "=" in argument)
    arguments.setdefault("task", arguments["downlink"])  # a server of scripts is told of no task
    if arguments["task"] == "usage":
        print("gc-server: --mode: expected one of sync, got 'magic'", file=sys.stderr)
        return 2
    return asyncio.run(serve(arguments))


async def serve(arguments: dict[str, str]) -> int:
    questions = 0

    async def status(request: object, context: object) -> StatusResponse:
        nonlocal questions
        questions += 1
        if arguments["task"] == "dies" and questions == 5:
            print("out of luck", flush=True)
            os._exit(9)
        if arguments["task"] == "silent" and questions == 3:
            await asyncio.sleep(600)  # the one who asked will not wait for it
        return reply(arguments, phase(arguments["task"], questions))

    async def unused(*_: Any) -> Any:
        raise AssertionError("gc-run asks for nothing but the status")

    handlers: dict[str, Any] = dict.fromkeys(
        ("Join", "Initialize", "Fetch", "Exchange", "PutState", "GetState", "GetOptimizer"), unused
    )
    aio: Any = grpc.aio  # whose handlers are generic without saying of what
    handler = generic_handler({**handlers, "Status": status}, sent=ignore, received=ignore)
    server = aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    try:
        port = server.add_insecure_port(f"{arguments['host']}:{arguments['port']}")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    await server.start()
    ports.announce("grpc", port)
    await server.wait_for_termination()
    return 0


def phase(task: str, questions: int) -> Phase:
    if task == "gathering":
        return Phase.GATHERING
    if task == "finishing" and questions < 8:
        return Phase.FINISHING
    return Phase.RUNNING if questions < 8 or task == "forever" else Phase.FINISHED


def member(rank: int) -> MemberStatus:
    return MemberStatus(
        worker=f"worker-{rank}",
        rank=rank,
        attached=True,
        heard_seconds=0.1,
        activity="computing",
        compressor="4bit",
        pushes=11,
    )


def ignore(size: int) -> None:
    pass


def reply(arguments: dict[str, str], phase: Phase) -> StatusResponse:
    begun = phase is not Phase.GATHERING
    finished = phase is Phase.FINISHED
    settings = {name.replace("-", "_"): value for name, value in arguments.items()}
    settings["task"] = "digits"  # which the real one would insist on
    return StatusResponse(
        job=job_message(from_text(JobTerms, settings, id="standin", work="gradients")),
        phase=phase,
        waiting="" if finished else "waiting for worker-1 since 3.1 s",
        version=11 if begun else 0,
        epoch=1 if begun else 0,
        epoch_progress=0.0,
        members=(member(0), member(1)) if begun else (),
        lost=(),
        evaluations=(EpochStatus(epoch=1, version=11, metrics={"loss": 0.5, "accuracy": 0.75}),),
        traffic=Traffic(wire_bytes_up=10, wire_bytes_down=40, raw_bytes_up=80, raw_bytes_down=40),
        pushes=22,
        refused_pushes=0,
        train_loss=0.6,
        training_seconds=1.5 if begun else 0.0,
        parameters_sha256="ab" * 32 if finished else "",
        software="0",
    )
