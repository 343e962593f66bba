"""The communication hook that DistributedDataParallel (DDP) calls, and its state.

No bundle is finished and no bucket's future completes before the last bucket of the step. Every rank has
every frame by then, so all ranks void the same steps: they discard a step in which a gradient of any rank is
not finite. The hook begins all collectives itself, none in a callback, so their order is the same on every
rank. Random numbers are seeded by the numbers of parameters, so buckets do not affect the bits.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # as `torch.distributed` has it

from ..common.spec import SpecError
from ..compressors import (
    LayerRule,
    NonFiniteGradient,
    Spike,
    described,
    norm,
    parse_compressor,
    tell_of_compiling,
)
from .buckets import Bucket, Sent, average
from .bundle import Bundle, Parameter, SavedState, TensorState, Terms, plain_fields
from .exchange import Frame, Gather, checksum, from_bytes, to_bytes
from .suiting import suited_to

DTYPES = torch.float32, torch.bfloat16, torch.float16

_log = logging.getLogger(__name__)


class HookState:
    """One rank's state for `hook`: residuals, states of compressors, counters.

    Give it to `register_comm_hook` together with `hook`.

    Each step processes each tensor in the order of a Gradwire worker:

        clip -> momentum -> add the residual -> compress; the unsent rest is the next residual
        -> all-gather -> decode and average in rank order -> the optimizer, on every rank

    So all ranks end with the same bits, independent of the buckets. A residual stays with its tensor when DDP
    rearranges the buckets after its first step.

    Attributes:
        compressor: spec of the compressor, adapted to the optimizer.
        epoch: passes over the training samples so far, for the warm-up of sparsifiers such as `dgc`. Set it
            where you set a sampler's epoch. Infinite until it is set, which means no warm-up.
        steps: number of steps so far, with those that are counted in `voided`.
        voided: number of steps whose gradients became NaN because a gradient of some rank was not finite.
        spikes: number of this rank's gradients that were far larger than usual, and were sent as float32.
        bytes_sent: bytes that this rank has sent to each other rank so far, with all headers.
        raw_bytes: bytes of this rank's gradients in the buckets so far, before compression.

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
            process_group: process group that DDP uses; None for the default one.

        Raises:
            SpecError: the compressor is unknown, or needs bases, or has a `delay`, which DDP does not
                support; use DDP's `no_sync` instead.
            ValueError: `seed` or `samples` is out of range.
        """
        chosen = parse_compressor(compressor)
        if optimizer is not None:
            chosen = suited_to(optimizer, chosen)
        if chosen.shared:
            raise SpecError(f"compressor {chosen.text!r}: DDP's ranks keep no bases for it yet; use 4bit")
        wrapping = chosen.wrapping
        if wrapping is not None and wrapping.delay > 1:
            limit = f"expected delay=1, got {wrapping.delay}; to exchange fewer gradients use DDP's no_sync()"
            raise SpecError(f"compressor {chosen.text!r}: DDP exchanges gradients at every step: {limit}")
        for name, value, least in (("seed", seed, 0), ("samples", samples, 1)):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        tell_of_compiling(_log.warning)  # shown also where no logging is set up
        self.compressor = chosen.text
        self._terms = Terms(compressor=chosen, rule=rule or LayerRule(), seed=seed)
        self._samples, self._group = samples, process_group
        self._by_norm = chosen.chooses_by_norm
        # Clipping and these compressors need all gradients of the step first.
        clips = wrapping is not None and wrapping.clip > 0
        self._whole = clips or self._by_norm or chosen.entry.model_wide
        self._names: dict[torch.Tensor, tuple[int, str]] | None = None
        if named_parameters is not None:
            self._names = {each: (number, name) for number, (name, each) in enumerate(named_parameters)}
        self._parameters: dict[torch.Tensor, Parameter] = {}
        self._states: dict[str, TensorState] = {}  # by name, of tensors that are in no bundle at present
        self._norms: dict[str, float] = {}
        self._loaded = False
        self._bundles: dict[tuple[str, ...], Bundle] = {}
        self._gather: Gather | None = None
        self._waiting: list[Bucket] = []
        self._sent: list[Sent] = []
        self.epoch = float("inf")
        self.steps = self.voided = self.spikes = self.raw_bytes = 0
        self._saved_rank: int | None = None  # of a loaded state that no step has used yet
        self._called = False  # True once DDP has handed over a bucket
        self._exchanges = 0  # since the optimizer's last step
        self._warned: set[str] = set()
        inner: Any = getattr(
            optimizer, "optimizer", optimizer
        )  # Accelerate's wrapper has no hooks of its own
        self._watches = isinstance(inner, torch.optim.Optimizer)
        if self._watches:
            inner.register_step_pre_hook(self._before_step)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise TypeError for a copy or a pickle: a state belongs to one model and one process."""
        raise TypeError(
            "a state of gradwire.ddp is neither copied nor pickled, because it belongs to one model and one "
            "process: save state.state_dict(), and make a new state where it is loaded"
        )

    def _before_step(self, *_: object) -> None:
        """Warn if DDP has never called the hook, before a step of the optimizer."""
        if not self._called:
            self._warn(
                "unused",
                "optimizer.step() without an exchange: DDP has not called gradwire.ddp.hook, so gradients "
                "are averaged uncompressed or not at all. Call model.register_comm_hook(state, "
                "gradwire.ddp.hook) on the DistributedDataParallel model itself. Lightning "
                "(ddp_comm_hook=) and Accelerate (comm_hook=) register a hook on GPUs alone",
            )
        self._exchanges = 0

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(text)

    @property
    def bytes_sent(self) -> int:
        return 0 if self._gather is None else self._gather.sent

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as plain values and host tensors, for `torch.load(weights_only=True)`.

        Raises:
            RuntimeError: a step is incomplete: DDP has handed over its first bucket and not its last.
            TypeError: the state of a third party's compressor is not made of plain values.
        """
        self._check_between_steps()
        states = dict(self._states)
        for bundle in self._bundles.values():
            states.update(bundle.tensor_states())
        return {
            "compressor": self.compressor,
            "seed": self._terms.seed,
            "rank": self._rank,
            "steps": self.steps,
            "epoch": self.epoch,
            "norms": dict(self._norms),
            "residuals": {n: each.residual.cpu() for n, each in states.items() if each.residual is not None},
            "velocities": {n: each.velocity.cpu() for n, each in states.items() if each.velocity is not None},
            "states": {n: plain_fields(each.state) for n, each in states.items() if each.state is not None},
            "usual": {n: list(each.usual) for n, each in states.items()},
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
        residuals, velocities, states = (saved[name] for name in ("residuals", "velocities", "states"))
        usual = saved.get("usual", {})  # absent in states of older releases
        self._states = {
            name: TensorState(
                residual=residuals.get(name),
                velocity=velocities.get(name),
                state=SavedState(states[name]) if name in states else None,
                usual=usual.get(name, TensorState().usual),
            )
            for name in {**residuals, **velocities, **states, **usual}
        }
        self._norms, self._loaded = dict(saved["norms"]), True
        self.steps, self.epoch = saved["steps"], saved["epoch"]
        self._saved_rank = saved.get("rank")  # absent in states of older releases
        self._bundles.clear()
        self._parameters = {
            tensor: self._named(tensor, each.name, each.number) for tensor, each in self._parameters.items()
        }

    def add_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Compress and send a bucket's gradients, and return the future of their mean, as `hook` says.

        At the last bucket of a step, the call also receives all frames of the step and completes all futures.
        """
        self._called = True
        if bucket.index() == 0:
            self._drop_unfinished()
            self._begin_anew_if_of_another_rank()
            if self._watches and self._exchanges:
                self._warn(
                    "discarded",
                    "gradients were exchanged twice without optimizer.step(). If the script discards the "
                    "first, as a GAN's discriminator does with those of the generator's loss, their unsent "
                    "rest stays in the residual and is applied later: compute them under `with "
                    "model.no_sync()`. To accumulate gradients, put all backward passes but the last under "
                    "no_sync(), too",
                )
        buffer = bucket.buffer()
        parameters = [self._parameter(each) for each in bucket.parameters()]
        self._check(buffer, parameters)
        on_host = buffer.device.type == "cpu"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if on_host else [buffer.device]
        )
        self._waiting.append(Bucket(buffer.detach(), parameters, future))
        self.raw_bytes += buffer.numel() * buffer.element_size()
        if bucket.is_last() or not self._whole:
            self._send(self._waiting)
            self._waiting = []
        if bucket.is_last():
            self._finish()
        return future

    @property
    def _rank(self) -> int | None:
        if self._saved_rank is not None:
            return self._saved_rank
        return dist.get_rank(self._group) if dist.is_initialized() else None

    def _begin_anew_if_of_another_rank(self) -> None:
        """Discard residuals that another rank has saved; all ranks keep the same counters and norms."""
        rank, self._saved_rank = self._saved_rank, None
        if rank is None or rank == self._gathers.rank:
            return
        self._states.clear()
        _log.warning(
            "rank %d: the loaded state of gradwire.ddp is that of rank %d, as a framework does that saves "
            "rank 0's for all: residuals and velocities begin anew. Save state.state_dict() on every rank, "
            "in a file of its own",
            *(self._gathers.rank, rank),
        )

    def _check_between_steps(self) -> None:
        """Raise RuntimeError if DDP has handed over the first bucket of a step and not the last."""
        if self._waiting or self._sent:
            raise RuntimeError("state of gradwire.ddp: the step is incomplete; save or load after backward()")

    def _drop_unfinished(self) -> None:
        """Discard the buckets of a backward pass that did not reach its last bucket."""
        for sent in self._sent:
            sent.flight.wait()
            sent.bundle.abandon()
        self._sent, self._waiting = [], []

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
        """Return the bundle of these tensors, a new one after a rearrangement."""
        key = tuple(each.name for each in parameters)
        if key not in self._bundles:
            for other in [other for other in self._bundles if not {*other}.isdisjoint(key)]:
                self._states.update(self._bundles.pop(other).tensor_states())
            states = {name: self._states[name] for name in key if name in self._states}
            self._bundles[key] = Bundle(self._terms, parameters, states, self._gathers.rank)
            for name in states:
                del self._states[name]
        return self._bundles[key]

    @property
    def _gathers(self) -> Gather:
        """All-gathers of the process group, created and checked for equal terms at the first use."""
        if self._gather is None:
            gather = Gather(self._group)
            gather.agree(self._terms)
            self._gather = gather
        return self._gather

    def _send(self, buckets: Sequence[Bucket]) -> None:
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
        self._sent.append(Sent(bundle, buckets, agreed, flight))

    def _finish(self) -> None:
        """Receive all frames of the step, finish or void it, and complete the buckets' futures."""
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
                average(frames, sent.buckets)
        spikes: list[Spike] = []
        for sent in self._sent:
            if bad:
                sent.bundle.abandon()
            else:
                spikes += sent.bundle.finish()
            for bucket in sent.buckets:
                bucket.future.set_result(bucket.buffer.fill_(torch.nan) if bad else bucket.buffer)
        self._sent = []
        self.steps += 1
        if bad:  # a step that its NaN skips discards nothing: residuals stay as they were
            self.voided += 1
            _log.warning(
                "step %d: gradient of %s has an infinity or a NaN: all gradients of the step become NaN, "
                "residuals stay unchanged",
                *(self.steps, ", ".join(bad)),
            )
        else:
            self._exchanges += 1
        if spikes:
            self.spikes += len(spikes)
            _log.warning("rank %d, step %d: %s", self._gathers.rank, self.steps, described(spikes))

    def _check_loaded(self) -> None:
        """Raise ValueError if a loaded tensor is in no bundle of the first step."""
        if self._loaded and self._states:
            left = ", ".join(map(repr, sorted(self._states)))
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
        Refused: a rank's frame was damaged.
        ValueError: `named_parameters` lacks a parameter, or a loaded state does not fit the model.
    """
    return state.add_bucket(bucket)
