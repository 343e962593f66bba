"""A whole model's gradients: one compressor and one state per tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import kernels
from .base import Compressor, StepContext, TensorSpec
from .feedback import FeedbackState
from .layers import LayerRule
from .payload import Payload
from .registry import create


class NonFiniteGradient(ValueError):
    """A gradient with an infinity or a NaN. `name` says of which tensor. No state was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"gradient of {name!r} has an infinity or a NaN")
        self.name = name


@dataclass(slots=True)
class _Layer:
    spec: TensorSpec
    compressor: Compressor
    state: Any


class ModelCompressor:
    """Compresses a model's gradients step by step and keeps what must be kept between steps.

    Not for use by several threads at once. Two of them made alike and fed alike produce the same bits.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], compressor_spec: str, rule: LayerRule, seed: int, rank: int
    ) -> None:
        """
        specs: the model's tensors, in the order in which gradients will be given.
        compressor_spec: `name[:key=value,...]`; raises `SpecError` if there is no such compressor.
        rule: which tensors it applies to.
        seed, rank: of the job and of this worker, at least 0; both go into every step's random numbers.
        """
        create(compressor_spec)  # a bad spec is refused even if no tensor would use it
        self._seed = seed
        self._rank = rank
        self._step = 0
        self._layers: list[_Layer] = []
        for spec in specs:
            compressor = create(rule.choose(spec, compressor_spec))
            self._layers.append(_Layer(spec, compressor, compressor.init(spec)))

    def compress(self, gradients: Sequence[torch.Tensor], samples: int) -> list[Payload]:
        """Compress one step's mean gradients, in the order of the specs.

        gradients: float32 on the CPU, as many elements each as its spec says; never written to.
        samples: how many samples the mean was taken over, at least 1.
        Raises `NonFiniteGradient` or `ValueError` before any state is touched.
        """
        if samples < 1:
            raise ValueError(f"samples: expected at least 1, got {samples}")
        if len(gradients) != len(self._layers):
            raise ValueError(f"expected {len(self._layers)} gradients, got {len(gradients)}")
        pairs = zip(self._layers, gradients, strict=True)
        flat = [_flatten(layer.spec, gradient) for layer, gradient in pairs]
        # One read pass serves twice: as the check for infinities and NaNs, and for the magnitudes by which
        # thresholds are chosen. It must be over before the first tensor's state changes.
        magnitudes = [kernels.magnitudes(gradient.numpy()) for gradient in flat]
        for layer, found in zip(self._layers, magnitudes, strict=True):
            if not math.isfinite(found.total):
                raise NonFiniteGradient(layer.spec.name)
        rng = np.random.default_rng([self._seed, self._rank, self._step])
        payloads: list[Payload] = []
        for layer, gradient, found in zip(self._layers, flat, magnitudes, strict=True):
            context = StepContext(samples=samples, step=self._step, rng=rng, magnitudes=found)
            payload, layer.state = layer.compressor.compress(gradient, layer.state, context)
            payloads.append(payload)
        self._step += 1
        return payloads

    def restore(self, payloads: Sequence[Payload]) -> None:
        """Take back the payloads of a push that the server refused: what they carried joins the residuals
        and is sent with the next step.

        A tensor without error feedback has nowhere to keep it: for `none`, and with `feedback=off`, the
        refused gradient is lost, as it would be in a step that was skipped.
        """
        for layer, payload in zip(self._layers, payloads, strict=True):
            if isinstance(layer.state, FeedbackState):
                layer.state.restore(payload)

    def residual_norm(self) -> float:
        """Euclidean norm of everything that is still to be sent, over all tensors; 0 without feedback."""
        states = [layer.state for layer in self._layers if isinstance(layer.state, FeedbackState)]
        return math.hypot(*(state.residual_norm() for state in states))


def _flatten(spec: TensorSpec, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` as shape (elements,), contiguous; a view where possible."""
    if gradient.dtype != torch.float32 or gradient.device.type != "cpu":
        got = f"{gradient.dtype} on {gradient.device}"
        raise ValueError(f"gradient of {spec.name!r}: expected torch.float32 on cpu, got {got}")
    if gradient.numel() != spec.elements:
        got = f"shape {tuple(gradient.shape)}"
        raise ValueError(f"gradient of {spec.name!r}: expected shape {spec.shape}, got {got}")
    return gradient.detach().reshape(-1).contiguous()
