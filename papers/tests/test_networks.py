"""The networks have the tensors of the layer tables."""

from __future__ import annotations

import pytest

from gradwire.planning import tensors
from gradwire_papers.networks import NETWORKS


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_tensors_of_its_layer_table(name: str) -> None:
    found = NETWORKS[name].build()
    assert [tuple(each.shape) for each in found.parameters()] == [each.shape for each in tensors(name)]
