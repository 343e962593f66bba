"""Floating-point operations of each layer's forward pass, per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Transposed convolutions apply each weight at every position of their input, other layers of their output.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def layer_flops(model: nn.Module, run: Callable[[], object]) -> dict[str, float]:
    """Return the floating-point operations of linear and convolution layers by name of their weight.

    Each weight counts two operations for each position of the output (of the input for transposed
    convolutions), at each use. Other layers, and layers that the pass does not reach, are left out.

    Args:
        model: in evaluation mode during the pass, with gradients off.
        run: runs one forward pass over one sample.
    """
    flops: dict[str, float] = {}

    def count(name: str, layer: Any) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            spread = inputs[0] if isinstance(module, _TRANSPOSED) else output
            channels = layer.weight.shape[0]
            positions = spread.numel() / channels
            key = f"{name}.weight" if name else "weight"
            flops[key] = flops.get(key, 0.0) + 2.0 * layer.weight.numel() * positions

        return hook

    modules: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    layers = {name: module for name, module in modules.items() if isinstance(module, _LAYERS)}
    hooks = [module.register_forward_hook(count(name, module)) for name, module in layers.items()]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            run()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return flops
