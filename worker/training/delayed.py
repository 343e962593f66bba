"""A round whose steps are taken while the change of the previous round is exchanged (`local:delayed=on`).

After pushing its change c_s of round s, a worker takes the steps of round s + 1 at once, on the samples that
the server has announced (`Assignment.next`). It starts from the last global model that it has, less its own
change:

    x_0 = w_s - c_s
    c_{s+1} = x_0 - x_H, after H steps from x_0
    w_{s+2} = w_{s+1} - outer(mean over workers of c_{s+1})

It pushes c_{s+1} when it has w_{s+1} and the assignment that it expected, and continues from w_{s+1} -
c_{s+1}. Therefore the steps of a round lack the changes that other workers made in the previous round: a
staleness of one round. With plain averaging and no pull, this is CoCoD-SGD (Shen et al., IJCAI 2019): the
points at which workers start a round have the mean w_{s+1}. Each worker starts the next round at that mean,
moved by its own change since. Overlap Local-SGD (Wang et al., 2020) is different: there a worker keeps its
model, and is pulled part of the way to that mean. In the multi-step paper each round begins with the model
that the last one made.

A step pulls towards x_0, the worker's estimate of the global model. A pull towards w_s would undo c_s, which
is being exchanged. The learning rates are those of round s, because the next ones are not known yet.

While a round is computed early, updates wait in the connection: the parameters return to w_s before
`Session.next` applies any update. The shard takes no part in this. Control only determines the number of
steps one round earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...proto import messages as m
from .variant import Changes, Variant, subtract


class Delayed(Variant):
    """Begins one round at the global model less this worker's change of the previous round."""

    def __init__(self, before: Changes) -> None:
        """before: the change of the previous round, which the replica lacks."""
        self._before = before

    def start(self, assignment: m.Assignment, parameters: Sequence[torch.Tensor]) -> bool:
        return subtract(parameters, self._before)
