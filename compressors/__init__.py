"""Gradient compression: tensors in, payloads out.

    compressor = ModelCompressor(specs, "4bit", LayerRule(), seed=1, rank=0)
    payloads = compressor.compress(gradients, samples=32, version=0)     # on a worker
    validate(payload)                                         # on a server, for every payload received
    reduce_payloads(payloads, weights, out)                   # and once a round, in rank order

Pure numerics: no network, no protobuf, no clock. See docs/compressors.md for formulas and wire format.
"""

from ..planning.parts import ALIGNMENT as ALIGNMENT
from ..planning.parts import LEAST_BYTES as LEAST_BYTES
from ..planning.parts import Part as Part
from ..planning.parts import Plan as Plan
from ..planning.parts import Unit as Unit
from ..planning.parts import arrange as arrange
from ..planning.parts import cut_up as cut_up
from ..planning.parts import divide as divide
from ..planning.parts import largest_part as largest_part
from .advice import advice as advice
from .advice import suited as suited
from .base import Compressor as Compressor
from .base import FusedFeedback as FusedFeedback
from .base import ModelWide as ModelWide
from .base import Neighbours as Neighbours
from .base import NonFiniteGradient as NonFiniteGradient
from .base import NoOptions as NoOptions
from .base import Random as Random
from .base import StepContext as StepContext
from .base import TensorSpec as TensorSpec
from .cutting import cut as cut
from .cutting import cut_at as cut_at
from .cutting import join as join
from .dense import dense_payload as dense_payload
from .feedback import ErrorFeedback as ErrorFeedback
from .indices import Indices as Indices
from .indices import decode_indices as decode_indices
from .indices import seeded_payload as seeded_payload
from .indices import sparse_bytes as sparse_bytes
from .indices import sparse_payload as sparse_payload
from .kernels import set_threads as set_threads
from .kernels import warm_up as warm_up
from .kernels.devices import finite as finite
from .layers import LayerRule as LayerRule
from .ledger import Compressed as Compressed
from .ledger import Ledger as Ledger
from .ledger import norm as norm
from .model import ModelCompressor as ModelCompressor
from .model import chooses_by_norm as chooses_by_norm
from .model import model_wide as model_wide
from .payload import AbsentPayload as AbsentPayload
from .payload import CodeFormat as CodeFormat
from .payload import DenseFormat as DenseFormat
from .payload import DensePayload as DensePayload
from .payload import IndexCoding as IndexCoding
from .payload import LinearPayload as LinearPayload
from .payload import Payload as Payload
from .payload import PayloadError as PayloadError
from .payload import QuantizedPayload as QuantizedPayload
from .payload import SparsePayload as SparsePayload
from .payload import ValuePayload as ValuePayload
from .payload import payload_bytes as payload_bytes
from .payload import wire_bytes as wire_bytes
from .reduction import add_update as add_update
from .reduction import decode as decode
from .reduction import put_update as put_update
from .reduction import reduce_payloads as reduce_payloads
from .registry import AUTO as AUTO
from .registry import CompressorEntry as CompressorEntry
from .registry import check_downlink as check_downlink
from .registry import compressor_of as compressor_of
from .registry import create as create
from .registry import create_bare as create_bare
from .registry import least_part_bytes as least_part_bytes
from .registry import lossless as lossless
from .registry import wrapping_of as wrapping_of
from .runs import runs_of as runs_of
from .runs import spanning as spanning
from .step import Step as Step
from .validation import check_announcement as check_announcement
from .validation import validate as validate
from .wrapping import Wrapping as Wrapping
