"""One step of a `ModelCompressor`: gradients come in any order, parts are complete with their last one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .cutting import cut, join
from .draft import Draft
from .ledger import Before
from .payload import Payload

if TYPE_CHECKING:
    from .model import ModelCompressor


class Step:
    """One step of a `ModelCompressor`: gradients in any order, each once, then `commit`.

    Until then the ledger is as it was, so that a step is abandoned by not going on with it.

    Attributes:
        sends: whether there will be payloads; at a version that a delay passes over there are none.
        sent: by part, its payloads.
    """

    def __init__(
        self,
        model: ModelCompressor,
        samples: int,
        version: int,
        step: int,
        epoch: float,
        workers: int,
        wanted: frozenset[int] | None,
        flush: bool,
    ) -> None:
        self._model, self._ledger, self.plan = model, model.ledger, model.plan
        self._workers, self._wanted, self._flush = workers, wanted, flush
        self.sends = flush or (step + 1) % model.wrapping.delay == 0
        self.sent: dict[int, list[Payload]] = {}
        self._draft = Draft(model, samples, version, epoch, sends=self.sends, flush=flush)
        self._missing = [unit.last - unit.first for unit in self.plan.units]
        self._units_left = len(self.plan.units)
        self._compressed_units: set[int] = set()

    def add(self, place: int, gradient: torch.Tensor | None) -> dict[int, list[Payload]]:
        """The gradient of a tensor, mean over the samples. Nobody may write to it until its part is sent.

        None: it does not exist. Nothing is sent of it but that, and what the ledger holds stays as it is.

        Returns the payloads of the parts that are complete with it, by part: each part's lie end to end.

        Raises:
            NonFiniteGradient: the step can only be abandoned.
            ValueError: it has another shape or type than its spec says.
        """
        number = self._model.unit_of[place]
        self._draft.add(place, gradient)
        self._missing[number] -= 1
        if self._missing[number]:
            return {}
        self._units_left -= 1
        if not self._draft.whole:
            return self._compressed(number)
        if self._units_left:
            return {}
        self._draft.prepare(self._workers)
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
            self._draft.restore(self.plan.units[number])
        self._units_left = 0
        return [part for part in parts if self._wanted is None or part in self._wanted]

    def commit(self, *, undoable: bool = False) -> Before | None:
        """The step is pushed. Returns the ledger of before, if the push may have to be undone."""
        assert not self._units_left, "every gradient has to come first"
        if self._draft.owing:
            before = self._ledger.commit(self._draft.states, undoable=undoable)
            all_of_it = len(self._compressed_units) == len(self.plan.units) and not self._draft.absent
            whole = self.sends and self._wanted is None and all_of_it
            if whole and before is None and not any(self._model.feedback):
                self._ledger.clear()
            return before
        return self._ledger.settle(self._draft.states, undoable=undoable)

    def _compressed(self, number: int) -> dict[int, list[Payload]]:
        """The parts of a unit whose gradients are all there."""
        unit = self.plan.units[number]
        unwanted = [] if self._wanted is None else [part for part in unit.parts if part not in self._wanted]
        payloads: list[Payload] = [] if len(unwanted) == len(unit.parts) else self._draft.compress(number)
        self._compressed_units.add(number)
        for part in unwanted:
            self._draft.leave(self.plan.parts[part].start, self.plan.parts[part].end)
        self._draft.release(unit)
        if not self.sends:
            return {}
        if self._flush:
            done = self._draft.flushed(unit, unwanted)
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
