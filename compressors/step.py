"""One step of a `ModelCompressor`: gradients come in any order, parts are complete with their last one.

What a step makes of its gradients are payloads, and what they leave in the ledger's second buffer, the draft.
The life of a gradient, from the top of the file to its end:

    add         taken, checked, and watched for spikes with the others of its unit
    _prepare    clipped, and planned for, once all of the model's are there; only where that is asked for
    _compressed its unit, once all gradients of that are there: runs of neighbours in one call where that
                serves them (`_blocks`, `_elements`, `_chosen`), otherwise tensor by tensor (`_tensor`)
    commit      the draft takes the place of the ledger
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from ..planning.parts import Unit
from .base import Choosing, InBlocks, ModelWide, Neighbours, NonFiniteGradient, Random, StepContext
from .cutting import cut, join
from .dense import dense_payload
from .feedback import ErrorFeedback, without_feedback
from .kernels import Magnitudes, devices
from .ledger import Before, Ranges, norm
from .merging import compress_together, shares
from .payload import AbsentPayload, DenseFormat, DensePayload, Float64, Int64, Payload
from .runs import Run, checks_alone, present, spanning
from .spikes import DUE, LIMIT, Spike, judge
from .tensors import LOSSLESS, ModelTensors


class Step:
    """One step of a `ModelCompressor`: gradients in any order, each once, then `commit`.

    Until then the ledger is as it was, so that a step is abandoned by not going on with it.

    Attributes:
        plan: that the step goes by.
        sends: whether there will be payloads; at a version that a delay passes over there are none.
        sent: by part, its payloads.
        spikes: gradients that are far larger than usual (`spikes`), in the order in which their units were
            complete.
    """

    def __init__(
        self,
        model: ModelTensors,
        samples: int,
        version: int,
        step: int,
        epoch: float,
        workers: int,
        wanted: frozenset[int] | None,
        flush: bool,
    ) -> None:
        """Take the arguments of `ModelCompressor.begin`."""
        self._model, self._ledger, self.plan = model, model.ledger, model.plan
        self._samples, self._version, self._epoch = samples, version, epoch
        self._workers, self._wanted, self._flush = workers, wanted, flush
        self.sends = flush or (step + 1) % model.wrapping.delay == 0
        self.sent: dict[int, list[Payload]] = {}
        self.spikes: list[Spike] = []
        # By unit: gradients that are missing.
        self._missing = [unit.last - unit.first for unit in self.plan.units]
        self._units_left = len(self.plan.units)
        self._compressed_units: set[int] = set()
        # By tensor, after the step: what its compressor remembers, and what is usual for its gradients
        # (`spikes.ROWS`).
        self._states = list(model.ledger.states)
        self._usual = model.ledger.usual.copy()
        self._absent: set[int] = set()  # tensors without a gradient
        self._sent_whole: set[int] = set()  # tensors whose residual is sent with them
        # Clipping, and plans for the whole model, take all gradients before any is compressed.
        self._whole = bool(model.wrapping.clip or (model.planned and not flush))
        # Whether the ledger has or gets something that outlasts the step.
        self._owing = any(model.feedback) or flush or not model.ledger.unused
        self._gradients: dict[int, torch.Tensor] = {}
        self._magnitudes: dict[int, Magnitudes] = {}
        self._keep: dict[int, int] = {}
        self._in_runs = self.sends and not self._whole and not flush

    def add(self, place: int, gradient: torch.Tensor | None) -> dict[int, list[Payload]]:
        """The gradient of a tensor, mean over the samples. Nobody may write to it until its part is sent.

        None: it does not exist. Nothing is sent of it but that, and what the ledger holds stays as it is.

        Returns the payloads of the parts that are complete with it, by part: each part's lie end to end.

        Raises:
            NonFiniteGradient: the step can only be abandoned.
            ValueError: it has another shape or type than its spec says.
        """
        assert place not in self._gradients, "each gradient comes once"
        assert place not in self._absent, "each gradient comes once"
        if gradient is None:
            self._absent.add(place)
        else:
            self._gradients[place] = self._checked(place, gradient)
        number = self._model.unit_of[place]
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

    def cease(self) -> list[int]:
        """Compress no more. What is not sent is left as it was before the step, and no gradient of it is
        kept.

        Returns the parts that will not be sent.
        """
        missing = [number for number in range(len(self.plan.units)) if number not in self._compressed_units]
        parts = [part for number in missing for part in self.plan.units[number].parts]
        for number in missing:
            self._restore(self.plan.units[number])
        self._units_left = 0
        return [part for part in parts if self._wanted is None or part in self._wanted]

    def commit(self, *, undoable: bool = False) -> Before | None:
        """The step is pushed. Returns the ledger of before, if the push may have to be undone."""
        assert not self._units_left, "every gradient has to come first"
        if self._owing:
            before = self._ledger.commit(self._states, self._usual, undoable=undoable)
            all_of_it = len(self._compressed_units) == len(self.plan.units) and not self._absent
            whole = self.sends and self._wanted is None and all_of_it
            if whole and before is None and not any(self._model.feedback):
                self._ledger.clear()
            return before
        return self._ledger.settle(self._states, self._usual, undoable=undoable)

    def _compressed(self, number: int) -> dict[int, list[Payload]]:
        """The parts of a unit whose gradients are all there."""
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
        """Find spikes among the gradients of a unit, which are all there, and send these whole; see
        `spikes`."""
        if self._flush:
            return
        keeps, known = self._model.keeps_spikes, self._magnitudes
        places = [
            place for place in range(unit.first, unit.last) if keeps[place] and place in self._gradients
        ]
        if measured := [place for place in places if place in known]:
            totals, nonzero = np.array([known[place] for place in measured], np.float64).T
            self._judge(np.array(measured), totals, nonzero)
        if others := [place for place in places if place not in known]:  # these lie on the host
            gradients = [self._gradients[place] for place in others]
            self._judge(np.array(others), *devices.sampled_magnitudes(gradients))

    def _judge(self, places: Int64, totals: Float64, nonzero: Float64 | Int64) -> None:
        factors, usual = judge(self._usual[:, places], totals, nonzero)
        spiked = factors > LIMIT
        whole = spiked | (usual[DUE] > 0)
        usual[DUE] = 0.0 if self.sends else whole
        self._usual[:, places] = usual
        if not whole.any():
            return
        for place, factor in zip(places[spiked].tolist(), factors[spiked].tolist(), strict=True):
            self.spikes.append(Spike(self._model.specs[int(place)].name, factor))
        if self.sends:
            for place in places[whole].tolist():
                self._sent_whole.add(place)
                if place not in self._magnitudes:
                    self._measure(place, self._gradients[place])

    def _checked(self, place: int, gradient: torch.Tensor) -> torch.Tensor:
        """As shape (elements,), contiguous, where its compressor takes it; a view where possible."""
        spec = self._model.specs[place]
        if gradient.dtype != torch.float32:
            raise ValueError(f"gradient of {spec.name!r}: expected torch.float32, got {gradient.dtype}")
        if gradient.numel() != spec.elements:
            got = f"shape {tuple(gradient.shape)}"
            raise ValueError(f"gradient of {spec.name!r}: expected shape {spec.shape}, got {got}")
        gradient = gradient.detach().reshape(-1)
        on_host = gradient.device.type == "cpu" and not devices.on_gpu(gradient)
        if self._in_runs and self._model.checks[place] and on_host:
            return gradient.contiguous()
        if not (self._model.on_gpu[place] and devices.has_kernels_for(gradient)):
            gradient = gradient.cpu()
        gradient = gradient.contiguous()
        if gradient.device.type != "cpu":  # where one is compressed there, the ledger lies there
            self._ledger.to(gradient.device)
        self._measure(place, gradient)
        return gradient

    def _measure(self, place: int, gradient: torch.Tensor) -> None:
        """One read pass serves twice: as the check for infinities and NaNs, and for the magnitudes by which
        thresholds are chosen. Raises NonFiniteGradient."""
        self._magnitudes[place] = devices.magnitudes(gradient)
        if not math.isfinite(self._magnitudes[place].total):
            raise NonFiniteGradient(self._model.specs[place].name)

    def _prepare(self) -> None:
        """All gradients are there: clip them, and let the compressor see what all tensors have to send."""
        model = self._model
        if model.wrapping.clip:
            length = math.hypot(*(norm(self._gradients[place]) for place in sorted(self._gradients)))
            largest = model.wrapping.clip / math.sqrt(self._workers)
            factor = largest / length if length > largest else 1.0
            for place, gradient in self._gradients.items():
                self._gradients[place] = gradient * factor
                self._magnitudes[place] = devices.magnitudes(self._gradients[place])
        if not (model.planned and self.sends and not self._flush):
            return
        planned = [
            place for place in model.planned if place in self._gradients and place not in self._sent_whole
        ]
        if not planned:
            return
        totals: list[torch.Tensor] = []
        for place in planned:
            compressor, gradient = model.compressors[place], self._gradients[place]
            if not isinstance(compressor, ErrorFeedback):
                gradient = self._with_owed(place)
            else:
                state = self._ledger.opened(self._range(place), gradient.device, self._states[place])
                added = compressor.accumulate(gradient, state)
                if added is not gradient:  # the velocity
                    self._magnitudes[place] = devices.magnitudes(added)
                self._ledger.take(self._range(place), state)
                gradient = state.residual
            totals.append(gradient)
        planner = cast(ModelWide, without_feedback(model.compressors[planned[0]]))
        specs = [model.specs[place] for place in planned]
        found = planner.plan(totals, specs, self._context(planned[0]))
        self._keep = dict(zip(planned, found, strict=True))

    def _payloads(self, number: int) -> list[Payload]:
        """What is sent of a unit, end to end; its gradients are all there."""
        runs = present(self._model.runs[number], self._absent, self._sent_whole)
        merged = self._merged(runs) if self.plan.merged and self.sends and not self._flush else {}
        return [
            payload
            for run in runs
            for payload in (merged[run.first] if run.first in merged else self._run(run))
        ]

    def _release(self, unit: Unit) -> None:
        """Keep no gradient of a unit."""
        for place in range(unit.first, unit.last):
            self._gradients.pop(place, None)

    def _restore(self, unit: Unit) -> None:
        """Leave all of a unit as it was before the step."""
        self._leave(unit.start, unit.end)
        for place in range(unit.first, unit.last):
            self._states[place] = self._ledger.states[place]
        self._usual[:, unit.first : unit.last] = self._ledger.usual[:, unit.first : unit.last]

    def _leave(self, start: int, end: int) -> None:
        """What the ledger holds of a range stays there."""
        if self._owing:
            self._ledger.draft[start:end].copy_(self._ledger.residual[start:end])
            if self._ledger.velocity is not None and self._ledger.draft_velocity is not None:
                self._ledger.draft_velocity[start:end].copy_(self._ledger.velocity[start:end])

    def _merged(self, runs: Sequence[Run]) -> dict[int, list[Payload]]:
        """What is sent of a unit's tensors that are chosen from as a whole, by the first of each stretch."""
        apart = self._absent | self._sent_whole
        stretches = [run for run in runs if run.how == "merged" and run.first not in apart]
        if not stretches:
            return {}
        inner = cast(Choosing, without_feedback(self._model.compressors[stretches[0].first]))
        keep = sum(
            inner.keep(self._model.specs[place].elements, self._context(place))
            for run in stretches
            for place in range(run.first, run.last)
        )
        if not inner.seeded:
            return self._chosen(stretches, keep)
        starts, found = self.plan.starts, dict[int, list[Payload]]()
        sizes = [starts[run.last] - starts[run.first] for run in stretches]
        for run, share in zip(stretches, shares(keep, sizes), strict=True):
            found.update(self._chosen([run], share))
        return found

    def _chosen(self, stretches: Sequence[Run], keep: int) -> dict[int, list[Payload]]:
        """So many elements of stretches as of one tensor, with state and random numbers of the first."""
        first, starts = stretches[0].first, self.plan.starts
        places = [place for run in stretches for place in range(run.first, run.last)]
        compressor, device = self._model.compressors[first], self._gradients[first].device
        given = [self._gradients[place].to(device) for place in places]
        gradient = given[0] if len(given) == 1 else torch.cat(given)
        known = checks_alone(compressor) or all(place in self._magnitudes for place in places)
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
                owing=self._owing,
            )
        except FloatingPointError:
            for place in places:
                self._measure(place, self._gradients[place])
            raise
        return {run.first: each for run, each in zip(stretches, payloads, strict=True)}

    def _run(self, run: Run) -> list[Payload]:
        """Compress neighbours together if they came so, otherwise one by one."""
        places = range(run.first, run.last)
        if run.first in self._absent:
            start, end = self.plan.starts[run.first], self.plan.starts[run.last]
            self._leave(start, end)
            return [AbsentPayload(elements=end - start)]
        if run.first in self._sent_whole:
            return [self._whole_tensor(place) for place in places]
        if self._one_by_one(run):
            for place in places:
                if place not in self._magnitudes and not checks_alone(self._model.compressors[place]):
                    self._measure(place, self._gradients[place])
            return [payload for place in places for payload in self._tensor(place)]
        start, end = self.plan.starts[run.first], self.plan.starts[run.last]
        if run.how == "blocks":
            return [self._blocks(run, start, end)]
        return [self._elements(run, start, end)]

    def _one_by_one(self, run: Run) -> bool:
        """Whether its tensors take a call each: where the ledger is not beside them or nothing is sent, and
        where a tensor by itself is gone through faster. What is merged comes here if nothing is sent."""
        if run.how in (None, "merged") or devices.on_gpu(self._ledger.device):
            return True
        if run.how == "neighbours":
            return not self.sends or self._flush or run.last - run.first == 1
        return any(place in self._magnitudes for place in range(run.first, run.last))

    def _blocks(self, run: Run, start: int, end: int) -> Payload:
        """One pass for all: levels are known before, and what is not finite shows in the sums."""
        compressor = cast(InBlocks, without_feedback(self._model.compressors[run.first]))
        payload, states, totals = compressor.compress_blocks(
            [self._gradients[place] for place in range(run.first, run.last)],
            self._ledger.residual[start:end],
            self._ledger.draft[start:end],
            self._states[run.first : run.last],
            self._samples,
        )
        finite = np.isfinite(totals)
        if not finite.all():
            raise NonFiniteGradient(self._model.specs[run.first + int(np.argmin(finite))].name)
        self._states[run.first : run.last] = states
        return payload

    def _elements(self, run: Run, start: int, end: int) -> Payload:
        """As if they were one tensor."""
        places = range(run.first, run.last)
        gradient = torch.cat([self._gradients[place] for place in places])
        if not devices.finite(gradient):
            for place in places:
                self._measure(place, self._gradients[place])
        compressor = self._model.compressors[run.first]
        if run.how == "neighbours":
            sizes = np.array([self._model.specs[place].elements for place in places], np.int64)
            tensors = Neighbours(sizes, lambda place: self._context(run.first + place))
            compressor = spanning(compressor, tensors)
        if compressor == LOSSLESS:  # the copy of the gradients is the payload
            if self._owing:
                devices.add_to(gradient, self._ledger.residual[start:end])
                self._ledger.draft[start:end].zero_()
            data = gradient.numpy().view(np.uint8)
            return DensePayload(format=DenseFormat.FLOAT32, elements=end - start, data=data)
        given = [(start, end)], self._states[run.first], self._context(run.first)
        ((payload,),), _ = compress_together(compressor, gradient, self._ledger, *given, owing=self._owing)
        return payload

    def _tensor(self, place: int) -> list[Payload]:
        """Compress one tensor, or take it into the draft."""
        compressor, gradient = self._model.compressors[place], self._gradients[place]
        if not isinstance(compressor, ErrorFeedback):
            return self._without_feedback(place)
        begun = place in self._keep
        state = self._ledger.opened(self._range(place), gradient.device, self._states[place], begun=begun)
        payload: Payload | None = None
        if begun:
            payload, state = compressor.send(state, self._context(place))
        elif self.sends and not self._flush:
            try:
                payload, state = compressor.compress(gradient, state, self._context(place))
            except FloatingPointError:
                raise NonFiniteGradient(self._model.specs[place].name) from None
        else:
            compressor.accumulate(gradient, state)
        self._states[place] = state.inner
        self._ledger.take(self._range(place), state)
        return [] if payload is None else [payload]

    def _whole_tensor(self, place: int) -> Payload:
        """Send a tensor as float32, with all that is owed of it; nothing is left."""
        start, end = self.plan.starts[place : place + 2]
        ledger, gradient = self._ledger, self._gradients[place]
        if ledger.velocity is not None and ledger.draft_velocity is not None:
            velocity = ledger.velocity[start:end].to(gradient.device)
            gradient = devices.saturate(torch.add(gradient, velocity, alpha=self._model.wrapping.momentum))
            ledger.draft_velocity[start:end].zero_()  # masking: all of it has been sent
        total = devices.saturate(gradient + ledger.residual[start:end].to(gradient.device))
        ledger.draft[start:end].zero_()
        return dense_payload(DenseFormat.FLOAT32, total.cpu().numpy())

    def _with_owed(self, place: int) -> torch.Tensor:
        """The gradient for a compressor that keeps nothing: what was put back goes out with it."""
        gradient, (start, end) = self._gradients[place], self.plan.starts[place : place + 2]
        if self._owing:
            owed = self._ledger.residual[start:end].to(gradient.device)
            gradient = self._gradients[place] = devices.saturate(gradient + owed)
            self._magnitudes[place] = devices.magnitudes(gradient)
        return gradient

    def _without_feedback(self, place: int) -> list[Payload]:
        start, end = self.plan.starts[place : place + 2]
        gradient = self._gradients[place] if place in self._keep else self._with_owed(place)
        if self._owing:
            self._ledger.draft[start:end].zero_()
        if self._flush:
            self._ledger.draft[start:end].copy_(gradient)
            return []
        payload, state = self._model.compressors[place].compress(
            gradient, self._states[place], self._context(place)
        )
        self._states[place] = state
        return [payload]

    def _flushed(self, unit: Unit, unwanted: Sequence[int]) -> dict[int, list[Payload]]:
        """All that the draft holds of a unit, by part, of whole tensors, so that the cuts have no say in it;
        nothing is left. unwanted: parts that go only as far as something is owed of them."""
        starts, before = self.plan.starts, self._ledger.residual
        tensors = range(unit.first, unit.last)
        owed = {place for place in tensors if before[starts[place] : starts[place + 1]].any()}
        there = owed | (set(tensors) - self._absent)
        return {
            part: self._flushed_part(unit, part, owed if part in unwanted else there) for part in unit.parts
        }

    def _flushed_part(self, unit: Unit, part: int, sent: Set[int]) -> list[Payload]:
        """What the draft holds of a part; nothing is left. sent: the tensors that are not absent."""
        bounds, payloads = self.plan.parts[part], list[Payload]()
        for place in range(unit.first, unit.last):
            start = max(bounds.start, self.plan.starts[place])
            end = min(bounds.end, self.plan.starts[place + 1])
            values = self._ledger.draft[start:end].cpu().numpy()
            if place in sent:
                payloads.append(dense_payload(DenseFormat.FLOAT32, values))
            else:
                payloads.append(AbsentPayload(elements=values.size))
        self._ledger.draft[bounds.start : bounds.end].zero_()
        return join(each for each in payloads if each.elements)

    def _range(self, place: int) -> Ranges:
        return [(self.plan.starts[place], self.plan.starts[place + 1])]

    def _context(self, place: int) -> StepContext:
        model = self._model
        return StepContext(
            samples=self._samples,
            version=self._version,
            epoch=self._epoch,
            random=Random((model.seed, model.rank, self._version, model.numbers[place])),
            shared=Random((model.seed, self._version, model.numbers[place])),
            magnitudes=self._magnitudes.get(place),
            density=model.densities.get(place),
            keep=self._keep.get(place),
        )
