"""Compression of the parts that an assignment requests. There are three cases:

1. All parts of the model.
2. A slice, where members of a round compute the same gradient and divide the parts among them.
3. The parts that a lost worker had not pushed.

In a job whose plans depend on norms (`--fusion seamgs`), the version of the assignment decides whether the
server measures the push (`planning/norms`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...common.configuration import UsageError
from ...common.spec import SpecError
from ...compressors import (
    AUTO,
    Bases,
    CompressorSpec,
    LayerRule,
    Ledger,
    ModelCompressor,
    PushTerms,
    Step,
    TensorSpec,
    advice,
    compressor_for,
    compressor_of,
    suited,
)
from ...optim.optimizer import OptimizerGroup
from ...optim.steps import OptimizerOptions
from ...planning import is_measured, parse_fusion
from ...proto.manifest import Manifest
from ...proto.messages import Assignment
from ...settings import JobTerms, WorkerSettings
from .shared import SharedState

log = logging.getLogger("gradwire.worker")


def check_preset(settings: WorkerSettings, terms: JobTerms) -> None:
    """Raise UsageError if this worker joins only jobs of a preset, and this job has another one or none."""
    if settings.preset not in ("", terms.preset):
        has = f"has --preset {terms.preset}" if terms.preset else "has no preset"
        raise UsageError(
            f"--preset {settings.preset}: job {terms.id} {has}; start the server with --preset "
            f"{settings.preset}, or leave it out here"
        )


def jobs_compressor(terms: JobTerms) -> tuple[CompressorSpec, bool]:
    """Return the compressor that the job names for workers without their own, and True if it is to be turned
    off where it loses time; log it. Raises UsageError if this release does not know it, or it is a third
    party's.
    """
    try:
        found, auto = compressor_of(terms.compressor, received=True)
    except SpecError as error:
        raise UsageError(f"--compressor of the server: {error}") from None
    source = f"by --preset {terms.preset} of the server" if terms.preset else "as the server says"
    log.info("compressor %s, %s", terms.compressor, source)
    return found, auto


def for_model(
    compressor: CompressorSpec, *, auto: bool, specs: Sequence[TensorSpec], terms: JobTerms
) -> tuple[CompressorSpec, bool]:
    """Return the compressor for the job's model, and True if it is to be turned off where it loses time.

    They are those given, unless the job's `auto` chooses a compressor with bases, which is logged.
    """
    if not auto or terms.compressor != AUTO:
        return compressor, auto
    chosen, why = compressor_for(AUTO, specs)
    log.info("compressor auto: %s, because %s", chosen, why)
    return chosen, not chosen.shared


def compression_of(
    spec: CompressorSpec,
    *,
    auto: bool,
    optimizer: OptimizerOptions,
    local: bool,
    specs: Sequence[TensorSpec],
    rule: LayerRule,
    terms: JobTerms,
    rank: int,
    fragments: int = 1,
) -> Compression:
    """Create the compression for a job, and log adaptations and warnings about the choice of compressor.
    Raises UsageError if the compressor does not suit pushes of a fragment. spec: compressor that the user
    requested; unless `auto`, it is adapted to the optimizer.
    """
    if fragments > 1 and (auto or (spec.wrapping is not None and spec.wrapping.delay > 1)):
        why = "compares pushes of the whole model" if auto else "would skip the turns of some fragments"
        name = "auto" if auto else spec
        raise UsageError(
            f"--compressor {name}: not with --mode local:fragments={fragments}: it {why}; name a compressor "
            "without a delay"
        )
    chosen = spec if auto else suited(spec, optimizer, local=local)
    if chosen != spec:
        log.info(
            "using compressor %s, because the server's optimizer is %s", chosen, type(optimizer).__name__
        )
    for line in advice(chosen, optimizer, local=local):
        log.warning("%s", line)
    compressor = ModelCompressor(specs, chosen, rule, terms.seed, rank)
    takes_norms = parse_fusion(terms.fusion).takes_norms
    job = OptimizerGroup(options=optimizer, learning_rate=terms.learning_rate)
    of_job = Bases.of_job(specs, chosen, terms.seed) if chosen.shared else None
    return Compression(
        compressor, in_parts=terms.overlap == "both", takes_norms=takes_norms, bases=of_job, job=job
    )


class Compression:
    """Begins each step's compression with the parts, rank and scale that its assignment requests.

    Attributes:
        carried: changes of local steps that wait for the turn of their fragment, by tensor; empty for none.
            They are replaced, never altered.
    """

    def __init__(
        self,
        compressor: ModelCompressor,
        *,
        in_parts: bool = False,
        takes_norms: bool = False,
        bases: Bases | None = None,
        job: OptimizerGroup | None = None,
    ) -> None:
        """
        Args:
            in_parts: True if parts count before their commit (`--overlap both`), so that a substitute may
                push the remaining parts of this worker's push.
            bases: the job's bases at version 0; None for a compressor without.
            job: the job's optimizer, for parameter groups without their own.
        """
        self.compressor, self._bases, self._job = compressor, bases, job
        self.carried: Sequence[torch.Tensor | None] = ()
        self._in_parts, self._takes_norms = in_parts, takes_norms
        self._slice = 0, 0  # number of the slice, and number of slices; 0 of 0 stands for all parts

    def shared_state(self, manifest: Manifest) -> SharedState | None:
        """Return a replica's state beside its values, at version 0; None for a compressor without bases."""
        if self._bases is None or self._job is None:
            return None
        return SharedState(self._bases, manifest.optimizer_groups(self._job), manifest.group_of)

    @property
    def ledger(self) -> Ledger:
        """The residual ledger: gradients that this worker has computed and not sent."""
        return self.compressor.ledger

    @property
    def norm(self) -> float:
        """Euclidean norm of the residual and the carried changes."""
        carried = [float(each.square().sum().sqrt()) for each in self.carried if each is not None]
        return math.hypot(self.ledger.norm(), *carried)

    @property
    def empty(self) -> bool:
        """True if there is neither a residual nor a carried change."""
        return self.ledger.empty and all(each is None for each in self.carried)

    def drop(self) -> None:
        """Drop the residual and the carried changes."""
        self.ledger.clear()
        self.carried = ()

    def image(self) -> dict[str, Any]:
        """Return the state that `restore` continues from, as plain values and tensors."""
        return {"ledger": self.ledger.image(), "slice": self._slice, "carried": list(self.carried)}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace residuals, compressors' states and carried changes by those that `image` returned."""
        self.ledger.restore(image["ledger"])
        self._slice = image["slice"]
        self.carried = image.get("carried", ())  # states of earlier builds have none

    def begin(self, assignment: Assignment, terms: PushTerms, *, leaving: bool) -> Step:
        """Begin to compress the gradients that answer an assignment. leaving: True to send the whole residual
        too, of all parts, as float32. Ignored if the assignment names the parts to send, because the lost
        worker's other parts count already.
        """
        given = assignment.slice, assignment.slices
        if given != self._slice:
            self._slice = given
            self.compressor.set_slices(max(1, assignment.slices))
        # Members of a group compute the same gradient and send different slices: each has a rank of its own.
        rank = (terms.rank or 0) * max(1, assignment.slices) + assignment.slice
        wanted = None
        if assignment.slices > 1:
            wanted = self.compressor.plan.slice(*given)
        elif assignment.parts:
            wanted = frozenset(assignment.parts)
        delay = self.compressor.wrapping.delay
        given_terms = replace(
            terms,
            rank=rank,
            epoch=assignment.progress,
            workers=assignment.world,
            wanted=wanted,
            flush=leaving and not assignment.parts,
            measured=self._takes_norms and is_measured(assignment.version, delay),
        )
        return self.compressor.begin(given_terms)

    def undoable(self, assignment: Assignment) -> bool:
        """Return True if a push that answers the assignment may have to be undone as redundant.

        That is so where other workers compute the same gradient, or a substitute may have to.
        """
        return self._in_parts or assignment.slices > 1 or assignment.stragglers > 0
