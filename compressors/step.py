"""One step of a `ModelCompressor`: gradients arrive in any order, and a part is complete with its last
gradient.

A step turns gradients into payloads, and writes the unsent rest to the *draft*, the ledger's second buffer.
The life of a gradient, in the order of this file:

    add:          the gradient is stored and checked. With the other gradients of its unit it is searched
                  for spikes.
    _prepare:     all gradients are clipped, and a budget is divided among them. Only if an option requires
                  that, which also delays compression until all gradients are there.
    _compressed:  once all gradients of a unit are there, the unit is compressed. Runs of neighbours take one
                  call where possible (`_blocks`, `_elements`, `_chosen`), others one per tensor (`_tensor`).
    commit:       the draft replaces the ledger's residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from ..common.parts import Unit
from .base import Choosing, InBlocks, ModelWide, Neighbours, NonFiniteGradient, Random, StepContext
from .cutting import cut, join
from .dense import dense_payload
from .feedback import ErrorFeedback, without_feedback
from .kernels import Magnitudes, devices
from .ledger import Before, Ranges, norm
from .merging import compress_together, shares
from .payload import AbsentPayload, DenseFormat, DensePayload, Float64, Int64, Payload
from .runs import Run, checks_alone, spanning, split_runs
from .spikes import DUE, LIMIT, Spike, judge
from .tensors import LOSSLESS, ModelTensors
from .terms import PushTerms


class Step:
    """One step of a `ModelCompressor`, made by its `begin`: each gradient is added once, then the step is
    committed.

    The ledger does not change before `commit`. To abandon a step, simply drop it.

    Attributes:
        plan: plan that the step follows.
        sends: True if the step produces payloads; False at a version at which `delay` sends nothing.
        sent: payloads of each part that is complete, by number of the part.
        spikes: gradients that are far larger than usual, in the order in which their units were complete.
    """

    def __init__(self, model: ModelTensors, terms: PushTerms) -> None:
        self._model, self._ledger, self.plan = model, model.ledger, model.plan
        self._terms, self._wanted, self._flush = terms, terms.wanted, terms.flush
        self._measured = terms.measured and not terms.flush
        step = terms.version if terms.step is None else terms.step
        self.sends = terms.flush or (step + 1) % model.wrapping.delay == 0
        self.sent: dict[int, list[Payload]] = {}
        self.spikes: list[Spike] = []
        # Number of missing gradients of each unit.
        self._missing = [unit.last - unit.first for unit in self.plan.units]
        self._units_left = len(self.plan.units)
        self._compressed_units: set[int] = set()
        # By tensor, as they are to be after the step: the state of its compressor, and the statistics by
        # which spikes are found (`spikes.ROWS`).
        self._states = list(model.ledger.states)
        self._usual = model.ledger.usual.copy()
        self._absent: set[int] = set()  # tensors without a gradient
        self._sent_whole: set[int] = set()  # tensors that are sent as float32, with their residual
        # Clipping, and budgets for the whole model, need all gradients before any is compressed.
        self._whole = bool(model.wrapping.clip or (model.planned and not terms.flush))
        # True if the ledger holds a residual or may hold one later. The draft is then written in full.
        self._with_residual = any(model.feedback) or terms.flush or not model.ledger.unused
        self._gradients: dict[int, torch.Tensor] = {}
        self._magnitudes: dict[int, Magnitudes] = {}
        self._keep: dict[int, int] = {}
        self._in_runs = self.sends and not self._whole and not terms.flush

    def add(self, index: int, gradient: torch.Tensor | None) -> dict[int, list[Payload]]:
        """Add the gradient of tensor `index`; return the payloads of the parts that it completes.

        Args:
            index: index of the tensor in manifest order; each is added once.
            gradient: mean over the samples, float32. It must not be written to until its part is sent. None
                if the loss does not depend on the tensor: nothing but its absence is sent, and its residual
                stays.

        Returns:
            Payloads by number of the part; those of a part lie end to end over its elements.

        Raises:
            NonFiniteGradient: the gradient contains an infinity or a NaN. The step can only be abandoned.
            ValueError: shape or type differ from the tensor's spec.
        """
        assert index not in self._gradients, "each gradient is added once"
        assert index not in self._absent, "each gradient is added once"
        if gradient is None:
            self._absent.add(index)
        else:
            self._gradients[index] = self._checked(index, gradient)
        number = self._model.unit_of[index]
        self._missing[number] -= 1
        if self._missing[number]:
            return {}
        self._units_left -= 1
        self._watch(self.plan.units[number])
        if not self._whole:
            return self._compressed(number)
        if self._units_left:
            return {}
        self._prepare()
        done: dict[int, list[Payload]] = {}
        for each in range(len(self.plan.units)):
            done.update(self._compressed(each))
        return done

    def cancel_remaining(self) -> list[int]:
        """Compress no further units; return the numbers of the parts that will not be sent.

        Their tensors keep the residual and state from before the step, and their gradients are dropped.
        """
        missing = [number for number in range(len(self.plan.units)) if number not in self._compressed_units]
        parts = [part for number in missing for part in self.plan.units[number].parts]
        for number in missing:
            self._restore(self.plan.units[number])
        self._units_left = 0
        return [part for part in parts if self._wanted is None or part in self._wanted]

    def commit(self, *, undoable: bool = False) -> Before | None:
        """Write the step to the ledger, once it is pushed; return the previous contents of the ledger, or
        None.

        undoable: True if the push may have to be undone later. Only then the previous contents are kept.
        """
        assert not self._units_left, "commit needs every gradient, or cancel_remaining"
        if self._with_residual:
            before = self._ledger.commit(self._states, self._usual, undoable=undoable)
            all_of_it = len(self._compressed_units) == len(self.plan.units) and not self._absent
            whole = self.sends and self._wanted is None and all_of_it and not self._measured
            if whole and before is None and not any(self._model.feedback):
                self._ledger.clear()
            return before
        return self._ledger.commit_without_residual(self._states, self._usual, undoable=undoable)

    def _compressed(self, number: int) -> dict[int, list[Payload]]:
        """Compress a unit whose gradients are all there; return the payloads of its parts, by number of the
        part."""
        unit = self.plan.units[number]
        unwanted = [] if self._wanted is None else [part for part in unit.parts if part not in self._wanted]
        payloads: list[Payload] = [] if len(unwanted) == len(unit.parts) else self._payloads(number)
        self._compressed_units.add(number)
        for part in unwanted:
            self._leave(self.plan.parts[part].start, self.plan.parts[part].end)
        self._release(unit)
        if not self.sends:
            return {}
        if self._flush:
            done = self._flushed(unit, unwanted)
            self.sent.update(done)
            return done
        wanted = [part for part in unit.parts if part not in unwanted]
        if len(unit.parts) == 1:
            done = {part: join(each for each in payloads if each.elements) for part in wanted}
        else:
            bounds = [(self.plan.parts[part], part) for part in wanted]
            (payload,) = payloads or (None,)
            done = {
                part: cut(payload, bound.start - unit.start, bound.end - unit.start)
                for bound, part in bounds
                if payload is not None
            }
        self.sent.update(done)
        return done

    def _watch(self, unit: Unit) -> None:
        """Find spikes among the gradients of a complete unit, and mark their tensors to be sent as
        float32."""
        if self._flush:
            return
        keeps, known = self._model.keeps_spikes, self._magnitudes
        indices = [
            index for index in range(unit.first, unit.last) if keeps[index] and index in self._gradients
        ]
        if measured := [index for index in indices if index in known]:
            totals, nonzero = np.array([known[index] for index in measured], np.float64).T
            self._judge(np.array(measured), totals, nonzero)
        if others := [index for index in indices if index not in known]:  # all of these lie on the host
            gradients = [self._gradients[index] for index in others]
            self._judge(np.array(others), *devices.sampled_magnitudes(gradients))

    def _judge(self, indices: Int64, totals: Float64, nonzero: Float64 | Int64) -> None:
        """Compare the magnitudes of gradients with the usual ones; record spikes and update the statistics.

        Args:
            indices: indices of the tensors.
            totals: sum of the absolute values of each gradient, or of a sample of it.
            nonzero: number of elements that are not 0, of the same.
        """
        factors, usual = judge(self._usual[:, indices], totals, nonzero)
        spiked = factors > LIMIT
        whole = spiked | (usual[DUE] > 0)
        usual[DUE] = 0.0 if self.sends else whole
        self._usual[:, indices] = usual
        if not whole.any():
            return
        for index, factor in zip(indices[spiked].tolist(), factors[spiked].tolist(), strict=True):
            self.spikes.append(Spike(self._model.specs[int(index)].name, factor))
        if self.sends:
            for index in indices[whole].tolist():
                self._sent_whole.add(index)
                if index not in self._magnitudes:
                    self._measure(index, self._gradients[index])

    def _checked(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient as a contiguous tensor of shape (elements,), on a device that its compressor
        accepts.

        It is a view where possible. The gradient's magnitudes are measured unless compressing checks it
        anyway. Raises ValueError for a wrong shape or type, and NonFiniteGradient.
        """
        spec = self._model.specs[index]
        if gradient.dtype != torch.float32:
            raise ValueError(f"gradient of {spec.name!r}: expected torch.float32, got {gradient.dtype}")
        if gradient.numel() != spec.elements:
            got = f"shape {tuple(gradient.shape)}"
            raise ValueError(f"gradient of {spec.name!r}: expected shape {spec.shape}, got {got}")
        gradient = gradient.detach().reshape(-1)
        on_host = gradient.device.type == "cpu" and not devices.on_gpu(gradient)
        if self._in_runs and self._model.checks[index] and on_host:
            return gradient.contiguous()
        if not (self._model.on_gpu[index] and devices.has_kernels_for(gradient)):
            gradient = gradient.cpu()
        gradient = gradient.contiguous()
        if gradient.device.type != "cpu":  # the ledger lies where any gradient is compressed
            self._ledger.to(gradient.device)
        self._measure(index, gradient)
        return gradient

    def _measure(self, index: int, gradient: torch.Tensor) -> None:
        """Measure the magnitudes of a gradient; raise NonFiniteGradient if it contains an infinity or a NaN.

        One read pass serves both: the sum of magnitudes shows values that are not finite.
        """
        self._magnitudes[index] = devices.magnitudes(gradient)
        if not math.isfinite(self._magnitudes[index].total):
            raise NonFiniteGradient(self._model.specs[index].name)

    def _prepare(self) -> None:
        """Clip all gradients, and divide the budget of elements among them, as far as options ask for it."""
        model = self._model
        if model.wrapping.clip:
            length = math.hypot(*(norm(self._gradients[index]) for index in sorted(self._gradients)))
            largest = model.wrapping.clip / math.sqrt(self._terms.workers)
            factor = largest / length if length > largest else 1.0
            for index, gradient in self._gradients.items():
                self._gradients[index] = gradient * factor
                self._magnitudes[index] = devices.magnitudes(self._gradients[index])
        if not (model.planned and self.sends and not self._flush):
            return
        planned = [
            index for index in model.planned if index in self._gradients and index not in self._sent_whole
        ]
        if not planned:
            return
        totals: list[torch.Tensor] = []
        for index in planned:
            compressor, gradient = model.compressors[index], self._gradients[index]
            if not isinstance(compressor, ErrorFeedback):
                gradient = self._plus_residual(index)
            else:
                state = self._ledger.opened(self._range(index), gradient.device, self._states[index])
                added = compressor.accumulate(gradient, state)
                if added is not gradient:  # the velocity
                    self._magnitudes[index] = devices.magnitudes(added)
                self._ledger.take(self._range(index), state)
                gradient = state.residual
            totals.append(gradient)
        planner = cast(ModelWide, without_feedback(model.compressors[planned[0]]))
        specs = [model.specs[index] for index in planned]
        found = planner.plan(totals, specs, self._context(planned[0]))
        self._keep = dict(zip(planned, found, strict=True))

    def _payloads(self, number: int) -> list[Payload]:
        """Compress all tensors of a unit; return the payloads, end to end."""
        runs = split_runs(self._model.runs[number], self._absent, self._sent_whole)
        merged = self._merged(runs) if self.plan.merged and self.sends and not self._flush else {}
        return [
            payload
            for run in runs
            for payload in (merged[run.first] if run.first in merged else self._run(run))
        ]

    def _release(self, unit: Unit) -> None:
        """Drop the gradients of a unit."""
        for index in range(unit.first, unit.last):
            self._gradients.pop(index, None)

    def _restore(self, unit: Unit) -> None:
        """Reset everything the step has written for a unit to the state before the step."""
        self._leave(unit.start, unit.end)
        for index in range(unit.first, unit.last):
            self._states[index] = self._ledger.states[index]
        self._usual[:, unit.first : unit.last] = self._ledger.usual[:, unit.first : unit.last]

    def _leave(self, start: int, end: int) -> None:
        """Copy a range of residual and velocity to the draft unchanged."""
        if self._with_residual:
            self._ledger.draft[start:end].copy_(self._ledger.residual[start:end])
            if self._ledger.velocity is not None and self._ledger.draft_velocity is not None:
                self._ledger.draft_velocity[start:end].copy_(self._ledger.velocity[start:end])

    def _merged(self, runs: Sequence[Run]) -> dict[int, list[Payload]]:
        """Compress the tensors of a unit from which the sparsifier chooses as from one.

        Returns the payloads of each stretch of tensors that lie end to end, by index of the stretch's first
        tensor.
        """
        excluded = self._absent | self._sent_whole
        stretches = [run for run in runs if run.how == "merged" and run.first not in excluded]
        if not stretches:
            return {}
        inner = cast(Choosing, without_feedback(self._model.compressors[stretches[0].first]))
        keep = sum(
            inner.keep(self._model.specs[index].elements, self._context(index))
            for run in stretches
            for index in range(run.first, run.last)
        )
        if not inner.seeded:
            return self._chosen(stretches, keep)
        starts, found = self.plan.starts, dict[int, list[Payload]]()
        sizes = [starts[run.last] - starts[run.first] for run in stretches]
        for run, share in zip(stretches, shares(keep, sizes, self._terms.version), strict=True):
            found.update(self._chosen([run], share))
        return found

    def _chosen(self, stretches: Sequence[Run], keep: int) -> dict[int, list[Payload]]:
        """Choose `keep` elements from these stretches as from one tensor; return the payloads of each
        stretch.

        State and random numbers are those of the first tensor.
        """
        first, starts = stretches[0].first, self.plan.starts
        indices = [index for run in stretches for index in range(run.first, run.last)]
        compressor, device = self._model.compressors[first], self._gradients[first].device
        given = [self._gradients[index].to(device) for index in indices]
        gradient = given[0] if len(given) == 1 else torch.cat(given)
        known = checks_alone(compressor) or all(index in self._magnitudes for index in indices)
        try:
            if not (known or devices.finite(gradient)):
                raise FloatingPointError
            payloads, self._states[first] = compress_together(
                compressor,
                gradient,
                self._ledger,
                [(starts[run.first], starts[run.last]) for run in stretches],
                self._states[first],
                replace(self._context(first), keep=keep, magnitudes=None),
                with_residual=self._with_residual,
            )
        except FloatingPointError:
            for index in indices:
                self._measure(index, self._gradients[index])
            raise
        return {run.first: each for run, each in zip(stretches, payloads, strict=True)}

    def _run(self, run: Run) -> list[Payload]:
        """Compress a run of neighbours, together where that is possible; return their payloads."""
        indices = range(run.first, run.last)
        # 1. Tensors without a gradient: their residual stays.
        if run.first in self._absent:
            start, end = self.plan.starts[run.first], self.plan.starts[run.last]
            self._leave(start, end)
            return [AbsentPayload(elements=end - start)]
        # 2. Tensors that are sent as float32.
        if run.first in self._sent_whole:
            return [self._whole_tensor(index) for index in indices]
        # 3. A call for each tensor.
        if self._one_by_one(run):
            for index in indices:
                if index not in self._magnitudes and not checks_alone(self._model.compressors[index]):
                    self._measure(index, self._gradients[index])
            return [payload for index in indices for payload in self._tensor(index)]
        # 4. One call for all.
        start, end = self.plan.starts[run.first], self.plan.starts[run.last]
        if run.how == "blocks":
            return [self._blocks(run, start, end)]
        return [self._elements(run, start, end)]

    def _one_by_one(self, run: Run) -> bool:
        """Return True if each tensor of a run takes a call of its own.

        That is so where the ledger lies on a GPU, where nothing is sent, and where one call would be slower.
        Merged runs arrive here only if nothing is sent.
        """
        if run.how in (None, "merged") or devices.on_gpu(self._ledger.device):
            return True
        if run.how == "neighbours":
            return not self.sends or self._flush or run.last - run.first == 1
        return any(index in self._magnitudes for index in range(run.first, run.last))

    def _blocks(self, run: Run, start: int, end: int) -> Payload:
        """Compress a run of a quantizer block by block, in one pass; return the payload.

        Levels are known before the pass, and its sums show a gradient that is not finite, for which it raises
        NonFiniteGradient.
        """
        compressor = cast(InBlocks, without_feedback(self._model.compressors[run.first]))
        payload, states, totals = compressor.compress_blocks(
            [self._gradients[index] for index in range(run.first, run.last)],
            self._ledger.residual[start:end],
            self._ledger.draft[start:end],
            self._states[run.first : run.last],
            self._terms.samples,
        )
        finite = np.isfinite(totals)
        if not finite.all():
            raise NonFiniteGradient(self._model.specs[run.first + int(np.argmin(finite))].name)
        self._states[run.first : run.last] = states
        return payload

    def _elements(self, run: Run, start: int, end: int) -> Payload:
        """Compress a run as if it were one tensor; return the payload."""
        indices = range(run.first, run.last)
        gradient = torch.cat([self._gradients[index] for index in indices])
        if not devices.finite(gradient):
            for index in indices:
                self._measure(index, self._gradients[index])
        compressor = self._model.compressors[run.first]
        if run.how == "neighbours":
            sizes = np.array([self._model.specs[index].elements for index in indices], np.int64)
            tensors = Neighbours(sizes, lambda index: self._context(run.first + index))
            compressor = spanning(compressor, tensors)
        if compressor == LOSSLESS:  # the copy of the gradients is the payload
            if self._with_residual:
                devices.add_to(gradient, self._ledger.residual[start:end])
                self._ledger.draft[start:end].zero_()
            data = gradient.numpy().view(np.uint8)
            return DensePayload(format=DenseFormat.FLOAT32, elements=end - start, data=data)
        given = [(start, end)], self._states[run.first], self._context(run.first)
        ((payload,),), _ = compress_together(
            compressor, gradient, self._ledger, *given, with_residual=self._with_residual
        )
        return payload

    def _tensor(self, index: int) -> list[Payload]:
        """Compress one tensor and return its payloads; at a version that sends nothing only add it to the
        draft."""
        compressor, gradient = self._model.compressors[index], self._gradients[index]
        if not isinstance(compressor, ErrorFeedback):
            return self._without_feedback(index)
        begun = index in self._keep
        state = self._ledger.opened(self._range(index), gradient.device, self._states[index], begun=begun)
        payload: Payload | None = None
        if begun:
            payload, state = compressor.send(state, self._context(index))
        elif self.sends and not self._flush:
            try:
                payload, state = compressor.compress(gradient, state, self._context(index))
            except FloatingPointError:
                raise NonFiniteGradient(self._model.specs[index].name) from None
        else:
            compressor.accumulate(gradient, state)
        self._states[index] = state.inner
        self._ledger.take(self._range(index), state)
        return [] if payload is None else [payload]

    def _whole_tensor(self, index: int) -> Payload:
        """Return a tensor as float32, with all of its residual and velocity; nothing of it stays in the
        ledger, except for the velocity with masking=off."""
        start, end = self.plan.starts[index : index + 2]
        ledger, gradient = self._ledger, self._gradients[index]
        if ledger.velocity is not None and ledger.draft_velocity is not None:
            velocity = ledger.velocity[start:end].to(gradient.device)
            gradient = devices.saturate(torch.add(gradient, velocity, alpha=self._model.wrapping.momentum))
            if self._model.wrapping.masking:
                ledger.draft_velocity[start:end].zero_()  # all of it has been sent
            else:
                ledger.draft_velocity[start:end].copy_(gradient)
        total = devices.saturate(gradient + ledger.residual[start:end].to(gradient.device))
        ledger.draft[start:end].zero_()
        return dense_payload(DenseFormat.FLOAT32, total.cpu().numpy())

    def _plus_residual(self, index: int) -> torch.Tensor:
        """Return the gradient plus the residual of a tensor, for a compressor without error feedback.

        Such a tensor has a residual only if an earlier push of it was put back.
        """
        gradient, (start, end) = self._gradients[index], self.plan.starts[index : index + 2]
        if self._with_residual:
            owed = self._ledger.residual[start:end].to(gradient.device)
            gradient = self._gradients[index] = devices.saturate(gradient + owed)
            self._magnitudes[index] = devices.magnitudes(gradient)
        return gradient

    def _without_feedback(self, index: int) -> list[Payload]:
        """Compress one tensor whose compressor has no error feedback; return its payloads."""
        start, end = self.plan.starts[index : index + 2]
        if self._alone(index):
            gradient = self._gradients[index]
            self._leave(start, end)
        else:
            gradient = self._gradients[index] if index in self._keep else self._plus_residual(index)
            if self._with_residual:
                self._ledger.draft[start:end].zero_()
        if self._flush:
            self._ledger.draft[start:end].copy_(gradient)
            return []
        payload, state = self._model.compressors[index].compress(
            gradient, self._states[index], self._context(index)
        )
        self._states[index] = state
        return [payload]

    def _flushed(self, unit: Unit, unwanted: Sequence[int]) -> dict[int, list[Payload]]:
        """Return everything that the draft holds of a unit, as float32, by number of the part; the draft is 0
        afterwards.

        A tensor is sent or absent as a whole, which makes the result independent of cuts. unwanted: parts in
        which only tensors that had a residual before the step are sent.
        """
        starts, before = self.plan.starts, self._ledger.residual
        tensors = range(unit.first, unit.last)
        owed = {index for index in tensors if before[starts[index] : starts[index + 1]].any()}
        there = owed | (set(tensors) - self._absent)
        return {
            part: self._flushed_part(unit, part, owed if part in unwanted else there) for part in unit.parts
        }

    def _flushed_part(self, unit: Unit, part: int, sent: Set[int]) -> list[Payload]:
        """Return everything that the draft holds of a part, as float32; the draft is 0 afterwards.

        sent: indices of the tensors that are sent; the other tensors are marked absent.
        """
        bounds, payloads = self.plan.parts[part], list[Payload]()
        for index in range(unit.first, unit.last):
            start = max(bounds.start, self.plan.starts[index])
            end = min(bounds.end, self.plan.starts[index + 1])
            values = self._ledger.draft[start:end].cpu().numpy()
            if index in sent:
                payloads.append(dense_payload(DenseFormat.FLOAT32, values))
            else:
                payloads.append(AbsentPayload(elements=values.size))
        self._ledger.draft[bounds.start : bounds.end].zero_()
        return join(each for each in payloads if each.elements)

    def _range(self, index: int) -> Ranges:
        """Return the range of a tensor in flat order."""
        return [(self.plan.starts[index], self.plan.starts[index + 1])]

    def _alone(self, index: int) -> bool:
        """Return True if a tensor's gradient is sent without its residual, so that its norm can be
        measured."""
        return self._measured and self._model.drawn[index]

    def _context(self, index: int) -> StepContext:
        """Return the context in which a tensor is compressed."""
        model, terms = self._model, self._terms
        rank = model.rank if terms.rank is None else terms.rank
        return StepContext(
            samples=terms.samples,
            version=terms.version,
            epoch=terms.epoch,
            random=Random((model.seed, rank, terms.version, model.numbers[index])),
            shared=Random((model.seed, terms.version, model.numbers[index])),
            magnitudes=self._magnitudes.get(index),
            density=model.densities.get(index),
            keep=self._keep.get(index),
            alone=self._alone(index),
        )
