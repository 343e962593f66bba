"""Gradient compression: tensors in, payloads out.

    compressor = ModelCompressor(specs, "4bit", LayerRule(), seed=1, rank=0)    # on a worker
    payloads = compressor.compress(gradients, samples=32, version=0)

    validate(payload)                           # on a server, for every payload received
    reduce_payloads(payloads, weights, out)     # once a round, in rank order

This is pure numerics: no network, no protobuf, no clock. See docs/reference/compressors.md for formulas and
wire format.

Declarations and payload kinds are imported at once, without torch. The other names are those of `library`,
which imports torch when the first of them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..common.stored import stored as stored
from .advice import advice as advice
from .advice import compressor_for as compressor_for
from .advice import suited as suited
from .entry import CompressorEntry as CompressorEntry
from .entry import Joined as Joined
from .entry import NoOptions as NoOptions
from .payload import AbsentPayload as AbsentPayload
from .payload import CodeFormat as CodeFormat
from .payload import DenseFormat as DenseFormat
from .payload import DensePayload as DensePayload
from .payload import IndexCoding as IndexCoding
from .payload import LinearPayload as LinearPayload
from .payload import Payload as Payload
from .payload import PayloadError as PayloadError
from .payload import ProjectedPayload as ProjectedPayload
from .payload import QuantizedPayload as QuantizedPayload
from .payload import SparsePayload as SparsePayload
from .payload import ValuePayload as ValuePayload
from .payload import pack_codes as pack_codes
from .payload import payload_bytes as payload_bytes
from .payload import unpack_codes as unpack_codes
from .payload import wire_bytes as wire_bytes
from .registry import AUTO as AUTO
from .registry import CompressorSpec as CompressorSpec
from .registry import compressor_of as compressor_of
from .registry import create as create
from .registry import create_bare as create_bare
from .registry import known_compressor as known_compressor
from .registry import parse_compressor as parse_compressor
from .registry import parse_downlink as parse_downlink
from .sizes import TensorCoding as TensorCoding
from .terms import PushTerms as PushTerms
from .wrapping import Wrapping as Wrapping

if TYPE_CHECKING:
    from .library import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name == "library":  # the import system looks for the attribute before it imports the module
            raise AttributeError(name)
        try:
            found = getattr(import_module(".library", __name__), name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        globals()[name] = found
        return found
