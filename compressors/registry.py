"""Which compressors there are, and how one is made from its spec.

The built-in ones are one literal dict. A third party adds its own in its package's metadata, as an entry
point of the group `gradwire.compressors` whose name is the compressor's and whose object is a
`CompressorEntry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..planning.compression import least_sparse_part_bytes
from ..planning.parts import LEAST_BYTES
from ..spec import Spec, SpecError, known, option_types, parse_options, parse_spec, unknown
from .base import Compressor, NoOptions, is_model_wide
from .dense import Dense
from .dgc import DgcOptions, dgc
from .feedback import ErrorFeedback, without_feedback
from .four_bit import FourBit, FourBitOptions, Levels
from .k_reciprocal import KReciprocalOptions, k_reciprocal
from .linear import Norm, QsgdOptions, TernGrad, TernGradOptions, eight_bit, qsgd
from .near_centroid import near_centroid
from .one_bit import OneBit, SignOptions, SignVote
from .payload import DenseFormat
from .sparse import SparseOptions
from .top_k import Density, RandKOptions, ThresholdOptions, rand_k, threshold, top_k
from .two_bit import TwoBit, TwoBitOptions
from .wrapping import WRAPPING_KEYS, Wrapping

ENTRY_POINT_GROUP = "gradwire.compressors"

# As a downlink: what suits the pushes. At a worker: 4bit, or another, where it pays. No compressor is called
# so.
AUTO = "auto"

WITH_FEEDBACK = Wrapping()
WITHOUT_FEEDBACK = Wrapping(feedback=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorEntry:
    """One line of the registry.

    options: a frozen dataclass whose fields, all with defaults, are the keys of the spec.
    build: options to compressor.
    wrapping: what goes around it unless the spec says otherwise; None for a lossless compressor, around which
        nothing can go.
    dense: it is cheap and exact enough for small tensors too, so the layer rule sends them the same way.
    downlink: why with these options it does not suit updates of parameters, "" if it does: without thresholds
        that are meant for gradients, and with an error that is surely smaller than the update.
    adam_loss: what `gc-bench adam` measured with these options, if training lost: the validation loss as a
        multiple of the uncompressed one, where the server's optimizer is Adam; 1 if it did not, or was not
        measured.
    """

    options: type[Any]
    build: Callable[[Any], Compressor]
    wrapping: Wrapping | None = WITH_FEEDBACK
    dense: bool = False
    downlink: Callable[[Any], str] = lambda options: ""
    adam_loss: Callable[[Any], float] = lambda options: 1.0


MEANT = "its thresholds are meant for gradients, and updates are smaller by the learning rate"
CHOSEN_AGAIN = "what has been sent is 0, and may be what it chooses again"
BY_LAYERS = "densities by norms are for the gradients of workers"
LARGER_ERROR = "its error is larger than what it is given"


def _dense(format: DenseFormat, wrapping: Wrapping | None = WITH_FEEDBACK) -> CompressorEntry:
    return CompressorEntry(
        options=NoOptions, build=lambda _: Dense(format=format), wrapping=wrapping, dense=True
    )


def _lost(loss: float, kind: type[Any] = NoOptions) -> Callable[[Any], float]:
    """Measured with the default options."""
    return lambda options: loss if options == kind() else 1.0


def _sparse_lost(measured: Mapping[tuple[int, int], float]) -> Callable[[Any], float]:
    """By ratio and epochs of warm-up: with a larger ratio and a shorter warm-up no less is lost."""

    def lost(options: SparseOptions) -> float:
        losses = (
            loss
            for (ratio, warmup), loss in measured.items()
            if options.ratio >= ratio and options.warmup <= warmup
        )
        return max(losses, default=1.0)

    return lost


def _why(reason: str) -> Callable[[Any], str]:
    return lambda options: reason


BUILT_IN: Mapping[str, CompressorEntry] = {
    # Every element, in floats.
    "none": _dense(DenseFormat.FLOAT32, wrapping=None),
    "bf16": _dense(DenseFormat.BFLOAT16),
    "fp16": _dense(DenseFormat.FLOAT16),
    # Every element, in few bits.
    "1bit": CompressorEntry(options=NoOptions, build=lambda _: OneBit(), adam_loss=_lost(1.56)),
    "2bit": CompressorEntry(
        options=TwoBitOptions,
        build=lambda options: TwoBit(options=options),
        downlink=_why(MEANT),
        adam_loss=_lost(1.56, TwoBitOptions),
    ),
    "4bit": CompressorEntry(
        options=FourBitOptions,
        build=lambda options: FourBit(options=options),
        downlink=lambda options: "" if options.levels is Levels.RUNNING else f"{MEANT}; use levels=running",
        adam_loss=lambda options: 1.06 if options.levels is Levels.RUNNING else 1.0,
    ),
    "8bit": CompressorEntry(options=NoOptions, build=lambda _: eight_bit()),
    "qsgd": CompressorEntry(
        options=QsgdOptions,
        build=qsgd,
        wrapping=WITHOUT_FEEDBACK,
        downlink=lambda options: (
            ""
            if options.norm is Norm.MAX and options.bits >= 4
            else f"{LARGER_ERROR}; use norm=max and bits of at least 4"
        ),
    ),
    "signsgd": CompressorEntry(
        options=SignOptions,
        build=lambda options: SignVote(options=options),
        wrapping=WITHOUT_FEEDBACK,
        downlink=_why("it needs voters, and the server is one alone"),
        adam_loss=_lost(1.17, SignOptions),
    ),
    "terngrad": CompressorEntry(
        options=TernGradOptions,
        build=lambda options: TernGrad(options=options),
        wrapping=WITHOUT_FEEDBACK,
        downlink=_why(LARGER_ERROR),
        adam_loss=_lost(1.06, TernGradOptions),
    ),
    # Some elements.
    "dgc": CompressorEntry(
        options=DgcOptions,
        build=dgc,
        wrapping=Wrapping(momentum=0.9),
        adam_loss=_sparse_lost({(100, 4): 1.28}),
    ),
    # What has been sent is 0, and may be farthest from the median or at an end.
    "gcac": CompressorEntry(
        options=SparseOptions,
        build=near_centroid,
        downlink=_why(CHOSEN_AGAIN),
        adam_loss=_sparse_lost({(100, 0): 1.42}),
    ),
    "krngc": CompressorEntry(
        options=KReciprocalOptions,
        build=k_reciprocal,
        wrapping=Wrapping(momentum=0.9),
        downlink=_why(CHOSEN_AGAIN),
        adam_loss=_sparse_lost({(100, 5): 1.19}),
    ),
    "l1": CompressorEntry(
        options=SparseOptions,
        build=top_k,
        wrapping=WITHOUT_FEEDBACK,
        adam_loss=_sparse_lost({(100, 0): 1.29}),
    ),
    "randk": CompressorEntry(
        options=RandKOptions,
        build=rand_k,
        downlink=lambda options: BY_LAYERS if options.density is Density.NORM else "",
        adam_loss=_sparse_lost({(10, 0): 1.51, (100, 0): 1.54}),
    ),
    "threshold": CompressorEntry(
        options=ThresholdOptions,
        build=threshold,
        downlink=_why(MEANT),
        adam_loss=_lost(1.47, ThresholdOptions),
    ),
    "topk": CompressorEntry(
        options=SparseOptions,
        build=top_k,
        adam_loss=_sparse_lost({(10, 0): 1.31, (100, 0): 1.41, (100, 2): 1.26}),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoOptions:
    """compressor: that is left where it loses; slashes stand for the colon and the commas of its spec."""

    compressor: str = "4bit"


def compressor_of(spec: str) -> tuple[str, bool]:
    """What a worker compresses with, and whether it is left where it loses: `auto` names that one.

    Raise `SpecError` as `create` does, and for one that cannot be left.
    """
    if spec.partition(":")[0] != AUTO:
        create(spec)
        return spec, False
    options = parse_options(AutoOptions, parse_spec("compressor", spec))
    chosen = options.compressor.replace("/", ":", 1).replace("/", ",")
    compressor, wrapping = without_feedback(create(chosen)), wrapping_of(chosen)
    if wrapping is None or is_model_wide(compressor) or wrapping.momentum or wrapping.delay > 1:
        needs = "one with a residual of its own, and no momentum, delay or plan for the whole model"
        raise SpecError(f"compressor {AUTO!r}: compressor: expected {needs}, such as 4bit, got {chosen!r}")
    return chosen, True


def create(spec: str) -> Compressor:
    """The compressor that `spec` names, with what goes around it.

    Raise `SpecError`, which lists what is known, for an unknown name or key or a bad value.
    """
    parsed, entry = _found(spec)
    wrapping = wrapping_of(spec)
    around = WRAPPING_KEYS if wrapping is not None else ()
    own = {key: value for key, value in parsed.options.items() if key not in around}
    compressor = entry.build(parse_options(entry.options, replace(parsed, options=own), universal=around))
    if wrapping is None or not wrapping.feedback:
        return compressor
    return ErrorFeedback(compressor=compressor, decay=wrapping.decay, momentum=wrapping.momentum)


def create_bare(spec: str) -> Compressor:
    """The compressor alone, for a caller that keeps the residual itself; no key of `Wrapping` is known."""
    parsed, entry = _found(spec)
    return entry.build(parse_options(entry.options, parsed))


def lossless(spec: str) -> bool:
    """Whether what arrives is what was given, bit for bit."""
    return _found(spec)[1].wrapping is None


def adam_loss(spec: str) -> float:
    """See `CompressorEntry.adam_loss`; 1 with feedback or without it where the default is otherwise."""
    parsed, entry = _found(spec)
    wrapping = wrapping_of(spec)
    if wrapping is None or entry.wrapping is None or wrapping.feedback != entry.wrapping.feedback:
        return 1.0
    own = {key: value for key, value in parsed.options.items() if key not in WRAPPING_KEYS}
    return entry.adam_loss(parse_options(entry.options, replace(parsed, options=own)))


def check_downlink(spec: str) -> None:
    """Raise `SpecError` unless `spec` names a compressor that can carry updates, and has options of its own
    only: what is not sent stays in the difference between server and replicas, which is all the feedback
    there is. `AUTO` will do."""
    if spec == AUTO:
        return
    if spec.startswith(f"{AUTO}:"):
        raise SpecError(f"{AUTO} has no options: expected {AUTO}, or a compressor such as 4bit, got {spec!r}")
    try:
        parsed, entry = _found(spec)
    except SpecError as error:
        raise SpecError(f"expected {AUTO} or a compressor; {error}") from None
    if around := [key for key in parsed.options if key in WRAPPING_KEYS]:
        raise SpecError(f"compressor {parsed.name!r}: {around[0]} is for gradients; leave it out for updates")
    if why_not := entry.downlink(parse_options(entry.options, parsed)):
        suited = known(name for name, each in BUILT_IN.items() if not each.downlink(each.options()))
        what = f"compressor {spec!r} does not suit updates of parameters"
        raise SpecError(f"{what}: {why_not}; with their defaults these do: {suited}")


def wrapping_of(spec: str) -> Wrapping | None:
    """What goes around the compressor that `spec` names; raise `SpecError` for values that do not fit."""
    parsed, entry = _found(spec)
    defaults = entry.wrapping
    if defaults is None:
        return None
    # Without feedback there is nothing for an entry's own momentum and delay to work with.
    if parsed.options.get("feedback") == "off":
        defaults = WITHOUT_FEEDBACK
    around = {key: value for key, value in parsed.options.items() if key in WRAPPING_KEYS}
    return parse_options(Wrapping, replace(parsed, options=around), defaults=defaults)


def _found(spec: str) -> tuple[Spec, CompressorEntry]:
    parsed = parse_spec("compressor", spec)
    return parsed, find(parsed.name)


def names() -> list[str]:
    """Every name that `create` accepts, sorted, without loading third-party code."""
    return sorted({*BUILT_IN, *_third_parties()})


def find(name: str) -> CompressorEntry:
    """The entry of a compressor; raise `SpecError` if there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    points = _third_parties().get(name, [])
    if not points:
        raise SpecError(unknown("compressor", name, names()))
    if len(points) > 1:
        givers = known(_giver(point) for point in points)
        raise SpecError(f"compressor {name!r} is offered by several packages: {givers}")
    return _load(points[0])


def least_part_bytes(spec: str) -> int:
    """What the largest part of a model has to hold by default, as float32, where workers compress so.

    A third party's compressor is not loaded for that, nor is a bad spec refused: workers name them.
    """
    try:
        if parse_spec("compressor", spec).name not in BUILT_IN:
            return LEAST_BYTES
        options = getattr(without_feedback(create(spec)), "options", None)
    except SpecError:
        return LEAST_BYTES
    if not isinstance(options, SparseOptions):
        return LEAST_BYTES
    return max(LEAST_BYTES, least_sparse_part_bytes(options.ratio))


def check_entry(name: str, entry: CompressorEntry) -> None:
    """Raise `SpecError` if an entry could not serve. Built-in ones are checked at import."""
    if not callable(entry.downlink):
        raise SpecError(f"compressor {name!r}: downlink must be a function of the options")
    if entry.wrapping is None and not entry.dense:
        raise SpecError(f"compressor {name!r}: one without wrapping is lossless, and has to be dense, too")
    if not is_dataclass(entry.options):
        raise SpecError(f"compressor {name!r}: options must be a dataclass, got {entry.options}")
    for key, value_type in option_types(entry.options).items():
        if key in WRAPPING_KEYS:
            raise SpecError(f"compressor {name!r}: the key {key!r} belongs to every compressor")
        if value_type not in (bool, int, float, str) and not issubclass(value_type, Enum):
            raise SpecError(f"compressor {name!r}: {key}: no way to read a {value_type} from text")
    entry.build(entry.options())


def _third_parties() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in BUILT_IN:  # a built-in name always means the built-in compressor
            found.setdefault(point.name, []).append(point)
    return found


def _load(point: EntryPoint) -> CompressorEntry:
    try:
        entry = point.load()
    except Exception as error:
        where = f"compressor {point.name!r} of {_giver(point)}"
        raise SpecError(f"{where} failed to load: {error!r}") from error
    if not isinstance(entry, CompressorEntry):
        raise SpecError(f"compressor {point.name!r} of {_giver(point)} is not a CompressorEntry")
    check_entry(point.name, entry)
    return entry


def _giver(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


for _name, _entry in BUILT_IN.items():
    check_entry(_name, _entry)
