"""Values of buffers and frozen parameters as bytes."""

from __future__ import annotations

import pytest
import torch

from gradwire.proto.entries import ITEM_BYTES
from gradwire.proto.messages import Entry, EntryKind
from gradwire.proto.state import bytes_of, tensor_of


def entry(dtype: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name="b", kind=EntryKind.BUFFER, shape=shape, dtype=dtype)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (), (1,), (2, 3)])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_values_of_every_dtype_and_size_are_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    value = (torch.arange(float(torch.Size(shape).numel())) - 1).view(shape).to(getattr(torch, dtype))
    found = bytes_of(value)
    assert found.shape == (value.numel() * ITEM_BYTES[dtype],)
    back = tensor_of(entry(dtype, shape), found)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(back, value)
    found[:] = 0  # the tensor has memory of its own
    assert torch.equal(back, value)


def test_a_value_that_torch_keeps_as_a_conjugate_or_a_negative_is_resolved() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (value.conj(), value.conj().imag):
        name = str(lazy.dtype).removeprefix("torch.")
        assert torch.equal(tensor_of(entry(name, (2,)), bytes_of(lazy)), lazy.clone())
