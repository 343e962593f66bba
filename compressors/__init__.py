"""Gradient compression: tensors in, payloads out.

    compressor = ModelCompressor(specs, "4bit", LayerRule(), seed=1, rank=0)
    payloads = compressor.compress(gradients, samples=32, version=0)     # on a worker
    validate(payload)                                         # on a server, for every payload received
    reduce_payloads(payloads, weights, out)                   # and once a round, in rank order

Pure numerics: no network, no protobuf, no clock. See docs/compressors.md for formulas and wire format.
"""

from .base import Compressor, FusedFeedback, ModelWide, NoOptions, StepContext, TensorSpec
from .feedback import ErrorFeedback
from .indices import Indices, seeded_payload, sparse_payload
from .kernels import set_threads, warm_up
from .layers import LayerRule
from .ledger import Compressed, Ledger
from .model import ModelCompressor, NonFiniteGradient, model_wide
from .payload import (
    CodeFormat,
    DenseFormat,
    DensePayload,
    IndexCoding,
    LinearPayload,
    Payload,
    PayloadError,
    QuantizedPayload,
    SparsePayload,
    ValuePayload,
    payload_bytes,
    wire_bytes,
)
from .reduction import add_update, decode, reduce_payloads
from .registry import CompressorEntry, check_downlink, create, create_bare, lossless, wrapping_of
from .validation import check_announcement, validate
from .wrapping import Wrapping

__all__ = [
    "CodeFormat",
    "Compressed",
    "Compressor",
    "CompressorEntry",
    "DenseFormat",
    "DensePayload",
    "ErrorFeedback",
    "FusedFeedback",
    "IndexCoding",
    "Indices",
    "LayerRule",
    "Ledger",
    "LinearPayload",
    "ModelCompressor",
    "ModelWide",
    "NoOptions",
    "NonFiniteGradient",
    "Payload",
    "PayloadError",
    "QuantizedPayload",
    "SparsePayload",
    "StepContext",
    "TensorSpec",
    "ValuePayload",
    "Wrapping",
    "add_update",
    "check_announcement",
    "check_downlink",
    "create",
    "create_bare",
    "decode",
    "lossless",
    "model_wide",
    "payload_bytes",
    "reduce_payloads",
    "seeded_payload",
    "set_threads",
    "sparse_payload",
    "validate",
    "warm_up",
    "wire_bytes",
    "wrapping_of",
]
