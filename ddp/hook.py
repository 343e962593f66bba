"""The hook that DistributedDataParallel calls, and what it keeps.

Nothing is committed, and the future of no bucket is done, before the last bucket of the step: by then every
rank has every frame, so that all ranks void a step alike. All collectives are begun in the order in which DDP
calls the hook, none in a callback, so that their order is the same on every rank. Random numbers follow from
the numbers of parameters, so that buckets do not affect the bits.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # as `torch.distributed` has it

from ..common.spec import SpecError
from ..compressors import (
    CompressorSpec,
    LayerRule,
    NonFiniteGradient,
    Spike,
    advice,
    described,
    norm,
    parse_compressor,
    suited,
    tell_of_compiling,
)
from ..optim.steps import Adam, OptimizerOptions, Sgd
from .bundle import Bundle, Owed, Parameter, SavedState, Terms, mean, plain
from .exchange import Flight, Frame, Gather, checksum, from_bytes, to_bytes

DTYPES = torch.float32, torch.bfloat16, torch.float16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """buffer: of torch's bucket, of one dimension. future: of what takes the place of what it holds."""

    buffer: torch.Tensor
    parameters: Sequence[Parameter]
    future: torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A bundle whose frame is on its way. agreed: the checksum of the frame."""

    bundle: Bundle
    buckets: Sequence[_Bucket]
    agreed: int
    flight: Flight


class HookState:
    """What a rank keeps for `hook`: residuals, what compressors remember, counts of bytes.

    Per step and tensor, in the order that a worker of Gradwire has:

        clip -> momentum -> the residual is added -> compress; what is not sent is the next residual
        -> all-gather -> decode and average in rank order -> the optimizer, on every rank

    So all ranks end with the same bits, whatever the buckets are. A residual is added to the next gradient of
    its tensor, also where DDP has arranged the buckets anew, as it does after its first step.

    Attributes:
        compressor: what the gradients are compressed with, as it suits the optimizer.
        epoch: passes over the training samples so far, for the warm-up of sparsifiers such as `dgc`: set it
            as you set a sampler's. Infinite, and so no warm-up, until then.
        steps: that have been taken.
        voided: of these, how many came to nothing because a gradient was not finite.
        spikes: gradients of this rank's tensors that were far larger than usual, and went out as float32.
        bytes_sent: that this rank has given to be gathered, with all headers. Each goes to every other rank.
        raw_bytes: of the gradients in the buckets, as they came.
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
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            compressor: `name[:key=value,...]`, as of `gc-worker --compressor`; not `auto`. The same on every
                rank, like `rule`, `seed` and the kind of `optimizer`.
            optimizer: that steps the gradients, to go by what it is and no more: `4bit` leaves its feedback
                out where that divides by the root of squared gradients, as Adam does, and what was measured
                to lose with it is warned of. One with an `eps` among its `defaults` is taken for such a one.
                Without it nothing of this is done.
            named_parameters: of the module that DDP wraps. `rule` needs the names, and so does a state that
                is loaded where buckets have another size. Without them a tensor is called by the order in
                which DDP first hands it over.
            rule: which tensors are compressed; without one, all of two or more dimensions. Others travel as
                bfloat16, with feedback, unless `compressor` is itself one in floats.
            seed: of random numbers, at least 0.
            samples: behind each rank's mean gradient, at least 1. Only thresholds for summed gradients ask:
                `2bit`, `threshold` and `4bit:levels=groups`.
            process_group: DDP's; the default one if None.

        Raises:
            SpecError: no such compressor, or `delay`, which DDP cannot do: accumulate with its `no_sync`.
            ValueError: seed or samples are out of range.
        """
        chosen = parse_compressor(compressor)
        if optimizer is not None:
            chosen = _suited(chosen, _options(optimizer))
        wrapping = chosen.wrapping
        if wrapping is not None and wrapping.delay > 1:
            limit = f"delay=1, got {wrapping.delay}; to exchange fewer gradients use DDP's no_sync()"
            raise SpecError(f"compressor {chosen.text!r}: DDP takes every step at once: expected {limit}")
        for name, value, least in (("seed", seed, 0), ("samples", samples, 1)):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        tell_of_compiling(_log.warning)  # shown also where no logging is set up
        self.compressor = chosen.text
        self._terms = Terms(compressor=chosen, rule=rule or LayerRule(), seed=seed)
        self._samples, self._group = samples, process_group
        self._by_norm = chosen.chooses_by_norm
        # These see all of the model before any of it is compressed.
        clips = wrapping is not None and wrapping.clip > 0
        self._whole = clips or self._by_norm or chosen.entry.model_wide
        self._names: dict[torch.Tensor, tuple[int, str]] | None = None
        if named_parameters is not None:
            self._names = {each: (number, name) for number, (name, each) in enumerate(named_parameters)}
        self._parameters: dict[torch.Tensor, Parameter] = {}
        self._owed: dict[str, Owed] = {}
        self._norms: dict[str, float] = {}
        self._loaded = False
        self._bundles: dict[tuple[str, ...], Bundle] = {}
        self._gather: Gather | None = None
        self._waiting: list[_Bucket] = []
        self._sent: list[_Sent] = []
        self.epoch = float("inf")
        self.steps = self.voided = self.spikes = self.raw_bytes = 0

    @property
    def bytes_sent(self) -> int:
        return 0 if self._gather is None else self._gather.sent

    def state_dict(self) -> dict[str, Any]:
        """What this rank, and no other, needs to go on: plain values and tensors on the host, no classes.

        So `torch.load(weights_only=True)` reads it.

        Raises:
            RuntimeError: between the first bucket of a step and the last.
            TypeError: a third party's compressor remembers what is not made of plain values.
        """
        self._between_steps()
        owed = dict(self._owed)
        for bundle in self._bundles.values():
            owed.update(bundle.owed())
        return {
            "compressor": self.compressor,
            "seed": self._terms.seed,
            "steps": self.steps,
            "epoch": self.epoch,
            "norms": dict(self._norms),
            "residuals": {n: each.residual.cpu() for n, each in owed.items() if each.residual is not None},
            "velocities": {n: each.velocity.cpu() for n, each in owed.items() if each.velocity is not None},
            "states": {n: plain(each.state) for n, each in owed.items() if each.state is not None},
            "usual": {n: list(each.usual) for n, each in owed.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `saved` was taken, on every rank with its own.

        Raises:
            RuntimeError: between the first bucket of a step and the last.
            ValueError: it is of another compressor or seed. Tensors that do not fit are found in the next
                step, which raises ValueError with their names.
        """
        self._between_steps()
        for name, own in (("compressor", self.compressor), ("seed", self._terms.seed)):
            if saved[name] != own:
                raise ValueError(f"{name}: expected a state of {own!r}, got one of {saved[name]!r}")
        residuals, velocities, states = (saved[name] for name in ("residuals", "velocities", "states"))
        usual = saved.get("usual", {})  # not in states of older releases: what is usual is then found anew
        self._owed = {
            name: Owed(
                residual=residuals.get(name),
                velocity=velocities.get(name),
                state=SavedState(states[name]) if name in states else None,
                usual=usual.get(name, Owed().usual),
            )
            for name in {**residuals, **velocities, **states, **usual}
        }
        self._norms, self._loaded = dict(saved["norms"]), True
        self.steps, self.epoch = saved["steps"], saved["epoch"]
        self._bundles.clear()
        self._parameters = {
            tensor: self._named(tensor, each.name, each.number) for tensor, each in self._parameters.items()
        }

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """As of `hook`."""
        if bucket.index() == 0:
            self._drop_unfinished()
        buffer = bucket.buffer()
        parameters = [self._parameter(each) for each in bucket.parameters()]
        self._check(buffer, parameters)
        on_host = buffer.device.type == "cpu"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if on_host else [buffer.device]
        )
        self._waiting.append(_Bucket(buffer.detach(), parameters, future))
        self.raw_bytes += buffer.numel() * buffer.element_size()
        if bucket.is_last() or not self._whole:
            self._send(self._waiting)
            self._waiting = []
        if bucket.is_last():
            self._finish()
        return future

    def _between_steps(self) -> None:
        if self._waiting or self._sent:
            raise RuntimeError("state of gradwire.ddp: expected no step under way; ask after backward")

    def _drop_unfinished(self) -> None:
        """A backward pass ended before its last bucket: what its buckets owe is as it was."""
        for sent in self._sent:
            sent.flight.wait()
            sent.bundle.abandon()
        self._sent, self._waiting = [], []

    def _parameter(self, tensor: torch.Tensor) -> Parameter:
        """What is known of a parameter, from the first time on that DDP hands it over."""
        if tensor not in self._parameters:
            number = len(self._parameters)
            name = f"parameter {number}"
            if self._names is not None:
                if tensor not in self._names:
                    got = f"a bucket with another, of shape {tuple(tensor.shape)}"
                    remedy = "give named_parameters() of the module that DDP wraps"
                    raise ValueError(f"named_parameters: expected all parameters, got {got}; {remedy}")
                number, name = self._names[tensor]
            self._parameters[tensor] = self._named(tensor, name, number)
        return self._parameters[tensor]

    def _named(self, tensor: torch.Tensor, name: str, number: int) -> Parameter:
        if self._by_norm and name not in self._norms:
            self._norms[name] = norm(tensor.detach().flatten().float())
        shape = tuple(tensor.shape)
        return Parameter(name=name, number=number, shape=shape, norm=self._norms.get(name, 0.0))

    @staticmethod
    def _check(buffer: torch.Tensor, parameters: Sequence[Parameter]) -> None:
        if buffer.layout is not torch.strided or buffer.dtype not in DTYPES:
            got = f"{buffer.dtype} ({buffer.layout})"
            known = ", ".join(map(str, DTYPES))
            remedy = "convert these parameters, or have DDP ignore them; no sparse=True in embeddings"
            raise TypeError(
                f"gradient of {parameters[0].name!r}: expected a dense one of {known}, got {got}; {remedy}"
            )

    def _bundle(self, parameters: Sequence[Parameter]) -> Bundle:
        """The one with these tensors; made anew if buckets are no longer as they were."""
        key = tuple(each.name for each in parameters)
        if key not in self._bundles:
            for other in [other for other in self._bundles if not {*other}.isdisjoint(key)]:
                self._owed.update(self._bundles.pop(other).owed())
            owed = {name: self._owed[name] for name in key if name in self._owed}
            self._bundles[key] = Bundle(self._terms, parameters, owed, self._gathers.rank)
            for name in owed:
                del self._owed[name]
        return self._bundles[key]

    @property
    def _gathers(self) -> Gather:
        if self._gather is None:
            gather = Gather(self._group)
            gather.agree(self._terms)
            self._gather = gather
        return self._gather

    def _send(self, buckets: Sequence[_Bucket]) -> None:
        """Compress some buckets as one bundle, and send what becomes of them."""
        bundle = self._bundle([each for bucket in buckets for each in bucket.parameters])
        pieces = [bucket.buffer.float() for bucket in buckets]
        where = pieces[0].device
        gradients = pieces[0] if len(pieces) == 1 else torch.cat([each.to(where) for each in pieces])
        agreed = checksum(self._terms, bundle.manifest, self.steps)
        try:
            frame = Frame(
                bundle.compress(gradients, self._samples, self.steps, self.epoch, self._gathers.ranks)
            )
        except NonFiniteGradient as error:
            names = [each.name for each in bundle.parameters]
            frame = Frame((), names.index(error.name))
        slot = f"{bundle.parameters[0].name} {len(bundle.parameters)}"
        flight = self._gathers.begin(slot, to_bytes(frame, agreed))
        self._sent.append(_Sent(bundle, buckets, agreed, flight))

    def _finish(self) -> None:
        """All buckets of the step are on their way: take in what comes, and tell DDP."""
        self._check_loaded()
        bad: list[str] = []
        for sent in self._sent:
            bundle = sent.bundle
            frames = [
                from_bytes(data, sent.agreed, bundle.part, bundle.manifest, rank=rank)
                for rank, data in enumerate(self._gathers.end(sent.flight))
            ]
            bad += [
                f"{bundle.parameters[frame.not_finite].name!r} on rank {rank}"
                for rank, frame in enumerate(frames)
                if frame.not_finite is not None
            ]
            if not bad:
                _average(frames, sent.buckets)
        spikes: list[Spike] = []
        for sent in self._sent:
            if bad:
                sent.bundle.abandon()
            else:
                spikes += sent.bundle.commit()
            for bucket in sent.buckets:
                bucket.future.set_result(bucket.buffer.fill_(torch.nan) if bad else bucket.buffer)
        self._sent = []
        self.steps += 1
        if bad:
            self.voided += 1
            what = f"gradient of {', '.join(bad)} has an infinity or a NaN"
            _log.warning("step %d: %s: all gradients are NaN, and residuals as before", self.steps, what)
        if spikes:
            self.spikes += len(spikes)
            _log.warning("rank %d, step %d: %s", self._gathers.rank, self.steps, described(spikes))

    def _check_loaded(self) -> None:
        """After the first step with a state that was loaded, nothing of it may be left."""
        if self._loaded and self._owed:
            left = ", ".join(map(repr, sorted(self._owed)))
            raise ValueError(f"state of gradwire.ddp: expected tensors of this model, got also {left}")
        self._loaded = False


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `register_comm_hook`, with a `HookState`: the mean gradient of a bucket, of all ranks.

    The bucket's own buffer takes it, cast to what it has; so `gradient_as_bucket_view` makes no difference.
    It is there after the last bucket of the step.

    Where a rank has a gradient with an infinity or a NaN, all gradients of the step become NaN on all ranks,
    as DDP itself would have it, so that a `GradScaler` or a check of the norm skips the step. What is owed is
    then as it was before the step, and a warning names tensor and rank.

    Raises:
        TypeError: a gradient is sparse, or neither float32 nor bfloat16 nor float16.
        RanksDisagree: a rank has another compressor, seed or model, or is at another step.
        Refused: what a rank sent was damaged on its way.
        ValueError: `named_parameters` lacks a parameter, or a state that was loaded does not fit the model.
    """
    return state.take(bucket)


def _suited(compressor: CompressorSpec, options: OptimizerOptions) -> CompressorSpec:
    """Return the compressor as it suits the optimizer; log what was changed, and what loses."""
    chosen = suited(compressor, options, local=False)
    if chosen != compressor:
        _log.info("compressor %s, because the optimizer is like Adam", chosen)
    for line in advice(chosen, options, local=False, server=False):
        _log.warning("%s", line)
    return chosen


def _options(optimizer: torch.optim.Optimizer) -> OptimizerOptions:
    """Of the optimizer of ours that a compressor fares with as with this one."""
    if "eps" in optimizer.defaults:
        return Adam()
    return Sgd(momentum=0.9 if optimizer.defaults.get("momentum") else 0.0)


def _average(frames: Sequence[Frame], buckets: Sequence[_Bucket]) -> None:
    """Put the mean of what ranks sent into the buffers of buckets."""
    pushes = [frame.payloads for frame in frames]
    only = buckets[0].buffer
    if len(buckets) == 1 and only.device.type == "cpu" and only.dtype is torch.float32:
        mean(pushes, only.numpy())
        return
    sizes = [bucket.buffer.numel() for bucket in buckets]
    out = np.empty(sum(sizes), np.float32)
    mean(pushes, out)
    values = torch.split(torch.from_numpy(out), sizes)
    for bucket, value in zip(buckets, values, strict=True):
        bucket.buffer.copy_(value)
