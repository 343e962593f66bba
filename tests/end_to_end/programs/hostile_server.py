"""Stands in for gc-server and answers every Join with the task and the work that it was told: `hostile_server
TASK WORK`. It logs what a worker says when it leaves."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc.aio

from gradwire.proto import messages as m
from gradwire.proto.channel import SERVER_OPTIONS
from gradwire.proto.service import generic_handler


async def main(task: str, work: str) -> None:
    def say(text: str) -> None:
        print(json.dumps({"message": text}), file=sys.stderr, flush=True)

    async def join(request: m.JoinRequest, context: object) -> m.JoinResponse:
        return m.JoinResponse(
            job=m.JobDescription(id="trap", settings={"task": task, "mode": "sync", "work": work}),
            limits=m.Limits(chunk_bytes=1 << 19, lease_seconds=10, heartbeat_seconds=2),
            rank=0,
            version=0,
            initialize=True,
        )

    async def exchange(requests: Any, context: Any) -> None:
        async for request in requests:
            if isinstance(request, m.Hello):
                await context.write(m.Welcome(rank=0, version=0, last_seq=0))
            if isinstance(request, m.Leave):
                say(f"left: {request.reason}")

    async def unused(*_: Any) -> Any:
        raise AssertionError("a worker that refuses its task asks for nothing else")

    calls: dict[str, Any] = dict.fromkeys(
        ("Initialize", "Fetch", "Status", "PutState", "GetState", "GetOptimizer"), unused
    )
    calls |= {"Join": join, "Exchange": exchange}
    aio: Any = grpc.aio  # whose handlers are generic without saying of what
    server = aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((generic_handler(calls, sent=lambda _: None, received=lambda _: None),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(f"listening on 127.0.0.1:{port}")
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
