"""The communication hook that DistributedDataParallel (DDP) calls, and its state.

No bundle is finished and no bucket's future completes before the last bucket of the step. Every rank has
every frame by then, so all ranks void the same steps: they discard a step in which a gradient of any rank is
not finite. The hook begins all collectives itself, none in a callback, so their order is the same on every
rank. Random numbers are seeded by the numbers of parameters, so buckets do not affect the bits.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # as `torch.distributed` has it

from ..common.machine import cores
from ..common.one_line import show_in_one_line
from ..common.spec import SpecError
from ..compressors import (
    LayerRule,
    Payload,
    Spike,
    TensorSpec,
    described,
    limit_threads,
    norm,
    parse_compressor,
    tell_of_compiling,
)
from ..proto.refusal import Refused
from .buckets import Bucket, Piece, bundled, check, fill, gradients_of, large
from .bundle import Bundle, Bundles, Parameter, Terms
from .exchange import Collectives, Group, RanksDisagree, checksum
from .lost import RankLost
from .shares import ENTROPY, EXCHANGES, Entropy, Exchange, Shares, decide, decide_packing, for_owners
from .stages import Gathered, Owned, Passage, Travelling, framed
from .suiting import suited_to
from .watch import Watch

_log = logging.getLogger(__name__)


class HookState:
    """One rank's state for `hook`: residuals, states of compressors, counters.

    Give it to `register_comm_hook` together with `hook`.

    Each step processes each tensor in the order of a Gradwire worker:

        clip -> momentum -> add the residual -> compress; the unsent rest is the next residual
        -> all-gather -> decode and average in rank order -> the optimizer, on every rank

    With owners, the exchange has two stages:

        -> all-to-all of shares -> the owner of a share averages in rank order, adds its own residual, and
        compresses -> all-gather -> decode -> the optimizer, on every rank

    So all ranks end with the same bits, independent of the buckets. A residual stays with its tensor when DDP
    rearranges the buckets after its first step.

    Attributes:
        compressor: spec of the compressor, adapted to the optimizer.
        epoch: passes over the training samples so far, for the warm-up of sparsifiers such as `dgc`. Set it
            where you set a sampler's epoch. Infinite until it is set, which means no warm-up.
        steps: number of steps so far, with those that are counted in `voided`.
        voided: number of steps whose gradients became NaN because a gradient of some rank was not finite.
        spikes: number of this rank's gradients that were far larger than usual, and were sent as float32.
        owners: True if means go through owners; None until `exchange="auto"` is decided, in the first step.
        raw_bytes: bytes of this rank's gradients in the buckets so far, as float32.

    Example:
        >>> model = torch.nn.parallel.DistributedDataParallel(model)
        >>> state = gradwire.ddp.state("topk:ratio=10", optimizer=optimizer)
        >>> model.register_comm_hook(state, gradwire.ddp.hook)
        >>> model(dataset[0][0]).sum().backward()
        >>> state.steps
        1
    """

    def __init__(
        self,
        compressor: str = "4bit",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        rule: LayerRule | None = None,
        seed: int = 0,
        samples: int = 1,
        exchange: Exchange = "auto",
        entropy: Entropy = "auto",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            compressor: `name[:key=value,...]`, as in `gc-worker --compressor`; not `auto`. The same on every
                rank, like `rule`, `seed` and the kind of `optimizer`.
            optimizer: optimizer that steps the gradients. An `eps` among its `defaults` marks one that
                divides by the root of squared gradients, as Adam does: `4bit` then omits its feedback, and a
                warning names a compressor that was measured to lose accuracy. Warnings also name a hook that
                DDP does not call, and gradients that no step follows. None is like one without `eps`.
            named_parameters: names and parameters of the module that DDP wraps, for `rule` and for a state
                that is loaded where buckets have another size. Without names, tensors are numbered in the
                order in which DDP first hands them over.
            rule: selects the tensors to compress; by default all of two or more dimensions. Other tensors
                travel as bfloat16 with feedback, unless `compressor` itself sends floats.
            seed: seed of random numbers, at least 0.
            samples: number of samples of each rank's mean gradient, at least 1. Only thresholds for summed
                gradients use it: `2bit`, `threshold` and `4bit:levels=groups`.
            exchange: `gather`: every rank sends its gradients to all ranks. `owners`: every rank averages a
                share of them and sends the compressed mean to all ranks, which among N ranks takes 2 / N
                times the bytes. `auto`: owners where they save bytes, as the first step counts; never with
                sparsifiers.
            entropy: `on` packs the sent bytes by zstd, to the same decoded values; `off` does not; `auto`
                does if that saves time on the link, whose rate all ranks measure before the first step.
            process_group: process group that DDP uses; None for the default one.

        Raises:
            SpecError: the compressor is unknown, does not suit owners, or has a `delay`, which
                DDP does not support; use DDP's `no_sync` instead.
            ValueError: `seed`, `samples`, `exchange` or `entropy` is out of range.
        """
        show_in_one_line(RankLost, RanksDisagree, Refused, SpecError)
        chosen = parse_compressor(compressor)
        if optimizer is not None:
            chosen = suited_to(optimizer, chosen)
        wrapping = chosen.wrapping
        if wrapping is not None and wrapping.delay > 1:
            limit = f"expected delay=1, got {wrapping.delay}; to exchange fewer gradients use DDP's no_sync()"
            raise SpecError(f"compressor {chosen.text!r}: DDP exchanges gradients at every step: {limit}")
        for name, value, least in (("seed", seed, 0), ("samples", samples, 1)):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        for name, word, known in (("exchange", exchange, EXCHANGES), ("entropy", entropy, ENTROPY)):
            if word not in known:
                raise ValueError(f"{name}: expected {', '.join(known)}, got {word!r}")
        if exchange == "owners" and (reason := chosen.not_for_means):
            wanted = "exchange: expected auto or gather, got owners"
            raise SpecError(f"compressor {chosen.text!r}: {wanted}: {reason}")
        tell_of_compiling(_log.warning)  # shown also where no logging is set up
        self.compressor = chosen.text
        self._terms = Terms(
            compressor=chosen, rule=rule or LayerRule(), seed=seed, exchange=exchange, entropy=entropy
        )
        self._samples, self._process_group = samples, process_group
        self._by_norm = chosen.chooses_by_norm
        # Clipping and these compressors need all gradients of the step first.
        clips = wrapping is not None and wrapping.clip > 0
        self._whole = clips or self._by_norm or chosen.entry.model_wide
        self._names: dict[torch.Tensor, tuple[int, str]] | None = None
        if named_parameters is not None:
            self._names = {each: (number, name) for number, (name, each) in enumerate(named_parameters)}
        self._parameters: dict[torch.Tensor, Parameter] = {}
        self._bundles, self._owned = Bundles(), Bundles()  # of gradients; of the means that this rank owns
        self._owned_terms = replace(self._terms, compressor=for_owners(chosen))
        self._shares: dict[tuple[str, ...], Shares] = {}
        self._norms: dict[str, float] = {}
        self._loaded = False
        self._joined: Collectives | None = None
        self._packs = False
        self._link_rate = math.inf  # bytes per second; infinite where nothing is cut
        self._waiting: list[Bucket] = []
        self._sent: list[tuple[Travelling, list[Piece]]] = []
        self._unfilled: list[Bucket] = []
        self._proceeded = 0  # number of the bundles in `_sent` whose second stage has begun
        self.owners: bool | None = None if exchange == "auto" else exchange == "owners"
        self.epoch = math.inf
        self.steps = self.voided = self.spikes = self.raw_bytes = 0
        self._saved_rank: int | None = None  # of a loaded state that no step has used yet
        self._saved_ranks: int | None = None
        self._watch = Watch(optimizer)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise TypeError for a copy or a pickle: a state belongs to one model and one process."""
        raise TypeError(
            "a state of gradwire.ddp is neither copied nor pickled, because it belongs to one model and one "
            "process: save state.state_dict(), and make a new state where it is loaded"
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to each other rank so far, on average, with all headers."""
        return 0 if self._joined is None else self._joined.sent

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as plain values and host tensors, for `torch.load(weights_only=True)`.

        Raises:
            RuntimeError: a step is incomplete: DDP has handed over its first bucket and not its last.
            TypeError: the state of a third party's compressor is not made of plain values.
        """
        self._check_between_steps()
        here = dist.is_initialized()
        rank = dist.get_rank(self._process_group) if here else None
        ranks = dist.get_world_size(self._process_group) if here else None
        return {
            "compressor": self.compressor,
            "seed": self._terms.seed,
            "rank": rank if self._saved_rank is None else self._saved_rank,
            "steps": self.steps,
            "epoch": self.epoch,
            "norms": dict(self._norms),
            **self._bundles.saved(),
            "owned": {"ranks": self._saved_ranks or ranks, **self._owned.saved()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Replace this rank's state by a saved one. Every rank loads its own state, of the same step.

        A rank that has loaded another rank's state takes its counters alone: its own residuals begin anew,
        with a warning at the next step.

        Args:
            saved: state that `state_dict` returned.

        Raises:
            RuntimeError: a step is incomplete: DDP has handed over its first bucket and not its last.
            ValueError: `saved` has another compressor or seed. If its tensors do not fit the model, the next
                step raises ValueError with their names.
        """
        self._check_between_steps()
        for name, own in (("compressor", self.compressor), ("seed", self._terms.seed)):
            if saved[name] != own:
                raise ValueError(f"{name}: expected a state of {own!r}, got one of {saved[name]!r}")
        self._bundles.load(saved)
        owned = saved.get("owned")  # absent in states of older releases
        if owned is not None:
            self._owned.load(owned)
            self._saved_ranks = owned["ranks"]
        self._norms, self._loaded = dict(saved["norms"]), True
        self.steps, self.epoch = saved["steps"], saved["epoch"]
        self._saved_rank = saved.get("rank")  # absent in states of older releases
        self._parameters = {
            tensor: self._named(tensor, each.name, each.number) for tensor, each in self._parameters.items()
        }

    def add_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Compress and send a bucket's gradients, and return the future of their mean, as `hook` says.

        At the last bucket of a step, the call also receives all frames of the step and completes all futures.
        """
        if bucket.index() == 0:
            self._watch.begin()
            self._drop_unfinished()
            self._begin_anew_where_ranks_differ()
        buffer = bucket.buffer()
        parameters = [self._parameter(each) for each in bucket.parameters()]
        check(buffer, parameters)
        on_host = buffer.device.type == "cpu"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if on_host else [buffer.device]
        )
        self._waiting.append(Bucket(buffer.detach(), parameters, future))
        self.raw_bytes += 4 * buffer.numel()
        if bucket.is_last() and self.owners is None:
            self._decide()
        whole = self._whole or self.owners is None
        if bucket.is_last() or (not whole and large(self._waiting)):
            earlier = len(self._sent)
            for pieces in bundled(self._waiting, self._link_rate):
                self._send(pieces)
                # To wait for this bucket's own bundles would delay the backward pass, until it has ended.
                self._proceed(len(self._sent) - 1 if bucket.is_last() else earlier)
            self._unfilled += self._waiting
            self._waiting = []
        if bucket.is_last():
            self._finish()
        return future

    @property
    def _collectives(self) -> Collectives:
        """The process group's collectives; at the first use, ranks compare terms and measure the link."""
        if self._joined is None:
            made = self._joined = Collectives(self._process_group, self._terms)
            limit_threads(max(1, cores() // made.ranks_here()))  # a rank that waits for a core delays all
            cuts = not (self._whole or self._terms.compressor.not_for_means)
            rate = made.link_rate() if cuts or self._terms.entropy == "auto" else math.inf
            self._packs, reason = decide_packing(self._terms, rate)
            self._link_rate = rate if cuts else math.inf
            if not made.group.rank:
                _log.info("entropy coding %s: %s", "on" if self._packs else "off", reason)
        return self._joined

    @property
    def _group(self) -> Group:
        return self._collectives.group

    def _begin_anew_where_ranks_differ(self) -> None:
        """Discard residuals that another rank has saved, and those of means that other ranks own now; all
        ranks keep the same counters and norms."""
        (rank, ranks), here = (self._saved_rank, self._saved_ranks), self._group
        self._saved_rank = self._saved_ranks = None
        if rank is not None and rank != here.rank:
            self._bundles.begin_anew()
            self._owned.begin_anew()
            _log.warning(
                "rank %d: the loaded state of gradwire.ddp is that of rank %d, as a framework does that "
                "saves rank 0's for all: residuals and velocities begin anew. Save state.state_dict() on "
                "every rank, in a file of its own",
                *(here.rank, rank),
            )
        elif ranks not in (None, here.ranks) and self._owned.waiting:
            self._owned.begin_anew()
            _log.warning(
                "rank %d: the loaded state of gradwire.ddp is of %s ranks, and now there are %d: residuals "
                "of the means that this rank owns begin anew",
                *(here.rank, ranks, here.ranks),
            )

    def _decide(self) -> None:
        """Decide which exchange to use, from the gradients of the first step; check that all ranks agree."""
        tensors = [each for bucket in self._waiting for each in bucket.parameters]
        specs = [TensorSpec(name=each.name, shape=each.shape) for each in tensors]
        self.owners, reason = decide(self._terms, specs, self._group.ranks)
        chosen = "owners" if self.owners else "gather"
        self._collectives.gather.agree((self._terms, chosen))
        if not self._group.rank:
            _log.info("exchange %s: %s", chosen, reason)

    def _check_between_steps(self) -> None:
        """Raise RuntimeError if DDP has handed over the first bucket of a step and not the last."""
        if self._waiting or self._sent:
            raise RuntimeError("state of gradwire.ddp: the step is incomplete; save or load after backward()")

    def _drop_unfinished(self) -> None:
        """Discard the buckets of a backward pass that did not reach its last bucket."""
        for travelling, _ in self._sent:
            travelling.abandon()
        self._sent, self._waiting, self._unfilled, self._proceeded = [], [], [], 0

    def _parameter(self, tensor: torch.Tensor) -> Parameter:
        """Return a parameter's description; assign name and number when it first appears in a bucket."""
        if tensor not in self._parameters:
            number = len(self._parameters)
            name = f"parameter {number}"
            if self._names is not None:
                if tensor not in self._names:
                    lacks = f"a parameter of shape {tuple(tensor.shape)} is missing"
                    remedy = "give named_parameters() of the module that DDP wraps"
                    raise ValueError(f"named_parameters: expected all parameters, {lacks}; {remedy}")
                number, name = self._names[tensor]
            self._parameters[tensor] = self._named(tensor, name, number)
        return self._parameters[tensor]

    def _named(self, tensor: torch.Tensor, name: str, number: int) -> Parameter:
        """Return the description of a tensor; measure its norm the first time, if the compressor uses it."""
        if self._by_norm and name not in self._norms:
            self._norms[name] = norm(tensor.detach().flatten().float())
        shape = tuple(tensor.shape)
        return Parameter(name=name, number=number, shape=shape, norm=self._norms.get(name, 0.0))

    def _send(self, pieces: list[Piece]) -> None:
        """Compress pieces as one bundle and begin its exchange."""
        parameters = [each for piece in pieces for each in piece.parameters]
        collectives, group = self._collectives, self._group
        bundle = self._bundles.bundle(self._terms, parameters, group.rank)
        gradients = gradients_of(pieces)
        frame = framed(bundle, lambda: self._compressed(bundle, gradients, group.ranks))
        agreed = checksum(self._terms, bundle.reader.manifest, self.steps, bundle.bases)
        name = f"{parameters[0].name} {len(parameters)}"
        passage = Passage(collectives, name, agreed, self._packs)
        travelling: Travelling
        if self.owners:
            key = tuple(each.name for each in parameters)
            if key not in self._shares:
                self._shares[key] = Shares(parameters, group.ranks)
            shares = self._shares[key]
            # A rank's means draw other random numbers than its gradients.
            owned = self._owned.bundle(self._owned_terms, shares.owned[group.rank], group.ranks + group.rank)
            travelling = Owned(passage, bundle, frame, shares, owned, self._compressed)
        else:
            travelling = Gathered(passage, bundle, frame)
        self._sent.append((travelling, pieces))

    def _proceed(self, count: int) -> None:
        """Begin the second stage of the step's first `count` bundles, if it has not begun."""
        while self._proceeded < count:
            self._sent[self._proceeded][0].proceed()
            self._proceeded += 1

    def _compressed(self, bundle: Bundle, gradients: torch.Tensor, workers: int = 1) -> list[Payload]:
        return bundle.compress(gradients, self._samples, self.steps, self.epoch, workers)

    def _finish(self) -> None:
        """Receive all means of the step, finish or void it, and complete the buckets' futures."""
        self._check_loaded()
        self._proceed(len(self._sent))
        bad: list[str] = []
        for travelling, pieces in self._sent:
            bad += travelling.receive()
            if not bad:
                fill(pieces, travelling.write)
        spikes: list[Spike] = []
        for travelling, _ in self._sent:
            if bad:
                travelling.abandon()
            else:
                spikes += travelling.finish()
        for bucket in self._unfilled:
            bucket.future.set_result(bucket.buffer.fill_(torch.nan) if bad else bucket.buffer)
        self._sent, self._unfilled, self._proceeded = [], [], 0
        self.steps += 1
        if bad:  # a step that its NaN skips discards nothing: residuals stay as they were
            self.voided += 1
            _log.warning(
                "step %d: gradient of %s has an infinity or a NaN: all gradients of the step become NaN, "
                "residuals stay unchanged",
                *(self.steps, ", ".join(bad)),
            )
        else:
            self._watch.exchanged()
        if spikes:
            self.spikes += len(spikes)
            _log.warning("rank %d, step %d: %s", self._group.rank, self.steps, described(spikes))

    def _check_loaded(self) -> None:
        """Raise ValueError if a loaded tensor is in no bundle of the first step."""
        if self._loaded and self._bundles.waiting:
            left = ", ".join(map(repr, sorted(self._bundles.waiting)))
            raise ValueError(f"state of gradwire.ddp: expected tensors of this model, got also {left}")
        self._loaded = False


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Compress a bucket's gradients, and return the future of their mean over all ranks.

    Give it to `register_comm_hook` with a `HookState`. The mean is written to the bucket's own buffer, in its
    dtype, so `gradient_as_bucket_view` works. All futures of a step complete after its last bucket.

    If any rank has a gradient with an infinity or a NaN, all gradients of the step become NaN on all ranks,
    as with DDP alone. A `GradScaler` or a check of the norm then skips the step. Residuals keep their values
    from before the step, and a warning names tensor and rank.

    Raises:
        TypeError: a gradient is sparse, or neither float32 nor bfloat16 nor float16.
        RanksDisagree: a rank has another compressor, seed or model, or is at another step.
        RankLost: a rank does not answer.
        Refused: a rank's frame was damaged.
        ValueError: `named_parameters` lacks a parameter, or a loaded state does not fit the model.
    """
    return state.add_bucket(bucket)
