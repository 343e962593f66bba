"""Prometheus metrics, each declared once: one line of a class gives kind, name, help text and labels.

    class RoundMetrics(MetricSet, prefix="gradwire_server"):
        rounds = counter("rounds", "rounds closed")

    RoundMetrics().rounds.inc()

`table` makes the rows of docs/reference/metrics.md from the same lines, and a test compares the page with
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf
from threading import Lock
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class _Series(Collector):
    """A metric, or one of its series by label.

    The metrics of prometheus_client do not serve: they keep their values in files if another program needs
    PROMETHEUS_MULTIPROC_DIR, fail if that folder is missing, and go on from the values of earlier processes.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float] = ()) -> None:
        self.name, self.text, self.label_names = name, text, labels
        self.bounds = [*buckets, inf]
        self.value: float = 0.0  # of a histogram: sum of the observations
        self.counts = [0] * len(self.bounds)  # observations in each bucket
        self.lock = Lock()
        self._by_labels: dict[tuple[str, ...], Self] = {}

    def labels(self, *values: str) -> Self:
        """Return the series with these values of the labels, which begins at 0."""
        if len(values) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, not {len(values)}")
        with self.lock:
            if values not in self._by_labels:
                self._by_labels[values] = type(self)(self.name, self.text, (), self.bounds[:-1])
            return self._by_labels[values]

    def series(self) -> list[tuple[tuple[str, ...], Self]]:
        """Return all series with the values of their labels."""
        with self.lock:
            return list(self._by_labels.items()) if self.label_names else [((), self)]


class Counter(_Series):
    """A total that only grows."""

    def inc(self, amount: float = 1) -> None:
        """Add `amount`."""
        if amount < 0:
            raise ValueError(f"{self.name} only grows, not by {amount}")
        with self.lock:
            self.value += amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self.text, labels=self.label_names)
        for values, each in self.series():
            family.add_metric(values, each.value)
        yield family


class Gauge(_Series):
    """A value that changes in both directions."""

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = float(value)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self.name, self.text, labels=self.label_names)
        for values, each in self.series():
            family.add_metric(values, each.value)
        yield family


class Histogram(_Series):
    """Observations, counted by buckets."""

    def observe(self, amount: float) -> None:
        """Count `amount` in the first bucket whose upper end is not below it."""
        with self.lock:
            self.value += amount
            self.counts[bisect_left(self.bounds, amount)] += 1

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.text)
        number = cast(Callable[[float], str], floatToGoString)
        with self.lock:
            counts, total = list(accumulate(self.counts)), self.value
        buckets = [(number(bound), count) for bound, count in zip(self.bounds, counts, strict=True)]
        family.add_metric((), buckets, total)
        yield family


M = TypeVar("M", Counter, Gauge, Histogram)


class Declared(Generic[M]):
    """The declaration of one metric in a `MetricSet`. Read from an instance, the attribute is the metric
    itself."""

    def __init__(
        self, kind: type[M], name: str, text: str, labels: Sequence[str], **options: Sequence[float]
    ) -> None:
        self._kind: type[M] = kind
        self.name, self.text, self.labels = name, text, labels
        self._options = options

    def make(self, prefix: str) -> M:
        """Create the metric as `<prefix>_<name>` and return it."""
        return self._kind(f"{prefix}_{self.name}", self.text, self.labels, **self._options)

    def row(self, prefix: str) -> str:
        """Return the metric's row in docs/reference/metrics.md: name, kind, labels, help text."""
        total = "_total" if self._kind is Counter else ""
        kind, labels = self._kind.__name__.lower(), ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{prefix}_{self.name}{total}` | {kind} |{labels and ' '}{labels} | {self.text} |"

    def __get__(self, instance: MetricSet, owner: type[MetricSet]) -> M:
        """Return the metric of `instance`."""
        metric: M = instance.made[self.name]
        return metric


def counter(name: str, text: str, *labels: str) -> Declared[Counter]:
    """Declare a counter in a `MetricSet`. name: without the set's prefix and `_total`, which Prometheus
    adds."""
    return Declared(Counter, name, text, labels)


def gauge(name: str, text: str, *labels: str) -> Declared[Gauge]:
    """Declare a gauge in a `MetricSet`. name: without the set's prefix."""
    return Declared(Gauge, name, text, labels)


def histogram(name: str, text: str, buckets: Sequence[float] = SECONDS) -> Declared[Histogram]:
    """Declare a histogram without labels in a `MetricSet`. buckets: upper ends, by default of seconds."""
    return Declared(Histogram, name, text, (), buckets=buckets)


class MetricSet(Collector):
    """Base class of a set of metrics, declared as class attributes, with a registry of its own.

    The registry also holds the metrics of the process and the Python version.

    Attributes:
        registry: registry that /metrics exports.
        made: the metrics by declared name.
        job_id: id of the job, the label `job_id` of all series, so that two jobs that use one port after
            another have series of their own; empty while unknown, for no such label.
    """

    prefix: ClassVar[str]

    def __init_subclass__(cls, *, prefix: str) -> None:
        cls.prefix = prefix

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.made: dict[str, Any] = {each.name: each.make(self.prefix) for each in self._declared()}
        self.job_id = ""
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the set as the registry exports it."""
        job = {"job_id": self.job_id} if self.job_id else {}
        for each in self.made.values():
            for family in each.collect():
                family.samples = [one._replace(labels={**one.labels, **job}) for one in family.samples]
                yield family

    def describe(self) -> Iterator[Metric]:
        """Yield the families of all metrics, by whose names `/metrics?name[]=` selects."""
        for each in self.made.values():
            yield from each.collect()

    @classmethod
    def _declared(cls) -> list[Declared[Any]]:
        """Return the declarations of the class, in order."""
        return [each for each in vars(cls).values() if isinstance(each, Declared)]

    @classmethod
    def table(cls) -> str:
        """Return the class's rows of the table in docs/reference/metrics.md, in the order of declaration."""
        return "\n".join(each.row(cls.prefix) for each in cls._declared())
