"""The registry of compressors: which exist, and how a spec is parsed and built. Importing it does not import
torch.

The built-in ones are declared in `quantizers` and `sparsifiers`. A third party adds its own in its package's
metadata, as an entry point of the group `gradwire.compressors`. The entry point's name is the compressor's,
and its object is a `CompressorEntry`.

A spec is parsed once, where its text arrives, and travels as a `CompressorSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from ..common import plugins
from ..common.parts import ALIGNMENT, LEAST_BYTES
from ..common.spec import Spec, SpecError, known, option_types, parse_options, parse_spec, unknown
from .entry import WITHOUT_FEEDBACK, CompressorEntry, Joined
from .projections import PROJECTIONS
from .quantizers import DENSE, QUANTIZERS
from .sizes import CompressionCosts, least_sparse_part_bytes
from .sparsifiers import SPARSIFIERS, SparseOptions
from .wrapping import WRAPPING_KEYS, Wrapping

if TYPE_CHECKING:
    from .base import Compressor

# Not the name of a compressor. As a downlink: the compressor that suits the pushes. At a worker: 4bit, or a
# named compressor, for the units where that saves time.
AUTO = "auto"

SHARED = "start", "expand", "advance", "compress_with_residual"  # the methods of `base.Shared`
BUILT_IN: Mapping[str, CompressorEntry] = {**DENSE, **QUANTIZERS, **SPARSIFIERS, **PROJECTIONS}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorSpec:
    """A compressor as a user has named it, parsed. Two specs are equal if their texts are.

    Attributes:
        text: `name[:key=value,...]`, for messages, logs and the wire.
        options: its own options, an instance of `entry.options`.
        wrapping: the options that every lossy compressor has; None if it is lossless.
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
        return self.entry.wrapping is None

    @property
    def joins(self) -> Joined | None:
        """How one call serves neighbouring tensors, given the wrapping."""
        found = self.entry.joins(self.options)
        if found is not None and found.how == "blocks" and not (self.wrapping and self.wrapping.plain):
            return None  # `compress_blocks` adds a gradient to its residual without decay or momentum
        return found

    @property
    def piecewise(self) -> bool:
        """True if a piece of a tensor can be compressed without knowing the rest of the tensor."""
        joins = self.entry.joins(self.options)
        return joins is not None and (
            joins.how == "elements" or (joins.full > 1 and ALIGNMENT % joins.full == 0)
        )

    @property
    def chooses_by_norm(self) -> bool:
        """True if the fraction that is sent of each tensor follows from `Plan.norms`."""
        return isinstance(self.options, SparseOptions) and self.options.densities([1.0]) is not None

    @property
    def adam_loss(self) -> float | None:
        """Loss with Adam as the entry says: a multiple of the uncompressed one; None if not measured."""
        default = self.entry.wrapping
        if self.wrapping is None or default is None:
            return 1.0  # lossless
        if self.wrapping.feedback != default.feedback:
            return self.entry.adam_loss_otherwise
        return self.entry.adam_loss(self.options)

    @property
    def sgd_accuracy(self) -> float | None:
        """Difference in accuracy with SGD as the entry says; None if not measured."""
        if self.wrapping is None:
            return 0.0  # lossless
        usual = self.wrapping == self.entry.wrapping
        return self.entry.sgd_accuracy(self.options) if usual else None

    @property
    def not_for_means(self) -> str:
        """Reason why the mean of several ranks cannot be sent with it, as owners do; "" if it can."""
        if self.shared:
            return "it sends coordinates, which every rank expands"
        coding = self.entry.sends(self.options)
        if isinstance(coding, str):
            return "the number of bytes that it sends is not known"
        if coding.indices or coding.density < 1:
            return "it sends some of the elements, and the mean has those of all ranks"
        return self.entry.downlink(self.options)

    @property
    def least_part_bytes(self) -> int:
        if not isinstance(self.options, SparseOptions):
            return LEAST_BYTES
        return max(LEAST_BYTES, least_sparse_part_bytes(self.options.ratio))

    @property
    def shared(self) -> bool:
        """True if the job has bases for it (`base.Shared`)."""
        return self.entry.coordinates(self.options) is not None

    def coordinates(self, shape: Sequence[int]) -> int:
        """Return the number of coordinates of a tensor of this shape; 0 if it does not travel as such."""
        count = self.entry.coordinates(self.options)
        return 0 if count is None else count(shape)

    def compression(self) -> CompressionCosts:
        """Return sizes and times of the compressor for planners, at its full ratio, without its warm-up.

        Raises:
            SpecError: the number of bytes that it sends is not known beforehand.
        """
        sends = self.entry.sends(self.options)
        if isinstance(sends, str):
            raise SpecError(f"compressor {self.text!r}: its steps cannot be predicted: {sends}")
        return CompressionCosts(
            name=self.text,
            up=replace(
                sends, together=self.joins is not None, coordinates=self.entry.coordinates(self.options)
            ),
            element_s=max(self.entry.nanoseconds(self.options), 0.3) * 1e-9,
            least_part_bytes=self.least_part_bytes,
            merges=self.entry.merges,
            whole=self.entry.model_wide or bool(self.wrapping and self.wrapping.clip),
            for_means=not self.not_for_means,
        )

    def build(self) -> Compressor:
        """Return the compressor, inside `ErrorFeedback` if its options ask for feedback.

        Raises SpecError if it lacks a method that its entry needs, or has a method `plan` and its entry does
        not declare `model_wide`, or the reverse.
        """
        made = self.entry.build(self.options)
        needed = ["init", "compress", *(SHARED if self.shared else ())]
        lacking = [method for method in needed if not callable(getattr(made, method, None))]
        if lacking:
            raise SpecError(f"compressor {self.name!r}: {type(made).__name__} has no method {lacking[0]!r}")
        if self.entry.model_wide != hasattr(made, "plan"):
            declared = "has a method `plan`" if hasattr(made, "plan") else "has no method `plan`"
            wanted = f"expected model_wide={not self.entry.model_wide} in its CompressorEntry"
            raise SpecError(f"compressor {self.name!r} {declared}: {wanted}")
        wrapping = self.wrapping
        if wrapping is None or not wrapping.feedback:
            return made
        from .feedback import ErrorFeedback

        return ErrorFeedback(
            compressor=made,
            decay=wrapping.decay,
            momentum=wrapping.momentum,
            masking=wrapping.masking,
        )


def parse_compressor(spec: str | CompressorSpec) -> CompressorSpec:
    """Parse the text `name[:key=value,...]`, unless it is parsed already.

    Raises SpecError, which lists those that are known, for an unknown name or key, or a bad value.
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
    """The options of `auto` at a worker. Slashes stand for the colon and the commas of the compressor."""

    compressor: str = "4bit"


def compressor_of(spec: str, *, received: bool = False) -> tuple[CompressorSpec, bool]:
    """Parse the compressor of a worker; return it, and True if the spec is `auto`, which sends units
    uncompressed where compressing costs more time than it saves.

    Args:
        received: True if another process sent the spec. Then the name must be a built-in compressor's: a name
            from the wire must not load a third party's code.

    Raises:
        SpecError: an unknown name or key, or a bad value; or `auto` with a compressor that cannot be switched
            off for single units.
    """
    auto, text = spec.partition(":")[0] == AUTO, spec
    if auto:
        options = parse_options(AutoOptions, parse_spec("compressor", spec))
        text = options.compressor.replace("/", ":", 1).replace("/", ",")
    if received and (name := parse_spec("compressor", text).name) not in BUILT_IN:
        raise SpecError(
            f"compressor {name!r} is not built in, and a server's word does not load it; give this worker "
            f"--compressor {spec}"
        )
    chosen = parse_compressor(text)
    if not auto:
        return chosen, False
    wrapping = chosen.wrapping
    together = chosen.entry.model_wide or chosen.shared
    if wrapping is None or together or wrapping.momentum or wrapping.delay > 1:
        needs = "expected a lossy compressor without momentum, delay, bases or a budget for the whole model"
        raise SpecError(f"compressor {AUTO!r}: compressor: {needs}, such as 4bit, got {chosen.text!r}")
    return chosen, True


def create(spec: str | CompressorSpec) -> Compressor:
    """Return the compressor that `spec` names, inside `ErrorFeedback` if its options ask for feedback; raise
    SpecError for a bad one.

    Example:
        >>> from gradwire.compressors import Random, StepContext, TensorSpec, payload_bytes
        >>> compressor = gradwire.compressors.create("topk:ratio=10")
        >>> state = compressor.init(TensorSpec(name="w", shape=(10, 10)))
        >>> context = StepContext(samples=32, version=0, random=Random((1,)))
        >>> payload, state = compressor.compress(torch.randn(100), state, context)
        >>> payload_bytes(payload) < 40
        True
    """
    return parse_compressor(spec).build()


def create_bare(spec: str) -> Compressor:
    """Return the compressor without error feedback, for a caller that keeps the residual itself.

    spec: text without the keys of `Wrapping`, such as `feedback`. Raises SpecError for these and other bad
    specs.
    """
    parsed = parse_spec("compressor", spec)
    entry = find(parsed.name)
    return entry.build(parse_options(entry.options, parsed))


def parse_downlink(spec: str) -> CompressorSpec | None:
    """Parse the compressor of updates; return None for `auto`.

    Raises SpecError if it is bad, does not suit updates, or has other than its own options: updates need no
    residual, because the rest stays in the difference between the server's parameters and the replicas.
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
        refusal = f"compressor {spec!r} does not suit updates of parameters"
        raise SpecError(f"{refusal}: {why_not}; suitable with their default options: {suited}")
    return found


def names() -> list[str]:
    """Return all names that `create` accepts, sorted, without loading third-party code."""
    return plugins.names("compressor", BUILT_IN)


def find(name: str) -> CompressorEntry:
    """Return the declaration of a compressor, loading a third party's code if necessary; raise SpecError if
    that fails."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = plugins.find("compressor", name)
    if point is None:
        raise SpecError(unknown("compressor", name, names()))
    return _load(point)


@lru_cache(maxsize=256)
def known_compressor(spec: str) -> CompressorSpec | None:
    """Parse a spec that another process sent; return None if it is bad or names a third party's compressor.

    A name from the wire must not load a third party's code.
    """
    try:
        if parse_spec("compressor", spec).name not in BUILT_IN:
            return None
        return parse_compressor(spec)
    except SpecError:
        return None


def check_entry(name: str, entry: CompressorEntry) -> None:
    """Raise SpecError, which names the field, if a declaration cannot be used."""
    for each in (
        "build",
        "joins",
        "sends",
        "nanoseconds",
        "coordinates",
        "downlink",
        "adam_loss",
        "sgd_accuracy",
    ):
        if not callable(getattr(entry, each)):
            raise SpecError(f"compressor {name!r}: {each} must be a function of the options")
    if entry.wrapping is None and not entry.dense:
        raise SpecError(f"compressor {name!r}: wrapping=None means lossless; set dense=True, too")
    if not is_dataclass(entry.options):
        raise SpecError(f"compressor {name!r}: options must be a dataclass, got {entry.options}")
    for key, value_type in option_types(entry.options).items():
        if key in WRAPPING_KEYS:
            raise SpecError(
                f"compressor {name!r}: the key {key!r} belongs to every compressor; rename the option"
            )
        # Python 3.13 raises for issubclass(tuple[int, ...], Enum), where 3.11 returns False.
        kind: Any = value_type
        enum = isinstance(kind, type) and issubclass(kind, Enum)
        if value_type not in (bool, int, float, str) and not enum:
            raise SpecError(
                f"compressor {name!r}: {key}: expected bool, int, float, str or an Enum, got {value_type}"
            )


def _load(point: EntryPoint) -> CompressorEntry:
    """Load a third party's declaration and check it. Raises SpecError."""
    try:
        entry = point.load()
    except Exception as error:
        where = f"compressor {point.name!r} of {plugins.giver(point)}"
        raise SpecError(f"{where} failed to load: {error!r}") from error
    if not isinstance(entry, CompressorEntry):
        raise SpecError(f"compressor {point.name!r} of {plugins.giver(point)} is not a CompressorEntry")
    check_entry(point.name, entry)
    return entry


for _name, _entry in BUILT_IN.items():
    check_entry(_name, _entry)
