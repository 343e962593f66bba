"""Prometheus metrics, each declared once: one line of a class gives kind, name, help text and labels.

    class RoundMetrics(MetricSet, prefix="gradwire_server"):
        rounds = counter("rounds", "rounds closed")

    RoundMetrics().rounds.inc()

`table` makes the rows of docs/reference/metrics.md from the same lines, and a test compares the page with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

M = TypeVar("M", Counter, Gauge, Histogram)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Declared(Generic[M]):
    """The declaration of one metric in a `MetricSet`. Read from an instance, the attribute is the metric
    itself."""

    def __init__(
        self, kind: type[M], name: str, text: str, labels: Sequence[str], **options: Sequence[float]
    ) -> None:
        self._kind: type[M] = kind
        self.name, self.text, self.labels = name, text, labels
        self._options = options

    def make(self, prefix: str, registry: CollectorRegistry) -> M:
        """Create the metric as `<prefix>_<name>` in `registry` and return it."""
        options: Any = self._options
        metric: M = self._kind(f"{prefix}_{self.name}", self.text, self.labels, registry=registry, **options)
        return metric

    def row(self, prefix: str) -> str:
        """Return the metric's row of the table in docs/reference/metrics.md: name, kind, labels, help
        text."""
        total = "_total" if self._kind is Counter else ""
        kind, labels = self._kind.__name__.lower(), ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{prefix}_{self.name}{total}` | {kind} |{labels and ' '}{labels} | {self.text} |"

    def __get__(self, instance: MetricSet, owner: type[MetricSet]) -> M:
        """Return the metric of `instance`."""
        metric: M = instance.made[self.name]
        return metric


def counter(name: str, text: str, *labels: str) -> Declared[Counter]:
    """Declare a counter in a `MetricSet`.

    Args:
        name: name without the set's prefix and without `_total`, which Prometheus adds.
        text: help text.
        labels: names of its labels.
    """
    return Declared(Counter, name, text, labels)


def gauge(name: str, text: str, *labels: str) -> Declared[Gauge]:
    """Declare a gauge in a `MetricSet`.

    Args:
        name: name without the set's prefix.
        text: help text.
        labels: names of its labels.
    """
    return Declared(Gauge, name, text, labels)


def histogram(name: str, text: str, buckets: Sequence[float] = SECONDS) -> Declared[Histogram]:
    """Declare a histogram without labels in a `MetricSet`.

    Args:
        name: name without the set's prefix.
        text: help text.
        buckets: upper ends of the buckets, in the metric's unit; by default for seconds.
    """
    return Declared(Histogram, name, text, (), buckets=buckets)


class MetricSet:
    """Base class of a set of metrics, declared as class attributes, with a registry of its own.

    The registry also holds the metrics of the process and the Python version.

    Attributes:
        registry: registry that /metrics exports.
        made: the metrics by declared name.
    """

    prefix: ClassVar[str]

    def __init_subclass__(cls, *, prefix: str) -> None:
        cls.prefix = prefix

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.made: dict[str, Any] = {
            each.name: each.make(self.prefix, self.registry) for each in self._declared()
        }

    @classmethod
    def _declared(cls) -> list[Declared[Any]]:
        """Return the declarations of the class, in order."""
        return [each for each in vars(cls).values() if isinstance(each, Declared)]

    @classmethod
    def table(cls) -> str:
        """Return the class's rows of the table in docs/reference/metrics.md, in the order of declaration."""
        return "\n".join(each.row(cls.prefix) for each in cls._declared())
