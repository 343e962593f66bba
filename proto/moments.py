"""An optimizer's state on the wire: float32 values, moment by moment, end to end.

A moment is one tensor of torch's optimizer state, such as Adam's `exp_avg` of one parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..optim.optimizer import optimizer_spec, parse_optimizer
from ..optim.steps import COUNT, memory_names
from .manifest import Manifest
from .messages import Moment
from .refusal import Reason, Refused, refused
from .transfer import Bytes, TransferBuffer, encode_chunks

TRANSFER = 2  # transfer number of the chunks
NEVER_NEGATIVE = (COUNT, "exp_avg_sq", "sum")  # moments of which torch takes square roots, and the count

# By index of the parameter, its moments: flat float32 values by torch's name; a step count has one element.
Moments = Mapping[int, Mapping[str, npt.NDArray[np.float32]]]


class _Chunks:
    """Chunk messages that are encoded each time they are read: a list of them would be a second state."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return encode_chunks(TRANSFER, self._parts)


def encode_moments(moments: Moments) -> tuple[tuple[Moment, ...], Iterable[bytes]]:
    """Return the list of moments for a header, and the chunk messages that follow it, encoded while read."""
    named = [(tensor, name, moments[tensor][name]) for tensor in sorted(moments) for name in moments[tensor]]
    listed = tuple(Moment(tensor=tensor, name=name) for tensor, name, _ in named)
    return listed, _Chunks([values.view(np.uint8) for _, _, values in named])


class MomentValues(TransferBuffer):
    """Buffer for the values of moments while their chunks arrive."""

    def __init__(self, moments: Sequence[Moment], manifest: Manifest, *, worker: str) -> None:
        """Check the list of moments, then allocate the buffer.

        Args:
            moments: list of moments from a header.
            manifest: manifest of the model that the optimizer steps.

        Raises:
            Refused: TENSOR, for a moment that its parameter's optimizer does not have, a repeated one, or a
                parameter with some of its moments but not all.
        """
        self._manifest = manifest
        self._moments = moments
        names: dict[int, list[str]] = {}
        for moment in moments:
            if moment.tensor >= manifest.parameters:
                limit = f"parameters below {manifest.parameters}, the number of parameters"
                raise self._refused(worker, limit, str(moment.tensor))
            names.setdefault(moment.tensor, []).append(moment.name)
        if names and not manifest.groups:
            raise self._refused(worker, "a job of scripts, whose parameter groups name an optimizer", "none")
        for tensor, found in names.items():
            spec = manifest.groups[manifest.tensors[tensor].group].optimizer
            expected = sorted(memory_names(parse_optimizer(spec)))
            if sorted(found) != expected:
                kind = optimizer_spec(parse_optimizer(spec)).partition(":")[0]
                where = f"{manifest.specs[tensor].name!r}, which {kind} steps"
                raise self._refused(
                    worker, f"{', '.join(expected) or 'nothing'} of {where}", ", ".join(found)
                )
        super().__init__(TRANSFER, 4 * sum(self._elements(each) for each in moments), worker=worker)

    @staticmethod
    def _refused(worker: str, limit: str, value: str) -> Refused:
        remedy = "load the state_dict of an optimizer of the same kind, for the same model"
        field = "state of the optimizer"
        return refused(Reason.TENSOR, worker=worker, field=field, limit=limit, value=value, remedy=remedy)

    def _elements(self, moment: Moment) -> int:
        return 1 if moment.name == COUNT else self._manifest.specs[moment.tensor].elements

    def finish(self) -> Moments:
        """Return the values by tensor and name, once all have arrived; they share memory.

        Raises:
            Refused: NON_FINITE or TENSOR, for a value that the optimizer cannot have computed.
        """
        assert self.complete
        found: dict[int, dict[str, npt.NDArray[np.float32]]] = {}
        flat, at = self.data.view(np.float32), 0
        for moment in self._moments:
            values = flat[at : at + self._elements(moment)]
            at += values.size
            self._check(moment, values)
            found.setdefault(moment.tensor, {})[moment.name] = values
        return found

    def _check(self, moment: Moment, values: npt.NDArray[np.float32]) -> None:
        """Raise Refused if a value is not finite, or negative where it cannot be."""
        name = f"{moment.name} of {self._manifest.specs[moment.tensor].name!r}"
        reason, limit = Reason.UNSPECIFIED, ""
        if not np.isfinite(values).all():
            reason, limit = Reason.NON_FINITE, "finite values"
        elif moment.name in NEVER_NEGATIVE and values.size and values.min() < 0:
            reason, limit = Reason.TENSOR, "values of 0 or more"
        if limit:
            got = "an infinity or a NaN" if reason is Reason.NON_FINITE else "negative values"
            raise refused(reason, worker=self.worker, field=name, limit=limit, value=got)
