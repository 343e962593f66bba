"""Rounds in which a worker sees the part of its own changes that it has not sent (`local:overlay=on`).

With the residual e, the decay β of the compressor, and W workers in the round:

    x = base = w_global - e / W;  H steps from x;  e <- β e + (base - x);  q = C(e);  e <- e - q;  send q

The server would subtract e / W if the worker could send all of its residual. So the steps of a round continue
from all earlier steps of the worker. This is an addition of this project.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...proto import messages as m
from ..session.session import Session
from .variant import Variant, subtract


class Overlay(Variant):
    """Begins a round with this worker's share of its own residual already applied."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def start(self, assignment: m.Assignment, parameters: Sequence[torch.Tensor]) -> bool:
        return subtract(parameters, self._session.residuals(1 / max(1, assignment.world)))
