"""The common part of all sparsifiers: choose some elements, and send their indices and values.

    r = g + e;  indices = the selector's choice;  send indices and values = encode(r[indices])
    e = r, except at the indices, where e = r - decode(values)

A sparsifier consists of a selector, which chooses elements, and a coder for their values, which is any
quantizer or dense format of this package (`values=`). The error of the coder stays in the residual, like the
elements that were not chosen.

`ratio` is the number of elements per kept element. The default values are bfloat16, and indices take about
their entropy. A kept element then takes 24 bits at 1 % and 27 at 0.1 %: fewer than the 32 that a ratio in
bytes would allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from .base import Compressor, Neighbours, StepContext, TensorSpec
from .dense import Dense
from .four_bit import FourBit
from .indices import seeded_payload, sparse_payload
from .kernels import devices, selection
from .kernels.shared import Selection
from .linear import eight_bit
from .one_bit import OneBit
from .payload import DenseFormat, Float32, IndexCoding, Int64, SparsePayload, ValuePayload
from .reduction import decode
from .sparsifiers import SparseOptions, Values


def coder_of(values: Values) -> Compressor:
    match values:
        case Values.EIGHT_BIT:
            return eight_bit()
        case Values.FOUR_BIT:
            return FourBit()
        case Values.ONE_BIT:
            return OneBit()
        case _:
            return Dense(format=DenseFormat[values.name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse:
    """A sparsifier: a selector, and a coder of values, whose state is the sparsifier's only state.

    Attributes:
        options: options that all sparsifiers share.
        select: function that chooses about `keep` elements of a total (float32, shape (elements,)); arguments
            total, keep, context.
        add_and_select: function that adds gradient and residual, saturating, into `left`, and chooses from
            the sum in the same pass; arguments gradient, residual, keep, left. It raises FloatingPointError
            for a gradient that is not finite. None where there is no such pass.
        select_each: function that chooses from each of several tensors on the host that lie end to end;
            arguments values, tensors, and the number of elements of each (int64, shape (tensors,)). None
            where each tensor takes a call of its own.
        drawn: coding by which the receiver draws the indices itself; None where they travel.
    """

    options: SparseOptions
    coder: Compressor
    select: Callable[[torch.Tensor, int, StepContext], Selection]
    add_and_select: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], Selection] | None = None
    select_each: Callable[[Float32, Neighbours, Int64], Selection] | None = None
    drawn: IndexCoding | None = None

    def init(self, spec: TensorSpec) -> Any:
        return self.coder.init(spec)

    def compress(self, gradient: torch.Tensor, state: Any, context: StepContext) -> tuple[SparsePayload, Any]:
        elements = gradient.numel()
        chosen = self.select(gradient, self.keep(elements, context), context)
        return self._encode(elements, chosen, state, context)

    @property
    def seeded(self) -> bool:
        return self.drawn is not None

    @property
    def out_of_place(self) -> bool:
        return self.add_and_select is not None

    def compress_with_residual(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor,
        state: Any,
        context: StepContext,
        left: torch.Tensor | None = None,
    ) -> tuple[SparsePayload, Any]:
        elements = residual.numel()
        keep = self.keep(elements, context)
        if self.add_and_select is not None:
            left = residual if left is None else left
            chosen = self.add_and_select(gradient, residual, keep, left)
            residual = left
        else:
            devices.add_to(residual, gradient)
            chosen = self.select(residual, keep, context)
        payload, state = self._encode(elements, chosen, state, context)
        devices.put(residual, chosen.indices, chosen.values - decode(payload.value_payload()))
        return payload, state

    def spanning(self, tensors: Neighbours) -> Sparse:
        """Return a sparsifier for tensors laid end to end, which chooses from each of them separately.

        Indices ascend from tensor to tensor, so that one list of them serves all tensors.
        """
        epoch = tensors.context(0).epoch
        keep = {size: self.options.keep(size, epoch) for size in set(tensors.sizes.tolist())}
        keeps = np.array([keep[size] for size in tensors.sizes.tolist()], np.int64)

        def select(total: torch.Tensor, *_: object) -> Selection:
            return self._select_each(total, tensors, keeps)

        def add_and_select(
            gradient: torch.Tensor, residual: torch.Tensor, _: int, left: torch.Tensor
        ) -> Selection:
            selection.add_into(gradient.numpy(), residual.numpy(), left.numpy())
            return select(left)

        return replace(self, select=select, add_and_select=add_and_select)

    def _select_each(self, total: torch.Tensor, tensors: Neighbours, keeps: Int64) -> Selection:
        """Choose from neighbouring small tensors in one kernel call, from each large one in its own."""
        assert self.select_each is not None
        bounds, found = tensors.bounds(), list[Selection]()
        for small, group in groupby(
            range(len(bounds)), lambda place: tensors.sizes[place] <= selection.SMALL
        ):
            places = list(group)
            first, last = places[0], places[-1] + 1
            if small:
                start = bounds[first][0]
                values = total[start : bounds[last - 1][1]].numpy()
                chosen = self.select_each(values, tensors.part(first, last), keeps[first:last])
                found.append(chosen.moved(start))
                continue
            for place in places:
                start, end = bounds[place]
                alone = self.select(total[start:end], int(keeps[place]), tensors.context(place))
                found.append(alone.moved(start))
        if len(found) == 1:
            return found[0]
        return Selection(*(np.concatenate(each) for each in zip(*found, strict=True)))

    def keep(self, elements: int, context: StepContext) -> int:
        if context.keep is not None:
            return context.keep
        return self.options.keep(elements, context.epoch, context.density)

    def _encode(
        self, elements: int, chosen: Selection, state: Any, context: StepContext
    ) -> tuple[SparsePayload, Any]:
        # Magnitudes in the context are those of all elements, not those of the chosen values.
        context = replace(context, magnitudes=None)
        values, state = self.coder.compress(torch.from_numpy(chosen.values), state, context)
        assert isinstance(values, ValuePayload)
        if self.drawn is not None:
            return seeded_payload(elements, context.shared_seed, values, self.drawn), state
        return sparse_payload(elements, chosen.indices, values), state
