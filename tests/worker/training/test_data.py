"""The checksum by which workers with other data are found."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gradwire.worker.training.data import batch_checksum, data_checksum
from gradwire.worker.training.sharding import Indices

GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(50, 3, 8, 8, generator=GENERATOR)
LABELS = torch.randint(0, 10, (50,), generator=GENERATOR)


class Pair(NamedTuple):
    inputs: torch.Tensor
    label: int


OTHER: list[Callable[[Indices], Any]] = [
    lambda i: (INPUTS[i] * 1.01, LABELS[i]),
    lambda i: (INPUTS[i].flip(-1), LABELS[i]),
    lambda i: (INPUTS[i][:, :, :4], LABELS[i]),
    lambda i: (INPUTS[i], LABELS[i] + 1),
    lambda i: (INPUTS[i], LABELS[i].int()),
    lambda i: (INPUTS[49 - i], LABELS[49 - i]),
    lambda i: [INPUTS[i]],
]

RANDOM: list[Callable[[Indices], Any]] = [
    lambda i: INPUTS[i] + torch.rand(1),
    lambda i: INPUTS[i].numpy() + np.random.rand(),
    lambda i: {"inputs": INPUTS[i], "scale": random.random()},
]

NESTS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: Pair(x, 1),
    lambda x: UserDict(inputs=x, labels=[b"a", "b"]),
    lambda x: {"inputs": x.numpy(), "objects": np.array([object()])},
    lambda x: (x * float("nan"), x.to(torch.bfloat16), x.to_sparse(), x * 0, x[:0]),
]


def both(indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
    return INPUTS[indices], LABELS[indices]


def test_the_same_data_have_the_same_checksum_also_where_last_bits_differ() -> None:
    found = data_checksum(both, 50)
    assert found != 0
    assert data_checksum(both, 50) == found
    assert data_checksum(lambda i: (INPUTS[i] * (1 + 1e-7), LABELS[i]), 50) == found


@pytest.mark.parametrize("other", OTHER)
def test_other_data_have_another_one(other: Callable[[Indices], Any]) -> None:
    assert data_checksum(other, 50) not in (0, data_checksum(both, 50))


@pytest.mark.parametrize("samples", [1, 2, 3, 1000])
def test_any_number_of_samples_will_do(samples: int) -> None:
    seen: list[int] = []

    def batch(indices: Indices) -> str:
        seen.extend(indices.tolist())
        return "text"

    assert data_checksum(batch, samples)
    assert min(seen) == 0
    assert max(seen) == samples - 1


@pytest.mark.parametrize("batch", RANDOM)
def test_what_is_drawn_at_random_cannot_be_compared(batch: Callable[[Indices], Any]) -> None:
    assert data_checksum(batch, 50) == 0


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    def draw(indices: Indices) -> float:
        return float(torch.rand(1)) + float(np.random.rand()) + random.random()

    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(1)), float(np.random.rand()), random.random()

    def seed() -> None:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)

    seed()
    expected = drawn()
    seed()
    data_checksum(draw, 50)
    assert drawn() == expected


@pytest.mark.parametrize("nest", NESTS)
def test_nests_of_any_kind(nest: Callable[[torch.Tensor], Any]) -> None:
    found = data_checksum(lambda i: nest(INPUTS[i]), 50)
    assert found not in (0, data_checksum(lambda i: nest(INPUTS[i].repeat(1, 2, 1, 1)), 50))


@pytest.mark.parametrize("draw", [lambda: torch.randn(1), lambda: np.random.rand(), lambda: random.random()])
def test_a_bare_number_is_the_same_batch_where_the_script_would_draw_the_same(
    draw: Callable[[], Any],
) -> None:
    """Such as the number of an episode, in a script that seeds by its rank."""
    found, tensors = batch_checksum(3), batch_checksum(INPUTS)
    assert batch_checksum(3) == found != batch_checksum(4)
    draw()
    assert batch_checksum(3) != found
    assert batch_checksum(INPUTS) == tensors


def test_batches_are_told_apart_by_the_first_values_of_each_tensor() -> None:
    """Also of batches that hold other things, whose checksum is of little use but can be taken."""
    inputs, targets = torch.arange(6000.0), torch.arange(6)
    assert batch_checksum((inputs, targets)) == batch_checksum((inputs.clone(), targets.clone()))
    assert batch_checksum((inputs, targets)) != batch_checksum((inputs.flip(0), targets))
    assert batch_checksum({"x": inputs, "y": targets}) != batch_checksum({"x": inputs, "y": targets.flip(0)})
    assert batch_checksum((targets.numpy(), "text", None, object(), inputs.to_sparse()))
