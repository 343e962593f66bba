"""Checks the promises of a lossy compressor: python check.py NAME[:KEY=VALUE,...], without feedback keys"""

import json
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradwire.compressors import (
    Payload,
    ProjectedPayload,
    Random,
    StepContext,
    TensorSpec,
    create,
    decode,
    parse_compressor,
    payload_bytes,
    sum_coordinates,
    validate,
)
from gradwire.storage.values import pack, unpack

LARGEST = float(np.finfo(np.float32).max)
# Without momentum, which sends more than there was.
NAME = f"{sys.argv[1]}{',' if ':' in sys.argv[1] else ':'}feedback=on,momentum=0,decay=1"


def stored(state: Any) -> Any:
    """Return a state as --state writes and reads it. Raises TypeError for one that cannot be stored."""
    tensors: dict[str, torch.Tensor] = {}
    plain = json.loads(json.dumps(pack(state, tensors)))
    return unpack(plain, {name: tensor.clone() for name, tensor in tensors.items()})


class Replica:
    """The bases of one process, for a compressor that has any."""

    def __init__(self, spec: TensorSpec) -> None:
        made: Any = create(NAME)
        self.spec, self.compressor = spec, made.compressor
        self.bases: Any = self.compressor.start(spec, 7) if SPEC.coordinates(spec.shape) else None

    def decode(self, payload: Payload) -> np.ndarray:
        """Return the values of a payload, and advance the bases by its coordinates."""
        if not isinstance(payload, ProjectedPayload):
            assert self.bases is None, "a tensor that has coordinates was sent without them"
            return decode(payload)
        assert payload.count == SPEC.coordinates(self.spec.shape), (
            "another number of coordinates than declared"
        )
        found, halves = np.empty(payload.count, np.float32), np.zeros(payload.elements, np.float32)
        for weight in (0.5, 0.5, 1.0):  # twice a half, and then the whole
            out = np.empty(payload.elements, np.float32)
            sum_coordinates([payload], [weight], found)
            self.compressor.expand(self.spec, self.bases, found, out)
            halves += out if weight < 1 else 0.0
        assert np.abs(halves - out).max() <= 1e-5 * np.abs(out).max() + 1e-42, "coordinates do not add up"
        self.bases = self.compressor.advance(self.spec, self.bases, found)
        return out


def steps(
    shape: tuple[int, ...],
    given: torch.Tensor,
    seed: int,
    between: Callable[[Any], Any] = lambda state: state,
) -> list[tuple[bytes, bytes]]:
    """Return the bytes of four steps. seed: of the generators that a compressor must not use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    compressor, found, spec = create(NAME), list[tuple[bytes, bytes]](), TensorSpec(name="w", shape=shape)
    state, server, worker = compressor.init(spec), Replica(spec), Replica(spec)
    for version in range(4):
        drawn, old = Random((version,)), state.residual.numpy().astype(np.float64)
        context = StepContext(samples=32, version=version, random=drawn, shared=drawn, bases=worker.bases)
        payload, state = compressor.compress(given, state, context)
        validate(payload)  # as the server will
        assert payload.elements == given.numel()
        assert payload.data.size == payload_bytes(payload)
        # Nothing is lost: the values sent and the rest make up the sum.
        total = np.clip(given.numpy() + old, -LARGEST, LARGEST)
        sent, left = server.decode(payload).astype(np.float64), state.residual.numpy()
        worker.decode(payload)
        assert server.bases is None or server.bases.tobytes() == worker.bases.tobytes(), "bases differ"
        error = np.abs(sent + left - total)
        assert np.isfinite(left).all(), "what is left is not finite"
        bound = np.maximum((np.abs(total) + np.abs(sent)) * 2.0**-23, 2.0**-149)
        if isinstance(payload, ProjectedPayload):  # an element is a sum of rounded products
            bound = np.maximum(bound, 1e-5 * np.abs(total).max() + 1e-42)
        assert (error <= bound).all(), f"sent and left differ from what was there by {error.max():g}"
        found.append((payload.data.tobytes(), sent.tobytes()))
        state = between(state)
    return found


SPEC = parse_compressor(NAME)
shapes = [(), (0,), (1,), (7,), (16,), (17, 1), (1000,), (3, 5), (33, 31), (0, 4), (5, 3, 2, 2)]
drawn = torch.Generator().manual_seed(0)
# A tensor of a compressor with bases travels otherwise where it has no coordinates.
shapes = [shape for shape in [*shapes, (40, 60)] if not SPEC.shared or SPEC.coordinates(shape)]
cases = [(shape, torch.randn(math.prod(shape), generator=drawn)) for shape in shapes]
if SPEC.shared:
    cases += [((40, 60), cases[-1][1] * size) for size in (0.0, 1e-44, 1e37)]
odd = [[0.0, -0.0], [1e-45, -1e-40], [LARGEST, -LARGEST, 1.0], [0.0] * 64]
vectors = [] if SPEC.shared else [((len(values),), torch.tensor(values)) for values in odd]
for shape, given in cases + vectors:
    before = given.clone()
    expected = steps(shape, given, seed=1)
    assert steps(shape, given, seed=2) == expected, "its bytes depend on more than its arguments"
    assert steps(shape, given, seed=1, between=stored) == expected, "a stored state continues differently"
    assert torch.equal(given, before), "the gradient was written to"
print(sys.argv[1], "holds")
