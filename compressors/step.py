"""One step of a `ModelCompressor`: gradients arrive in any order, and a part is complete with its last
gradient.

A step turns gradients into payloads, and writes the unsent rest to the *draft*, the ledger's second buffer.
The life of a gradient:

    add:         the draft checks and stores it. With the other gradients of its unit it is searched for
                 spikes.
    prepare:     all gradients are clipped, and a budget is divided among them (`budget`). Only if an option
                 requires that, which also delays compression until all gradients are there.
    compress:    once all gradients of a unit are there, the unit is compressed (`joining`); at a version that
                 sends nothing, or in a flush, its gradients are only added to the draft.
    finish:      the draft replaces the ledger's residual.
"""

from __future__ import annotations

import numpy as np
import torch

from ..common.parts import Unit
from .budget import prepare
from .cutting import cut, join
from .draft import Draft
from .joining.units import payloads_of
from .kernels import devices
from .ledger import Before
from .payload import Float64, Int64, Payload
from .spikes import DUE, LIMIT, Spike, judge
from .tensors import ModelTensors
from .terms import PushTerms
from .whole import flushed


class Step:
    """One step of a `ModelCompressor`, made by its `begin`: each gradient is added once, then the step is
    finished.

    The ledger does not change before `finish`. To abandon a step, simply drop it.

    Attributes:
        plan: plan that the step follows.
        sends: True if the step produces payloads; False at a version at which `delay` sends nothing.
        sent: payloads of each part that is complete, by number of the part.
        bases: bases in which the step's coordinates are.
        spikes: gradients that are far larger than usual, in the order in which their units were complete.
    """

    def __init__(self, model: ModelTensors, terms: PushTerms) -> None:
        self._model, self._terms, self.plan = model, terms, model.plan
        step = terms.version if terms.step is None else terms.step
        self.sends = terms.flush or (step + 1) % model.wrapping.delay == 0
        self.sent: dict[int, list[Payload]] = {}
        self.spikes: list[Spike] = []
        self._draft = Draft(model, terms, sends=self.sends)
        self.bases = model.bases
        # Number of missing gradients of each unit.
        self._missing = [unit.last - unit.first for unit in self.plan.units]
        self._units_left = len(self.plan.units)
        self._compressed_units: set[int] = set()
        # Clipping, and budgets for the whole model, need all gradients before any is compressed.
        self._whole = bool(model.wrapping.clip or (model.planned and not terms.flush))

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
        draft = self._draft
        assert index not in draft.gradients, "each gradient is added once"
        assert index not in draft.absent, "each gradient is added once"
        if gradient is None:
            draft.absent.add(index)
        else:
            draft.hold(index, gradient, in_runs=draft.compresses and not self._whole)
        number = self._model.unit_of[index]
        self._missing[number] -= 1
        if self._missing[number]:
            return {}
        self._units_left -= 1
        self._watch(self.plan.units[number])
        if not self._whole:
            return self._compress(number)
        if self._units_left:
            return {}
        prepare(draft)
        done: dict[int, list[Payload]] = {}
        for each in range(len(self.plan.units)):
            done.update(self._compress(each))
        return done

    def cancel_remaining(self) -> list[int]:
        """Compress no further units; return the numbers of the parts that will not be sent.

        Their tensors keep the residual and state from before the step, and their gradients are dropped.
        """
        missing = [
            unit for number, unit in enumerate(self.plan.units) if number not in self._compressed_units
        ]
        for unit in missing:
            self._draft.undo(unit)
        self._units_left = 0
        return [part for unit in missing for part in unit.parts if self._wants(part)]

    def finish(self, *, undoable: bool = False) -> Before | None:
        """Write the step to the ledger, once it is pushed; return the previous contents of the ledger, or
        None.

        undoable: True if the push may have to be undone later. Only then the previous contents are kept.
        """
        assert not self._units_left, "finish needs every gradient, or cancel_remaining"
        draft, ledger = self._draft, self._model.ledger
        before = ledger.enter(draft.states, draft.usual, drafted=draft.kept, undoable=undoable)
        all_of_it = len(self._compressed_units) == len(self.plan.units) and not draft.absent
        whole = self.sends and self._terms.wanted is None and all_of_it and not draft.measured
        if whole and before is None and not any(self._model.feedback):
            ledger.clear()
        return before

    def _wants(self, part: int) -> bool:
        return self._terms.wanted is None or part in self._terms.wanted

    def _compress(self, number: int) -> dict[int, list[Payload]]:
        """Compress a unit whose gradients are all there; return the payloads by number of the part."""
        draft, unit = self._draft, self.plan.units[number]
        unwanted = [part for part in unit.parts if not self._wants(part)]
        payloads: list[Payload] = []
        if len(unwanted) < len(unit.parts):
            if draft.compresses:
                payloads = payloads_of(draft, number)
            else:
                draft.accumulate(range(unit.first, unit.last))
        self._compressed_units.add(number)
        for part in unwanted:
            draft.leave(self.plan.parts[part].start, self.plan.parts[part].end)
        for index in range(unit.first, unit.last):
            draft.gradients.pop(index, None)
        done: dict[int, list[Payload]] = {}
        if self._terms.flush:
            done = flushed(draft, unit, unwanted)
        elif self.sends:
            done = {part: self._part(payloads, unit, part) for part in unit.parts if part not in unwanted}
        self.sent.update(done)
        return done

    def _part(self, payloads: list[Payload], unit: Unit, part: int) -> list[Payload]:
        """Return the payloads of a part, given those of its unit: one if the unit has several parts."""
        if len(unit.parts) == 1:
            return join(each for each in payloads if each.elements)
        (payload,), bounds = payloads, self.plan.parts[part]
        return cut(payload, bounds.start - unit.start, bounds.end - unit.start)

    def _watch(self, unit: Unit) -> None:
        """Find spikes among the gradients of a complete unit, and mark their tensors to be sent as
        float32."""
        if self._terms.flush:
            return
        draft, keeps = self._draft, self._model.keeps_spikes
        indices = [i for i in range(unit.first, unit.last) if keeps[i] and i in draft.gradients]
        if measured := [index for index in indices if index in draft.magnitudes]:
            totals, nonzero = np.array([draft.magnitudes[index] for index in measured], np.float64).T
            self._judge(np.array(measured), totals, nonzero)
        if others := [index for index in indices if index not in draft.magnitudes]:  # all lie on the host
            gradients = [draft.gradients[index] for index in others]
            self._judge(np.array(others), *devices.sampled_magnitudes(gradients))

    def _judge(self, indices: Int64, totals: Float64, nonzero: Float64 | Int64) -> None:
        """Compare the magnitudes of gradients with the usual ones; record spikes and update the statistics.

        totals, nonzero: sum of the absolute values, and number of elements that are not 0.
        """
        draft = self._draft
        factors, usual = judge(draft.usual[:, indices], totals, nonzero)
        spiked = factors > LIMIT
        whole = spiked | (usual[DUE] > 0)
        usual[DUE] = 0.0 if self.sends else whole
        draft.usual[:, indices] = usual
        for index, factor in zip(indices[spiked].tolist(), factors[spiked].tolist(), strict=True):
            self.spikes.append(Spike(self._model.specs[int(index)].name, factor))
        for index in indices[whole].tolist() if self.sends else ():
            draft.whole.add(index)
            if index not in draft.magnitudes:
                draft.measure(index)
