"""Shares: every element has one owner, whichever bundle it is in, and owners have about as much."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from gradwire.common.parts import ALIGNMENT
from gradwire.compressors import LayerRule, TensorSpec, dense_payload, parse_compressor
from gradwire.compressors.payload import DenseFormat
from gradwire.ddp.bundle import Bundle, Parameter, Terms, mean
from gradwire.ddp.shares import Shares, decide, pieces

SHAPES = [(40, 1000), (7,), (), (0,), (64, 64), (3, 70_001), *[(16, 16)] * 40]
PARAMETERS = [
    Parameter(name=f"tensor {number}", number=number, shape=shape) for number, shape in enumerate(SHAPES)
]
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_shares_come_back_to_where_they_were_cut(ranks: int) -> None:
    values = np.random.default_rng(ranks).standard_normal(ELEMENTS).astype(np.float32)
    shares = Shares(PARAMETERS, ranks)
    cut = shares.cut([dense_payload(DenseFormat.FLOAT32, piece) for piece in np.split(values, [50_000])])
    assert [sum(each.elements for each in share) for share in cut] == [
        each.part.elements for each in shares.readers
    ]
    assert len(cut[0]) == 1  # many tensors, one payload
    out = np.empty(ELEMENTS, np.float32)
    shares.decode(cut, out)
    assert np.array_equal(out, values)


@pytest.mark.parametrize("ranks", [1, 3, 5, 16])
def test_owners_add_in_rank_order(ranks: int) -> None:
    values = np.random.default_rng(ranks).standard_normal((ranks, ELEMENTS)).astype(np.float32)
    shares = Shares(PARAMETERS, ranks)
    cut = [shares.cut([dense_payload(DenseFormat.FLOAT32, each)]) for each in values]
    sent = [np.empty(reader.part.elements, np.float32) for reader in shares.readers]
    for owner, own in enumerate(sent):
        mean([of_rank[owner] for of_rank in cut], own)
    out = np.empty(ELEMENTS, np.float32)
    shares.decode([[dense_payload(DenseFormat.FLOAT32, own)] for own in sent], out)
    assert np.array_equal(out, functools.reduce(np.add, values * np.float32(1 / ranks)))


def test_pieces_follow_from_the_tensor_alone() -> None:
    one, other = Shares(PARAMETERS, 4), Shares(PARAMETERS[::-1], 4)
    for owned, again in zip(one.owned, other.owned, strict=True):
        assert owned == again[::-1]
    assert all(start % ALIGNMENT == 0 for each in PARAMETERS for _, start, _ in pieces(each, 4))


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_owners_of_small_tensors_have_about_as_many(stride: int) -> None:
    """A network repeats its kinds of layers."""
    owners = [
        owner
        for number in range(0, 200 * stride, stride)
        for owner, _, _ in pieces(Parameter(name="w", number=number, shape=(64, 64)), 4)
    ]
    assert max(np.bincount(owners)) <= 56


def test_a_share_without_elements_is_compressed_to_nothing() -> None:
    made = Bundle(Terms(compressor=parse_compressor("4bit"), rule=LayerRule(), seed=1), [], {}, rank=0)
    assert made.compress(torch.empty(0), 1, 0, 0.0, ranks=1) == []
    assert made.finish() == []


@pytest.mark.parametrize(
    ("compressor", "shape", "tensors", "ranks", "owners"),
    [
        ("4bit", (1024, 1024), 1, 4, True),
        ("4bit", (1024, 1024), 1, 2, False),  # as many bytes, and more messages
        ("4bit", (64, 64), 1, 4, False),
        ("4bit", (64, 64), 200, 4, False),  # work on each tensor
        ("none", (64, 64), 1, 16, True),
        ("topk:ratio=10", (1024, 1024), 1, 4, False),
        ("2bit", (1024, 1024), 1, 4, False),
    ],
)
def test_owners_are_chosen_where_they_save_bytes(
    compressor: str, shape: tuple[int, ...], tensors: int, ranks: int, owners: bool
) -> None:
    terms = Terms(compressor=parse_compressor(compressor), rule=LayerRule(), seed=0)
    assert decide(terms, [TensorSpec(name="w", shape=shape)] * tensors, ranks)[0] == owners
