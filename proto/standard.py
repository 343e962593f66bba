"""The standard gRPC services: grpc.health.v1 for probes, and reflection for tools such as grpcurl."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from .service import SERVICE


class Health:
    """The health service, with the same answer for the whole server and for Gradwire's service."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def serving(self) -> None:
        """Answer probes with SERVING from now on."""
        for name in ("", SERVICE.full_name):
            await self._servicer.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stopping(self) -> None:
        """Answer probes with NOT_SERVING from now on; this cannot be undone."""
        await self._servicer.enter_graceful_shutdown()


def reflect(server: grpc.aio.Server) -> None:
    """Enable gRPC reflection, by which tools such as grpcurl list services and messages."""
    names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
