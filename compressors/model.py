"""A whole model's gradients: one compressor and one state per tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .base import Compressor, StepContext, TensorSpec, is_model_wide, takes_gpu
from .feedback import ErrorFeedback, FeedbackState, without_feedback
from .kernels import Magnitudes, devices
from .layers import LayerRule
from .ledger import Ledger, Ranges, norm
from .payload import DenseFormat, DensePayload, Payload
from .registry import create, create_bare, wrapping_of
from .wrapping import Wrapping


class NonFiniteGradient(ValueError):
    """A gradient with an infinity or a NaN. `name` says of which tensor. No state was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"gradient of {name!r} has an infinity or a NaN")
        self.name = name


@dataclass(frozen=True, slots=True)
class _Layer:
    """whole: the tensor. spec: the part of it that is compressed, which begins at `start` and has the range
    from `begin` to `end` of the ledger."""

    whole: TensorSpec
    spec: TensorSpec
    start: int
    begin: int
    end: int
    compressor: Compressor


class ModelCompressor:
    """Compresses a model's gradients step by step; `ledger` keeps what must be kept between steps.

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
        Args:
            specs: the model's tensors, in the order in which gradients will be given.
            compressor_spec: `name[:key=value,...]`.
            rule: which tensors it applies to.
            seed: of the job, at least 0. It goes into every step's random numbers, and so does the rank.
            rank: of this worker, at least 0; it may be changed between steps. No two workers of a round may
                have the same.
            bare: keep no residuals and do without clipping and delay: the caller keeps what was not sent.

        Raises:
            SpecError: there is no such compressor.
        """
        make = create_bare if bare else create
        make(compressor_spec)  # a bad spec is refused even if no tensor would use it
        self._wrapping = (None if bare else wrapping_of(compressor_spec)) or Wrapping()
        self._seed = seed
        self.rank = rank
        self._specs = specs
        self._compressors: list[Compressor] = []
        for spec in specs:
            chosen = rule.choose(spec, compressor_spec)
            self._compressors.append(
                make(chosen.partition(":")[0] if bare and chosen != compressor_spec else chosen)
            )
        elements = [spec.elements for spec in specs]
        self.ledger = Ledger(elements, velocity=not bare and self._wrapping.momentum > 0)
        self.divide(None)

    def divide(self, parts: Ranges | None, slices: int = 1) -> None:
        """From now on compress these parts of the tensors: start and end in each, one of `slices`; whole
        tensors if None. Gradients are given whole all the same: clipping and the rule go by whole tensors.

        What the ledger holds of other parts stays there. Momentum and running statistics start anew.
        """
        self._in_parts = parts is not None
        self.ledger.divide(slices)
        self._layers: list[_Layer] = []
        bounds = parts if parts is not None else [(0, spec.elements) for spec in self._specs]
        ranges = self.ledger.ranges(parts)
        places = zip(self._specs, self._compressors, bounds, ranges, strict=True)
        for place, (whole, compressor, (start, stop), (begin, end)) in enumerate(places):
            spec = replace(whole, shape=(stop - start,)) if self._in_parts else whole
            self._layers.append(_Layer(whole, spec, start, begin, end, compressor))
            self.ledger.states[place] = without_feedback(compressor).init(spec)

    @property
    def ranges(self) -> Ranges:
        """Of what `compress` sends, in the ledger."""
        return [(layer.begin, layer.end) for layer in self._layers]

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
        states = self._states(flat)
        payloads: list[Payload] = []
        if ((version if step is None else step) + 1) % self._wrapping.delay:
            self._accumulate(flat, states)
        else:
            rng = np.random.default_rng([self._seed, self.rank, version])
            context = StepContext(samples=samples, version=version, epoch=epoch, rng=rng)
            payloads = self._compressed(flat, states, magnitudes, context)
        self._keep(states)
        return payloads

    def flush(self, gradients: Sequence[torch.Tensor], *, workers: int = 1) -> list[Payload]:
        """These gradients and everything that is owed, of whole tensors, as float32. Nothing is left
        afterwards. For the last push of a worker that leaves."""
        flat, _ = self._prepared(gradients, workers)
        states = self._states(flat)
        self._accumulate(flat, states)
        self._keep(states)
        payloads: list[Payload] = []
        for start, end in self.ledger.ranges():
            values = self.ledger.residual[start:end].cpu().numpy().copy()
            payloads.append(
                DensePayload(format=DenseFormat.FLOAT32, elements=values.size, data=values.view(np.uint8))
            )
        self.ledger.residual.zero_()
        return payloads

    def _accumulate(self, gradients: Sequence[torch.Tensor], states: Sequence[Any]) -> None:
        """Take the gradients into the residual."""
        for layer, gradient, state in zip(self._layers, gradients, states, strict=True):
            if isinstance(layer.compressor, ErrorFeedback):
                layer.compressor.accumulate(gradient, state)
            else:  # `_prepared` has taken out what was there
                self.ledger.residual[layer.begin : layer.end].copy_(gradient)

    def _states(self, gradients: Sequence[torch.Tensor]) -> list[Any]:
        """What each compressor works on: views of the ledger, copies only where it works on the host and the
        ledger lies on a GPU."""
        found: list[Any] = []
        for layer, gradient, inner in zip(self._layers, gradients, self.ledger.states, strict=True):
            if not isinstance(layer.compressor, ErrorFeedback):
                found.append(inner)
                continue
            residual = self.ledger.residual[layer.begin : layer.end].to(gradient.device)
            velocity = self.ledger.velocity
            if velocity is not None:
                velocity = velocity[layer.begin : layer.end].to(gradient.device)
            found.append(FeedbackState(residual=residual, velocity=velocity, inner=inner))
        return found

    def _keep(self, states: Sequence[Any]) -> None:
        """Note what the compressors leave."""
        for place, (layer, state) in enumerate(zip(self._layers, states, strict=True)):
            if not isinstance(state, FeedbackState):
                self.ledger.states[place] = state
                continue
            self.ledger.states[place] = state.inner
            if state.residual.device != self.ledger.residual.device:
                self.ledger.residual[layer.begin : layer.end].copy_(state.residual)
                if state.velocity is not None and self.ledger.velocity is not None:
                    self.ledger.velocity[layer.begin : layer.end].copy_(state.velocity)

    def _prepared(
        self, gradients: Sequence[torch.Tensor], workers: int
    ) -> tuple[list[torch.Tensor], list[Magnitudes]]:
        """Checked, where they are compressed, and clipped. Nothing is changed if one is not finite."""
        if len(gradients) != len(self._layers):
            raise ValueError(f"expected {len(self._layers)} gradients, got {len(gradients)}")
        flat = [_taken(layer, gradient) for layer, gradient in zip(self._layers, gradients, strict=True)]
        for gradient in flat:
            if gradient.device.type != "cpu":  # where one is compressed there, the ledger lies there
                self.ledger.to(gradient.device)
        if self._in_parts:  # the workers that compress the other parts must come to the same conclusion
            for layer, gradient in zip(self._layers, gradients, strict=True):
                if not devices.finite(gradient.detach().reshape(-1)):
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
            if isinstance(layer.compressor, ErrorFeedback):
                continue
            owed = self.ledger.take(layer.begin, layer.end)
            if owed is not None:
                owed = owed.to(flat[place].device)
                flat[place] = devices.saturate(flat[place] + owed)
                magnitudes[place] = devices.magnitudes(flat[place])
        return flat, magnitudes

    def _compressed(
        self, flat: list[torch.Tensor], states: list[Any], magnitudes: list[Magnitudes], context: StepContext
    ) -> list[Payload]:
        shared = np.random.SeedSequence([self._seed, context.version]).generate_state(len(flat), np.uint64)
        contexts = [
            replace(context, shared_seed=int(seed), magnitudes=found)
            for seed, found in zip(shared, magnitudes, strict=True)
        ]
        planned = [
            place
            for place, layer in enumerate(self._layers)
            if is_model_wide(without_feedback(layer.compressor))
        ]
        if planned:
            self._plan(planned, flat, states, contexts)
        payloads: list[Payload] = []
        for place, (layer, gradient, context) in enumerate(zip(self._layers, flat, contexts, strict=True)):
            if place in planned and isinstance(layer.compressor, ErrorFeedback):
                payload, states[place] = layer.compressor.send(states[place], context)
            else:
                payload, states[place] = layer.compressor.compress(gradient, states[place], context)
            payloads.append(payload)
        return payloads

    def _plan(
        self, places: list[int], gradients: list[torch.Tensor], states: list[Any], contexts: list[StepContext]
    ) -> None:
        """Let the compressor see what all tensors have to send, and note in the contexts what it allots."""
        totals: list[torch.Tensor] = []
        for place in places:
            layer, gradient = self._layers[place], gradients[place]
            if isinstance(layer.compressor, ErrorFeedback):
                added = layer.compressor.accumulate(gradient, states[place])
                if added is not gradient:  # the velocity
                    contexts[place] = replace(contexts[place], magnitudes=devices.magnitudes(added))
                gradient = states[place].residual
            totals.append(gradient)
        planner = without_feedback(self._layers[places[0]].compressor)
        assert is_model_wide(planner)
        specs = [self._layers[place].spec for place in places]
        for place, keep in zip(places, planner.plan(totals, specs, contexts[places[0]]), strict=True):
            contexts[place] = replace(contexts[place], keep=keep)

    def _clipped(
        self, flat: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], workers: int
    ) -> list[torch.Tensor]:
        """Scaled so that the whole gradients have at most the norm that each of so many workers may have."""
        length = math.hypot(*map(norm, whole if self._in_parts else flat))
        largest = self._wrapping.clip / math.sqrt(workers)
        factor = largest / length if length > largest else 1.0
        return [gradient * factor for gradient in flat]


def model_wide(compressor_spec: str) -> bool:
    """Whether the compressor divides what is sent among all tensors, and wants to know their FLOPs for it."""
    return is_model_wide(without_feedback(create(compressor_spec)))


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
    return gradient.contiguous()
