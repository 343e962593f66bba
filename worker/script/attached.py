"""The model and the optimizer that a script has attached to its job, and the session that trains them.

Whether the server or this worker takes the optimizer's steps (`steps`) decides what else follows: the
parameter groups that the server is told, the strategy of the training steps, and where the optimizer's state
is. What the server cannot do is refused when the model is attached, before any worker waits for this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...compressors import LayerRule
from ...optim.optimizer import parse_optimizer
from ...proto.moments import Moments
from ...settings import names_in
from ..session.compression import compression_of
from ..session.connection import Earlier
from ..session.groups import ONE_GROUP, ParameterGroups
from ..session.kernels import tell_of_kernels
from ..session.replica import Replica
from ..session.session import Session
from ..training.gradients import GradientStrategy
from ..training.local import LocalStrategy
from ..training.work import Local
from .forward import after_forward
from .membership import Membership
from .moments import moments_of, state_of
from .optimizer import JobOptimizer, averaging, parameter_groups
from .terms import Overlap, ScriptError, Steps, check_attached, overlaps

log = logging.getLogger("gradwire.worker")


class Attached:
    """A model in a job.

    Attributes:
        optimizer: what the script gets in place of its own.
        session: the session that trains the model; None before `begin`.
    """

    def __init__(
        self,
        member: Membership,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: Callable[[float, bool, Callable[[], Any] | None], None],
        *,
        clip_norm: float,
        steps: Steps,
        overlap: Overlap | None,
    ) -> None:
        """
        Args:
            step: see `JobOptimizer`.
            clip_norm, steps, overlap: see `Job.attach`.

        Raises:
            ScriptError: the job cannot train this.
        """
        check_attached(member.terms, member.work, clip_norm, steps)
        self.session: Session | None = None
        self._member, self._model = member, model
        self._overlap = overlaps(member.terms, overlap)
        self._steps_here = isinstance(member.work, Local) or steps == "local"
        self._warned_of_newer_state = False
        self.optimizer = JobOptimizer(optimizer, step, self._downloaded_state, here=self._steps_here)
        self._groups()  # refuses what the server cannot run

    def begin(
        self,
        train_samples: int,
        data: int,
        *,
        forward_passed: Callable[[], None],
        earlier: Callable[[], Earlier],
    ) -> tuple[Session, GradientStrategy | LocalStrategy]:
        """Move the model into a replica, and make what trains it.

        Args:
            data: checksum of the data set; 0 for none.
            forward_passed: called after each forward pass, if gradients leave during backward.
            earlier: see `Session`.
        """
        member = self._member
        settings, terms = member.settings, member.terms
        tell_of_kernels(member.connection, logging.WARNING)  # shown also where no logging is set up
        groups = self._groups()
        self.optimizer.begin()
        replica = Replica(self._model, train_samples, groups, data, masters=not self._steps_here)
        local = self._steps_here  # otherwise all groups have optimizers of one kind
        compression = compression_of(
            member.compressor,
            auto=member.auto,
            optimizer=parse_optimizer("sgd" if local else groups.groups[0].optimizer),
            local=local,
            specs=replica.manifest.specs,
            rule=LayerRule(
                dense=names_in(settings.dense_layers), compressed=names_in(settings.compressed_layers)
            ),
            terms=terms,
            rank=member.reply.rank,
        )
        self.session = session = Session(
            member.connection,
            replica,
            compression,
            member.metrics,
            initialize=member.reply.initialize,
            auto=str(member.compressor) if member.auto else "",
            buffers=terms.buffers,
            own=member.own,
            earlier=earlier,
        )
        return session, self._strategy(session, forward_passed)

    def _strategy(
        self, session: Session, forward_passed: Callable[[], None]
    ) -> GradientStrategy | LocalStrategy:
        member, work, terms = self._member, self._member.work, self._member.terms
        final = terms.overlap == "both"
        if isinstance(work, Local):
            return LocalStrategy(
                session,
                member.metrics,
                self.optimizer,
                give_up=ScriptError,
                batch_size=terms.batch_size,
                correction=work.correction,
            )
        if self._steps_here:
            return LocalStrategy(
                session,
                member.metrics,
                self.optimizer,
                give_up=ScriptError,
                batch_size=None,
                single=work.single,
                final=final,
                rates=(1.0,),
            )
        if self._overlap:
            after_forward(self._model, forward_passed)
        return GradientStrategy(
            session,
            member.metrics,
            give_up=ScriptError,
            single=work.single,
            final=final,
            overlap=self._overlap,
            rates=self.optimizer.rates,
            user_steps=True,
            remedy="; put all but the last backward pass under job.no_sync()",
        )

    def moments(self) -> Moments:
        """Return what the optimizer remembered when the job began, for the server's to continue from."""
        assert self.session is not None
        return moments_of({} if self._steps_here else self.optimizer.loaded, self.session.replica)

    def _groups(self) -> ParameterGroups:
        """Return the parameter groups as the server steps them. Raises ScriptError."""
        of = self.optimizer.of
        groups = averaging(of, self._model) if self._steps_here else parameter_groups(of, self._model)
        return ONE_GROUP if isinstance(self._member.work, Local) else groups

    def _downloaded_state(self) -> Mapping[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return what the server's optimizer remembers, by parameter."""
        member = self._member
        if member.left or self.session is None:
            raise ScriptError(
                "optimizer.state_dict(): this script has left the job, and the state is the server's; call "
                "it before that, in `with gradwire.connect() as job`"
            )
        replica = self.session.replica
        version, moments = member.connection.get_optimizer(replica.manifest)
        at = member.reply.version if replica.version is None else replica.version
        if version != at and not self._warned_of_newer_state:
            self._warned_of_newer_state = True
            log.warning(
                "optimizer.state_dict(): the state is that of version %d, and this worker's parameters are "
                "those of version %d: in mode %s the job goes on meanwhile",
                *(version, at, member.terms.mode),
            )
        return state_of(moments, replica)
