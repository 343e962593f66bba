"""A whole model's gradients: one compressor and one state per tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from .base import Compressor, ModelWide, StepContext, TensorSpec, takes_gpu
from .feedback import ErrorFeedback, FeedbackState
from .kernels import FLOAT32_MAX, Magnitudes, devices
from .layers import LayerRule
from .payload import DenseFormat, DensePayload, Payload
from .reduction import add_update
from .registry import create, create_bare, wrapping_of
from .wrapping import Wrapping

_LARGEST = float(FLOAT32_MAX)


class NonFiniteGradient(ValueError):
    """A gradient with an infinity or a NaN. `name` says of which tensor. No state was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"gradient of {name!r} has an infinity or a NaN")
        self.name = name


@dataclass(slots=True)
class _Layer:
    """returned: what was refused and has no residual to go into; it is added to the next gradient."""

    spec: TensorSpec
    compressor: Compressor
    state: Any
    returned: torch.Tensor | None = None


class ModelCompressor:
    """Compresses a model's gradients step by step and keeps what must be kept between steps.

    Not for use by several threads at once. Two of them made alike and fed alike produce the same bits.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        compressor_spec: str,
        rule: LayerRule,
        seed: int,
        rank: int,
        *,
        bare: bool = False,
    ) -> None:
        """
        specs: the model's tensors, in the order in which gradients will be given.
        compressor_spec: `name[:key=value,...]`; raises `SpecError` if there is no such compressor.
        rule: which tensors it applies to.
        seed, rank: of the job and of this worker, at least 0; both go into every step's random numbers. No
            two workers of a round may have the same rank; it may be changed between steps.
        bare: keep no residuals and do without clipping and delay: the caller sees to what was not sent.
        """
        make = create_bare if bare else create
        make(compressor_spec)  # a bad spec is refused even if no tensor would use it
        self._wrapping = (None if bare else wrapping_of(compressor_spec)) or Wrapping()
        self._seed = seed
        self.rank = rank
        self._layers: list[_Layer] = []
        for spec in specs:
            chosen = rule.choose(spec, compressor_spec)
            compressor = make(chosen.partition(":")[0] if bare and chosen != compressor_spec else chosen)
            self._layers.append(_Layer(spec, compressor, compressor.init(spec)))

    def compress(
        self,
        gradients: Sequence[torch.Tensor],
        samples: int,
        *,
        version: int,
        step: int | None = None,
        epoch: float = 0.0,
        workers: int = 1,
    ) -> list[Payload]:
        """Compress one step's mean gradients over `samples` samples (at least 1).

        version: of the parameters they were computed at. step: what a delay counts, the version if not given.
        epoch: passes over the training samples so far.
        workers: that take part in the round, at least 1.
        A gradient that lies on a GPU is compressed there if its compressor can, otherwise on the host.
        Returns payloads in the order of the specs; none at all at a version that a delay passes over.

        Raises:
            NonFiniteGradient: nothing was changed; the next step goes on as if this one had not been.
            ValueError: gradients of other number, shape or type than the specs say.
        """
        if samples < 1:
            raise ValueError(f"samples: expected at least 1, got {samples}")
        flat, magnitudes = self._prepared(gradients, workers)
        if ((version if step is None else step) + 1) % self._wrapping.delay:
            for layer, gradient in zip(self._layers, flat, strict=True):
                assert isinstance(layer.compressor, ErrorFeedback)  # `Wrapping` sees to that
                layer.compressor.accumulate(gradient, layer.state)
            return []
        return self._compressed(flat, magnitudes, samples, version, epoch)

    def flush(self, gradients: Sequence[torch.Tensor], *, workers: int = 1) -> list[Payload]:
        """As `compress`, but whole, as float32: these gradients and everything that is still to be sent.
        Nothing is left afterwards. For the last push of a worker that leaves."""
        flat, _ = self._prepared(gradients, workers)
        payloads: list[Payload] = []
        for layer, gradient in zip(self._layers, flat, strict=True):
            if isinstance(layer.compressor, ErrorFeedback):
                layer.compressor.accumulate(gradient, layer.state)
                gradient = layer.state.residual
            values = gradient.cpu().numpy().copy()
            if isinstance(layer.state, FeedbackState):
                layer.state.residual.zero_()
            payloads.append(
                DensePayload(format=DenseFormat.FLOAT32, elements=values.size, data=values.view(np.uint8))
            )
        return payloads

    def _prepared(
        self, gradients: Sequence[torch.Tensor], workers: int
    ) -> tuple[list[torch.Tensor], list[Magnitudes]]:
        """Checked, where they are compressed, and clipped. Nothing is changed if one is not finite."""
        if len(gradients) != len(self._layers):
            raise ValueError(f"expected {len(self._layers)} gradients, got {len(gradients)}")
        pairs = zip(self._layers, gradients, strict=True)
        flat = [_taken(layer, gradient) for layer, gradient in pairs]
        # One read pass serves twice: as the check for infinities and NaNs, and for the magnitudes by which
        # thresholds are chosen. It must be over before the first tensor's state changes.
        magnitudes = [devices.magnitudes(gradient) for gradient in flat]
        for layer, found in zip(self._layers, magnitudes, strict=True):
            if not math.isfinite(found.total):
                raise NonFiniteGradient(layer.spec.name)
        if self._wrapping.clip:
            flat = _clipped(flat, self._wrapping.clip / math.sqrt(workers))
            magnitudes = [devices.magnitudes(gradient) for gradient in flat]
        for place, layer in enumerate(self._layers):
            if layer.returned is not None:
                flat[place] = (flat[place] + layer.returned.to(flat[place].device)).clamp_(
                    -_LARGEST, _LARGEST
                )
                magnitudes[place] = devices.magnitudes(flat[place])
                layer.returned = None
        return flat, magnitudes

    def _compressed(
        self,
        flat: Sequence[torch.Tensor],
        magnitudes: Sequence[Magnitudes],
        samples: int,
        version: int,
        epoch: float,
    ) -> list[Payload]:
        rng = np.random.default_rng([self._seed, self.rank, version])
        shared = np.random.SeedSequence([self._seed, version]).generate_state(len(flat), np.uint64)
        contexts = [
            StepContext(
                samples=samples,
                version=version,
                epoch=epoch,
                rng=rng,
                shared_seed=int(shared_seed),
                magnitudes=found,
            )
            for found, shared_seed in zip(magnitudes, shared, strict=True)
        ]
        planned = [place for place, layer in enumerate(self._layers) if isinstance(_inner(layer), ModelWide)]
        if planned:
            self._plan(planned, flat, contexts)
        payloads: list[Payload] = []
        for place, (layer, gradient, context) in enumerate(zip(self._layers, flat, contexts, strict=True)):
            if place in planned and isinstance(layer.compressor, ErrorFeedback):
                payload, layer.state = layer.compressor.send(layer.state, context)
            else:
                payload, layer.state = layer.compressor.compress(gradient, layer.state, context)
            payloads.append(payload)
        return payloads

    def _plan(
        self, places: Sequence[int], gradients: Sequence[torch.Tensor], contexts: list[StepContext]
    ) -> None:
        """Let the compressor see what all tensors have to send, and note in the contexts what it allots."""
        totals: list[torch.Tensor] = []
        for place in places:
            layer, gradient = self._layers[place], gradients[place]
            if isinstance(layer.compressor, ErrorFeedback):
                added = layer.compressor.accumulate(gradient, layer.state)
                if added is not gradient:  # the velocity
                    contexts[place] = replace(contexts[place], magnitudes=devices.magnitudes(added))
                gradient = layer.state.residual
            totals.append(gradient)
        planner = _inner(self._layers[places[0]])
        assert isinstance(planner, ModelWide)
        specs = [self._layers[place].spec for place in places]
        for place, keep in zip(places, planner.plan(totals, specs, contexts[places[0]]), strict=True):
            contexts[place] = replace(contexts[place], keep=keep)

    def restore(self, payloads: Sequence[Payload]) -> None:
        """Take back the payloads of a push that the server refused: what they carried joins the residuals,
        or without error feedback the next gradient, and is sent with the next step."""
        for layer, payload in zip(self._layers, payloads, strict=True):
            if isinstance(layer.state, FeedbackState):
                layer.state.restore(payload)
                continue
            if layer.returned is None:
                layer.returned = torch.zeros(layer.spec.elements)
            add_update(payload, layer.returned)
            layer.returned.clamp_(-_LARGEST, _LARGEST)

    def residual_norm(self) -> float:
        """Euclidean norm of everything that is still to be sent, over all tensors."""
        states = [layer.state for layer in self._layers if isinstance(layer.state, FeedbackState)]
        returned = [layer.returned for layer in self._layers if layer.returned is not None]
        return math.hypot(*(state.residual_norm() for state in states), *map(_norm, returned))


def model_wide(compressor_spec: str) -> bool:
    """Whether the compressor divides what is sent among all tensors, and wants to know their FLOPs for it."""
    compressor = create(compressor_spec)
    return isinstance(getattr(compressor, "compressor", compressor), ModelWide)


def _inner(layer: _Layer) -> Compressor:
    return layer.compressor.compressor if isinstance(layer.compressor, ErrorFeedback) else layer.compressor


def _norm(tensor: torch.Tensor) -> float:
    return float(cast(torch.Tensor, torch.linalg.vector_norm(tensor, dtype=torch.float64)))


def _clipped(gradients: Sequence[torch.Tensor], largest_norm: float) -> list[torch.Tensor]:
    """Scaled to at most this Euclidean norm over all of them together."""
    norm = math.hypot(*map(_norm, gradients))
    factor = largest_norm / norm if norm > largest_norm else 1.0
    return [gradient * factor for gradient in gradients]


def _taken(layer: _Layer, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` as shape (elements,), contiguous, where its compressor takes it; a view where possible."""
    spec = layer.spec
    if gradient.dtype != torch.float32:
        raise ValueError(f"gradient of {spec.name!r}: expected torch.float32, got {gradient.dtype}")
    if gradient.numel() != spec.elements:
        got = f"shape {tuple(gradient.shape)}"
        raise ValueError(f"gradient of {spec.name!r}: expected shape {spec.shape}, got {got}")
    if not (takes_gpu(layer.compressor) and devices.can_stay(gradient)):
        gradient = gradient.cpu()
    if isinstance(layer.state, FeedbackState):
        layer.state = layer.state.to(gradient.device)
    return gradient.detach().reshape(-1).contiguous()
