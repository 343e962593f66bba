"""Operations of a layer's forward pass: two for each weight and each position that it is applied at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire.worker.tasks.digits import digits
from gradwire.worker.tasks.flops import layer_flops


def test_linear_and_convolution_layers() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, kernel_size=3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 10)
    )
    flops = layer_flops(model, lambda: model(torch.zeros(1, 1, 8, 8)))
    assert flops == {"0.weight": 2 * 4 * 9 * 64, "3.weight": 2 * 256 * 10}


def test_a_grouped_and_a_transposed_convolution() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 8, kernel_size=3, groups=2), nn.ConvTranspose1d(8, 2, kernel_size=4, stride=2)
    )
    flops = layer_flops(model, lambda: model(torch.zeros(1, 4, 12)))
    assert flops == {"0.weight": 2 * (8 * 2 * 3) * 10, "1.weight": 2 * (8 * 2 * 4) * 10}


def test_a_layer_that_is_used_twice_counts_twice_and_one_that_is_not_reached_not_at_all() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(5, 5)
            self.unused = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.used(self.used(x))
            return output

    model = Shared()
    assert layer_flops(model, lambda: model(torch.zeros(1, 5))) == {"used.weight": 100.0}


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layer_flops(model, lambda: model(torch.ones(1, 3)))
    assert model.training == training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ZeroDivisionError):
        layer_flops(model, lambda: 1 / 0)
    assert model.training == training


def test_the_names_are_those_of_the_parameters() -> None:
    model = digits("cnn").model()
    flops = layer_flops(model, lambda: model(torch.zeros(1, 64)))
    weights = {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}
    assert set(flops) == weights
