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
from .indices import decode_indices
from .kernels import FLOAT32_MAX, Magnitudes, devices
from .layers import LayerRule
from .payload import DenseFormat, DensePayload, Payload, SparsePayload
from .reduction import decode
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
    """whole: the tensor; spec: the part of it, from `start`, that is compressed. returned: what was refused
    and has no residual to go into; it is added to the next gradient."""

    whole: TensorSpec
    start: int
    spec: TensorSpec
    compressor: Compressor
    state: Any
    returned: torch.Tensor | None = None

    def give_back(self, values: torch.Tensor) -> None:
        """To the next gradient."""
        if self.returned is None:
            self.returned = torch.zeros(self.spec.elements)
        self.returned.add_(values).clamp_(-_LARGEST, _LARGEST)


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
        parts: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """
        specs: the model's tensors, in the order in which gradients will be given.
        compressor_spec: `name[:key=value,...]`; raises `SpecError` if there is no such compressor.
        rule: which tensors it applies to.
        seed, rank: of the job and of this worker, at least 0; both go into every step's random numbers. No
            two workers of a round may have the same rank; it may be changed between steps.
        bare: keep no residuals and do without clipping and delay: the caller sees to what was not sent.
        parts: start and end, in each tensor, of the elements that are compressed; all of them if not given.
            Gradients are given whole all the same: clipping and the rule go by the whole tensors.
        """
        make = create_bare if bare else create
        make(compressor_spec)  # a bad spec is refused even if no tensor would use it
        self._wrapping = (None if bare else wrapping_of(compressor_spec)) or Wrapping()
        self._seed = seed
        self.rank = rank
        self._layers: list[_Layer] = []
        self._in_parts = parts is not None
        bounds = parts if parts is not None else [(0, spec.elements) for spec in specs]
        for whole, (start, end) in zip(specs, bounds, strict=True):
            spec = whole if parts is None else replace(whole, shape=(end - start,))
            chosen = rule.choose(whole, compressor_spec)
            compressor = make(chosen.partition(":")[0] if bare and chosen != compressor_spec else chosen)
            self._layers.append(_Layer(whole, start, spec, compressor, compressor.init(spec)))

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
        flat = [_taken(layer, gradient) for layer, gradient in zip(self._layers, gradients, strict=True)]
        if self._in_parts:  # whoever compresses the other parts must come to the same conclusion
            for layer, gradient in zip(self._layers, gradients, strict=True):
                if not math.isfinite(float(gradient.sum(dtype=torch.float64))):
                    raise NonFiniteGradient(layer.whole.name)
        # One read pass serves twice: as the check for infinities and NaNs, and for the magnitudes by which
        # thresholds are chosen. It must be over before the first tensor's state changes.
        magnitudes = [devices.magnitudes(gradient) for gradient in flat]
        for layer, found in zip(self._layers, magnitudes, strict=True):
            if not math.isfinite(found.total):
                raise NonFiniteGradient(layer.spec.name)
        if self._wrapping.clip:
            flat = self._clipped(flat, gradients, workers)
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
            else:
                layer.give_back(torch.from_numpy(decode(payload)))

    def hold(self, values: Sequence[torch.Tensor]) -> None:
        """Take in what is still to be sent, flat: into the residuals, or without error feedback the next
        gradient."""
        for layer, each in zip(self._layers, values, strict=True):
            if isinstance(layer.state, FeedbackState):
                layer.state.residual.add_(each.to(layer.state.residual.device)).clamp_(-_LARGEST, _LARGEST)
            else:
                layer.give_back(each)

    def held(self) -> list[torch.Tensor]:
        """All that is still to be sent, of each tensor, flat; copies, on the host."""
        return [
            layer.state.residual.cpu().clone()
            if isinstance(layer.state, FeedbackState)
            else _values_or_zeros(layer.returned, layer.spec)
            for layer in self._layers
        ]

    def returned(self) -> list[torch.Tensor | None]:
        """What the next gradient is added to because it was refused; not to be written to."""
        return [layer.returned for layer in self._layers]

    def undone(
        self,
        payloads: Sequence[Payload],
        gradients: Sequence[torch.Tensor],
        returned: Sequence[torch.Tensor | None],
        *,
        workers: int = 1,
    ) -> list[torch.Tensor]:
        """What `hold` has to take in to undo a step: then what is still to be sent is what it was before the
        gradients came, up to rounding, as if they had been 0. The velocity forgets them, too, but where they
        have been sent it is 0 already.

        payloads: that came of the step, none where a delay passed over it. gradients, workers: as given.
        returned: before the step.
        """
        flat = [_taken(layer, gradient) for layer, gradient in zip(self._layers, gradients, strict=True)]
        if self._wrapping.clip:
            flat = self._clipped(flat, gradients, workers)
        missing: list[torch.Tensor] = []
        for place, (layer, gradient) in enumerate(zip(self._layers, flat, strict=True)):
            payload = payloads[place] if payloads else None
            if not isinstance(layer.state, FeedbackState):
                missing.append(_values_or_zeros(returned[place], layer.spec))
                continue
            added = gradient.cpu().clone()
            missing.append(-added if payload is None else torch.from_numpy(decode(payload)).sub_(added))
            if layer.state.velocity is not None:
                if isinstance(payload, SparsePayload):
                    added[torch.from_numpy(decode_indices(payload).astype(np.int64))] = 0.0
                layer.state.velocity.sub_(added.to(layer.state.velocity.device))
        return missing

    def _clipped(
        self, flat: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], workers: int
    ) -> list[torch.Tensor]:
        """Scaled so that the whole gradients have at most the norm that each of so many workers may have."""
        norm = math.hypot(*map(_norm, whole if self._in_parts else flat))
        largest = self._wrapping.clip / math.sqrt(workers)
        factor = largest / norm if norm > largest else 1.0
        return [gradient * factor for gradient in flat]

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


def _values_or_zeros(values: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.elements) if values is None else values.clone()


def _taken(layer: _Layer, gradient: torch.Tensor) -> torch.Tensor:
    """The part of `gradient` as shape (elements,), contiguous, where its compressor takes it; a view where
    possible."""
    spec = layer.whole
    if gradient.dtype != torch.float32:
        raise ValueError(f"gradient of {spec.name!r}: expected torch.float32, got {gradient.dtype}")
    if gradient.numel() != spec.elements:
        got = f"shape {tuple(gradient.shape)}"
        raise ValueError(f"gradient of {spec.name!r}: expected shape {spec.shape}, got {got}")
    gradient = gradient.detach().reshape(-1)[layer.start : layer.start + layer.spec.elements]
    if not (takes_gpu(layer.compressor) and devices.can_stay(gradient)):
        gradient = gradient.cpu()
    if isinstance(layer.state, FeedbackState):
        layer.state = layer.state.to(gradient.device)
    return gradient.contiguous()
