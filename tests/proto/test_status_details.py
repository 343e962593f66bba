"""How a refusal travels when it ends a call."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory

from gradwire.proto import gradwire_pb2 as pb
from gradwire.proto.refusal import Reason, refusal, sentence
from gradwire.proto.service import abort


def rpc_status() -> Any:
    """The class of google.rpc.Status, which only tools have."""
    file = descriptor_pb2.FileDescriptorProto(
        name="status.proto", package="google.rpc", syntax="proto3", dependency=[any_pb2.DESCRIPTOR.name]
    )
    status = file.message_type.add(name="Status")
    kinds = descriptor_pb2.FieldDescriptorProto
    status.field.add(name="code", number=1, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    status.field.add(name="message", number=2, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    status.field.add(
        name="details",
        number=3,
        type=kinds.TYPE_MESSAGE,
        label=kinds.LABEL_REPEATED,
        type_name="google.protobuf.Any",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("google.rpc.Status"))


def test_a_refusal_is_also_a_google_rpc_status() -> None:
    aborted: dict[str, Any] = {}

    class Context:
        async def abort(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
            aborted.update(code=code, details=details, metadata=dict(metadata))

    why = refusal(Reason.SIZE, worker="w" * 200, field="worker id", limit="é", value="200 characters")
    context: Any = Context()
    asyncio.run(abort(context, why))
    status = rpc_status().FromString(aborted["metadata"]["grpc-status-details-bin"])
    assert status.code == aborted["code"].value[0] == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert status.message == aborted["details"] == sentence(why)
    (detail,) = status.details
    found = pb.Refusal.FromString(detail.value)
    assert detail.type_url == f"type.googleapis.com/{pb.Refusal.DESCRIPTOR.full_name}"
    assert found.worker == "w" * 200
