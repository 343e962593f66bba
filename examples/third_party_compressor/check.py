"""Checks the promises of a lossy compressor: python check.py NAME[:KEY=VALUE,...], without feedback keys"""

import json
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradwire.compressors import Random, StepContext, TensorSpec, create, decode, payload_bytes, validate
from gradwire.storage.values import pack, unpack

LARGEST = float(np.finfo(np.float32).max)
# Without momentum, which sends more than there was.
NAME = f"{sys.argv[1]}{',' if ':' in sys.argv[1] else ':'}feedback=on,momentum=0,decay=1"


def stored(state: Any) -> Any:
    """Return a state as --state writes and reads it. Raises TypeError for one that cannot be stored."""
    tensors: dict[str, torch.Tensor] = {}
    plain = json.loads(json.dumps(pack(state, tensors)))
    return unpack(plain, {name: tensor.clone() for name, tensor in tensors.items()})


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
    compressor, found = create(NAME), list[tuple[bytes, bytes]]()
    state = compressor.init(TensorSpec(name="w", shape=shape))
    for version in range(4):
        drawn, old = Random((version,)), state.residual.numpy().astype(np.float64)
        context = StepContext(samples=32, version=version, random=drawn, shared=drawn)
        payload, state = compressor.compress(given, state, context)
        validate(payload)  # as the server will
        assert payload.elements == given.numel()
        assert payload.data.size == payload_bytes(payload)
        # Nothing is lost: the values sent and the rest make up the sum.
        total = np.clip(given.numpy() + old, -LARGEST, LARGEST)
        sent, left = decode(payload).astype(np.float64), state.residual.numpy()
        error = np.abs(sent + left - total)
        assert np.isfinite(left).all(), "what is left is not finite"
        bound = np.maximum((np.abs(total) + np.abs(sent)) * 2.0**-23, 2.0**-149)
        assert (error <= bound).all(), f"sent and left differ from what was there by {error.max():g}"
        found.append((payload.data.tobytes(), sent.tobytes()))
        state = between(state)
    return found


shapes = [(), (0,), (1,), (7,), (16,), (17, 1), (1000,), (3, 5), (33, 31), (0, 4), (5, 3, 2, 2)]
drawn = torch.Generator().manual_seed(0)
cases = [(shape, torch.randn(math.prod(shape), generator=drawn)) for shape in shapes]
odd = [[0.0, -0.0], [1e-45, -1e-40], [LARGEST, -LARGEST, 1.0], [0.0] * 64]
for shape, given in cases + [((len(values),), torch.tensor(values)) for values in odd]:
    before = given.clone()
    expected = steps(shape, given, seed=1)
    assert steps(shape, given, seed=2) == expected, "its bytes depend on more than its arguments"
    assert steps(shape, given, seed=1, between=stored) == expected, "a stored state continues differently"
    assert torch.equal(given, before), "the gradient was written to"
print(sys.argv[1], "holds")
