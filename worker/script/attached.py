"""The model and the optimizer that a script has attached to its job, and the session that trains them.

Either the server or this worker takes the optimizer's steps (`steps`). This determines the parameter groups
that the server receives, the strategy of the training steps, and where the optimizer's state is. An optimizer
that the server cannot run is refused when it is attached, before other workers wait for this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...compressors import LayerRule
from ...optim.optimizer import parse_optimizer
from ...proto.entries import entry_bytes
from ...proto.messages import EntryKind
from ...proto.moments import Moments
from ...settings import names_in
from ..session.calls import Earlier
from ..session.compression import compression_of
from ..session.groups import ONE_GROUP, ParameterGroups
from ..session.kernels import tell_of_kernels
from ..session.replica import Replica, trained_parameters
from ..session.session import Session
from ..training.gradients import GradientStrategy
from ..training.local import LocalStrategy
from ..training.work import Local
from .membership import Membership
from .model_hooks import after_forward, separate_state
from .moments import moments_of, state_of
from .optimizer import JobOptimizer, averaging_groups, check_kind, parameter_groups
from .terms import Frozen, Overlap, ScriptError, Steps, check_attached, check_model, check_optimizer, overlaps

log = logging.getLogger("gradwire.worker")


LARGE_BYTES = 64 << 20  # of frozen parameters, whose upload a warning announces


def tell_of_frozen(replica: Replica) -> None:
    """Warn of an upload of frozen parameters that are large, and more than those that are trained."""
    manifest = replica.manifest
    size = sum(entry_bytes(each) for each in manifest.entries if each.kind is EntryKind.FROZEN)
    if size >= LARGE_BYTES and size > manifest.raw_bytes:
        log.warning(
            "this worker uploads %.3g GB of frozen parameters. If every worker has the same ones, "
            "job.attach(..., frozen='local') leaves them where they are",
            size / 1e9,
        )


class Attached:
    """A model and its optimizer in a job. `Job.attach` makes it; `begin` starts its training.

    Attributes:
        optimizer: optimizer that the script uses instead of its own.
        session: session that trains the model; None before `begin`.
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
        frozen: Frozen,
    ) -> None:
        """`step` pushes a step, as for `JobOptimizer`; the others are arguments of `Job.attach`, and so are
        the exceptions."""
        check_attached(member.terms, member.work, clip_norm, steps, frozen)
        self._frozen_here = frozen == "local"
        self._steps_here = isinstance(member.work, Local) or steps == "local"
        check_model(model)
        check_kind(optimizer, here=self._steps_here, workers=member.reply.workers)
        check_optimizer(member.terms, optimizer)
        self._clip_norm = 0.0 if self._steps_here else clip_norm or member.terms.clip_norm
        self.session: Session | None = None
        self._member, self._model = member, model
        self._overlap = overlaps(member.terms, overlap)
        self._warned_of_newer_state = False
        self.optimizer = JobOptimizer(optimizer, step, self._downloaded_state, here=self._steps_here)
        # Both again when batches begin; here their errors come before other workers wait for this one.
        trained_parameters(model, self._groups(), masters=not self._steps_here)

    def begin(
        self,
        train_samples: int,
        data: int,
        *,
        forward_passed: Callable[[], None],
        earlier: Callable[[], Earlier],
    ) -> tuple[Session, GradientStrategy | LocalStrategy]:
        """Move the model into a replica, and return the session and the strategy that train it.

        Args:
            data: checksum of the data set; 0 for none.
            forward_passed: function called after each forward pass, if gradients are sent during backward.
            earlier: function that returns the state of an earlier job, with which a new one begins.
        """
        member = self._member
        settings, terms = member.settings, member.terms
        tell_of_kernels(member.connection, logging.WARNING)  # WARNING appears without any logging set-up
        groups = self._groups()
        self.optimizer.begin()
        replica = Replica(
            *(self._model, train_samples, groups, data),
            masters=not self._steps_here,
            frozen_here=self._frozen_here,
            epochs=terms.epochs,
        )
        separate_state(self._model)
        if member.reply.initialize:
            tell_of_frozen(replica)
        local = self._steps_here
        compression = compression_of(
            member.compressor,
            auto=member.auto,
            # All groups have the same kind of optimizer, so the first one stands for them.
            optimizer=parse_optimizer("sgd" if local else groups.groups[0].optimizer),
            local=local,
            specs=replica.manifest.specs,
            rule=LayerRule(
                dense=names_in(settings.dense_layers), compressed=names_in(settings.compressed_layers)
            ),
            terms=terms,
            rank=member.reply.rank,
            fragments=member.work.fragments if isinstance(member.work, Local) else 1,
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
        if self._steps_here:
            session.local_rates = lambda: tuple(float(each["lr"]) for each in self.optimizer.param_groups)
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
                work=work,
                final=final,
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
        """Return the optimizer's state from before the job, for the server's; empty if steps are local."""
        assert self.session is not None
        return moments_of({} if self._steps_here else self.optimizer.initial_state, self.session.replica)

    def _groups(self) -> ParameterGroups:
        own = self.optimizer.wrapped
        groups = (
            averaging_groups(own, self._model) if self._steps_here else parameter_groups(own, self._model)
        )
        if isinstance(self._member.work, Local):
            return ONE_GROUP
        return replace(groups, clip_norm=self._clip_norm)

    def _downloaded_state(self) -> Mapping[torch.Tensor, Mapping[str, torch.Tensor]]:
        member = self._member
        if member.left or self.session is None:
            raise ScriptError(
                "optimizer.state_dict(): this script has left the job, and the server has the state; call "
                "it before leaving, in `with gradwire.connect() as job`"
            )
        replica = self.session.replica
        version, moments = member.connection.get_optimizer(replica.manifest)
        at = member.reply.version if replica.version is None else replica.version
        if version != at and not self._warned_of_newer_state:
            self._warned_of_newer_state = True
            log.warning(
                "optimizer.state_dict(): the state is from version %d, but this worker's parameters are from "
                "version %d, because in mode %s other workers' steps continue",
                *(version, at, member.terms.mode),
            )
        return state_of(moments, replica)
