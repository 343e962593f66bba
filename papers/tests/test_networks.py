"""The networks have the tensors of the layer tables, and gc-bench step --real computes with them."""

from __future__ import annotations

import pytest
import torch

from gradwire.planning import tensors
from gradwire_papers.networks import NETWORKS, noise


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_tensors_of_its_layer_table(name: str) -> None:
    found = NETWORKS[name].build()
    assert [tuple(each.shape) for each in found.parameters()] == [each.shape for each in tensors(name)]


def test_noise_is_the_same_at_every_call() -> None:
    assert all(map(torch.equal, noise("resnet20", 2), noise("resnet20", 2)))
