"""Gradient compression: tensors in, payloads out.

    compressor = ModelCompressor(specs, "4bit", LayerRule(), seed=1, rank=0)
    payloads = compressor.compress(gradients, samples=32)     # on a worker
    validate(payload)                                         # on a server, for every payload received
    reduce_payloads(payloads, weights, out)                   # and once a round, in rank order

Pure numerics: no network, no protobuf, no clock. See docs/compressors.md for formulas and wire format.
"""

from .base import Compressor, FusedFeedback, StepContext, TensorSpec
from .feedback import ErrorFeedback
from .kernels import set_threads, warm_up
from .layers import LayerRule
from .model import ModelCompressor, NonFiniteGradient
from .payload import (
    CodeScheme,
    DenseFormat,
    DensePayload,
    Payload,
    PayloadError,
    QuantizedPayload,
    payload_bytes,
)
from .reduction import decode, reduce_payloads
from .registry import CompressorEntry, create
from .validation import validate

__all__ = [
    "CodeScheme",
    "Compressor",
    "CompressorEntry",
    "DenseFormat",
    "DensePayload",
    "ErrorFeedback",
    "FusedFeedback",
    "LayerRule",
    "ModelCompressor",
    "NonFiniteGradient",
    "Payload",
    "PayloadError",
    "QuantizedPayload",
    "StepContext",
    "TensorSpec",
    "create",
    "decode",
    "payload_bytes",
    "reduce_payloads",
    "set_threads",
    "validate",
    "warm_up",
]
