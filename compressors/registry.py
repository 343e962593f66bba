"""Which compressors there are, and how a spec is parsed and made into one. Readable without torch.

The built-in ones are declared in `quantizers` and `sparsifiers`. A third party adds its own in its package's
metadata, as an entry point of the group `gradwire.compressors` whose name is the compressor's and whose
object is a `CompressorEntry`.

A spec is parsed once, where its text arrives, and travels as a `CompressorSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from ..common.spec import Spec, SpecError, known, option_types, parse_options, parse_spec, unknown
from ..planning.compression import CompressionCosts, least_sparse_part_bytes
from ..planning.parts import ALIGNMENT, LEAST_BYTES
from .entry import WITHOUT_FEEDBACK, CompressorEntry, Joined
from .quantizers import DENSE, QUANTIZERS
from .sparsifiers import SPARSIFIERS, SparseOptions
from .wrapping import WRAPPING_KEYS, Wrapping

if TYPE_CHECKING:
    from .base import Compressor

ENTRY_POINT_GROUP = "gradwire.compressors"

# As a downlink: what suits the pushes. At a worker: 4bit, or another, where it pays. No compressor is called
# so.
AUTO = "auto"

BUILT_IN: Mapping[str, CompressorEntry] = {**DENSE, **QUANTIZERS, **SPARSIFIERS}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorSpec:
    """A compressor as a user has asked for it, parsed. Two are equal if their texts are.

    Attributes:
        text: `name[:key=value,...]`, for messages, logs and the wire.
        name: of the compressor.
        entry: its declaration.
        options: an instance of `entry.options`.
        wrapping: what goes around it; None if it is lossless.
    """

    text: str
    name: str = field(compare=False, repr=False)
    entry: CompressorEntry = field(compare=False, repr=False)
    options: Any = field(compare=False, repr=False)
    wrapping: Wrapping | None = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def lossless(self) -> bool:
        """Whether a receiver gets what was given, bit for bit."""
        return self.entry.wrapping is None

    @property
    def joins(self) -> Joined | None:
        """How one call serves neighbouring tensors, with what goes around the compressor."""
        found = self.entry.joins(self.options)
        if found is not None and found.how == "blocks" and not (self.wrapping and self.wrapping.plain):
            return None  # a block is added to its residual as it is
        return found

    @property
    def piecewise(self) -> bool:
        """Whether a part of a tensor is compressed without knowing the others."""
        joins = self.entry.joins(self.options)
        return joins is not None and (
            joins.how == "elements" or (joins.full > 1 and ALIGNMENT % joins.full == 0)
        )

    @property
    def chooses_by_norm(self) -> bool:
        """Whether the share of each tensor that is sent follows from the norms of all (`Plan.norms`)."""
        return isinstance(self.options, SparseOptions) and self.options.densities([1.0]) is not None

    @property
    def adam_loss(self) -> float:
        """The `adam_loss` of the entry; 1 if feedback is not as it was measured, by default."""
        default = self.entry.wrapping
        if self.wrapping is None or default is None or self.wrapping.feedback != default.feedback:
            return 1.0
        return self.entry.adam_loss(self.options)

    @property
    def least_part_bytes(self) -> int:
        """What the largest part of a model holds at least by default, as float32."""
        if not isinstance(self.options, SparseOptions):
            return LEAST_BYTES
        return max(LEAST_BYTES, least_sparse_part_bytes(self.options.ratio))

    def compression(self) -> CompressionCosts:
        """Return the compressor as planners know it, at its full ratio, without its warm-up.

        Raises:
            SpecError: the bytes that it sends are not known beforehand.
        """
        sends = self.entry.sends(self.options)
        if isinstance(sends, str):
            raise SpecError(f"compressor {self.text!r}: its steps cannot be predicted: {sends}")
        return CompressionCosts(
            name=self.text,
            up=replace(sends, together=self.joins is not None),
            element_s=max(self.entry.nanoseconds(self.options), 0.3) * 1e-9,
            least_part_bytes=self.least_part_bytes,
            merges=self.entry.merges,
            whole=self.entry.model_wide or bool(self.wrapping and self.wrapping.clip),
        )

    def build(self) -> Compressor:
        """Return the compressor with what goes around it.

        Raises:
            SpecError: it plans for the whole model, and its entry does not declare that, or the reverse.
        """
        made = self.entry.build(self.options)
        if self.entry.model_wide != hasattr(made, "plan"):
            declared = "has a method `plan`" if hasattr(made, "plan") else "has no method `plan`"
            wanted = f"expected model_wide={not self.entry.model_wide} in its CompressorEntry"
            raise SpecError(f"compressor {self.name!r} {declared}: {wanted}")
        wrapping = self.wrapping
        if wrapping is None or not wrapping.feedback:
            return made
        from .feedback import ErrorFeedback

        return ErrorFeedback(compressor=made, decay=wrapping.decay, momentum=wrapping.momentum)


def parse_compressor(spec: str | CompressorSpec) -> CompressorSpec:
    """Parse `name[:key=value,...]`; return a spec that is parsed already as it is.

    Raises:
        SpecError: an unknown name or key, or a bad value; the message lists what is known.
    """
    if isinstance(spec, CompressorSpec):
        return spec
    parsed = parse_spec("compressor", spec)
    entry = find(parsed.name)
    wrapping = _wrapping(parsed, entry)
    around = WRAPPING_KEYS if wrapping is not None else ()
    own = {key: value for key, value in parsed.options.items() if key not in around}
    options = parse_options(entry.options, replace(parsed, options=own), universal=around)
    return CompressorSpec(text=spec, name=parsed.name, entry=entry, options=options, wrapping=wrapping)


def _wrapping(parsed: Spec, entry: CompressorEntry) -> Wrapping | None:
    """Raise `SpecError` for values that do not fit."""
    defaults = entry.wrapping
    if defaults is None:
        return None
    # Without feedback there is nothing for an entry's own momentum and delay to work with.
    if parsed.options.get("feedback") == "off":
        defaults = WITHOUT_FEEDBACK
    around = {key: value for key, value in parsed.options.items() if key in WRAPPING_KEYS}
    return parse_options(Wrapping, replace(parsed, options=around), defaults=defaults)


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoOptions:
    """compressor: that is left where it loses; slashes stand for the colon and the commas of its spec."""

    compressor: str = "4bit"


def compressor_of(spec: str) -> tuple[CompressorSpec, bool]:
    """Return the compressor of a worker, and whether it is left where it loses: `auto` names that one.

    Raises:
        SpecError: like `parse_compressor`, and for a compressor that cannot be left.
    """
    if spec.partition(":")[0] != AUTO:
        return parse_compressor(spec), False
    options = parse_options(AutoOptions, parse_spec("compressor", spec))
    chosen = parse_compressor(options.compressor.replace("/", ":", 1).replace("/", ","))
    wrapping = chosen.wrapping
    if wrapping is None or chosen.entry.model_wide or wrapping.momentum or wrapping.delay > 1:
        needs = "expected one with a residual of its own, and no momentum, delay or plan for the whole model"
        raise SpecError(
            f"compressor {AUTO!r}: compressor: expected {needs}, such as 4bit, got {chosen.text!r}"
        )
    return chosen, True


def create(spec: str | CompressorSpec) -> Compressor:
    """Return the compressor that `spec` names, with what goes around it.

    Raises:
        SpecError: like `parse_compressor`.
    """
    return parse_compressor(spec).build()


def create_bare(spec: str) -> Compressor:
    """Return the compressor alone, for a caller that keeps the residual itself; no key of `Wrapping` is
    known."""
    parsed = parse_spec("compressor", spec)
    entry = find(parsed.name)
    return entry.build(parse_options(entry.options, parsed))


def parse_downlink(spec: str) -> CompressorSpec | None:
    """Parse the compressor of updates; return None for `AUTO`.

    It has options of its own only: what is not sent stays in the difference between server and replicas,
    which is all the feedback there is.

    Raises:
        SpecError: it cannot carry updates.
    """
    if spec == AUTO:
        return None
    if spec.startswith(f"{AUTO}:"):
        raise SpecError(f"{AUTO} has no options: expected {AUTO}, or a compressor such as 4bit, got {spec!r}")
    try:
        parsed = parse_spec("compressor", spec)
        entry = find(parsed.name)
    except SpecError as error:
        raise SpecError(f"expected {AUTO} or a compressor; {error}") from None
    if around := [key for key in parsed.options if key in WRAPPING_KEYS]:
        raise SpecError(f"compressor {parsed.name!r}: {around[0]} is for gradients; leave it out for updates")
    found = parse_compressor(spec)
    if why_not := entry.downlink(found.options):
        suited = known(name for name, each in BUILT_IN.items() if not each.downlink(each.options()))
        what = f"compressor {spec!r} does not suit updates of parameters"
        raise SpecError(f"{what}: {why_not}; with their defaults these do: {suited}")
    return found


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


def known_compressor(spec: str) -> CompressorSpec | None:
    """Parse the spec that another process names; return None if it is bad or names a third party's.

    A third party's code is not loaded because of a name on the wire.
    """
    try:
        if parse_spec("compressor", spec).name not in BUILT_IN:
            return None
        return parse_compressor(spec)
    except SpecError:
        return None


def check_entry(name: str, entry: CompressorEntry) -> None:
    """Raise `SpecError` if an entry could not serve. Built-in ones are checked at import."""
    for each in ("build", "joins", "sends", "nanoseconds", "downlink", "adam_loss"):
        if not callable(getattr(entry, each)):
            raise SpecError(f"compressor {name!r}: {each} must be a function of the options")
    if entry.wrapping is None and not entry.dense:
        raise SpecError(f"compressor {name!r}: one without wrapping is lossless, and has to be dense, too")
    if not is_dataclass(entry.options):
        raise SpecError(f"compressor {name!r}: options must be a dataclass, got {entry.options}")
    for key, value_type in option_types(entry.options).items():
        if key in WRAPPING_KEYS:
            raise SpecError(f"compressor {name!r}: the key {key!r} belongs to every compressor")
        if value_type not in (bool, int, float, str) and not issubclass(value_type, Enum):
            raise SpecError(f"compressor {name!r}: {key}: no way to read a {value_type} from text")


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
