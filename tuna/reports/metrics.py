"""The metrics of `tuna metrics`: their names and the text exposition format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as PrometheusMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class Metric:
    """A metric's description; `kind` is Prometheus's, counter or gauge."""

    kind: str
    labels: tuple[str, ...]
    help: str


METRICS = {
    "tuna_jobs": Metric(
        "gauge", ("session", "state"), "Jobs by state, without those that search in rounds."
    ),
    "tuna_searches": Metric(
        "gauge", ("session", "state"), "Jobs that search in rounds: going_on or ended."
    ),
    "tuna_rounds": Metric("gauge", ("session", "state"), "Rounds of searches by state."),
    "tuna_errors_total": Metric("counter", ("session", "cause"), "Failed attempts by cause."),
    "tuna_queue_items": Metric(
        "gauge", ("queue",), "Chunks that wait in a queue; results that wait for the drain."
    ),
    "tuna_workers": Metric("gauge", ("role",), "Worker processes that announce themselves."),
    "tuna_device_idle_ratio": Metric(
        "gauge",
        ("session",),
        "Share of the time from its first to its last measurement that a device was idle.",
    ),
    "tuna_trials_total": Metric("counter", ("session",), "Trials, good or failed."),
    "tuna_results_drained_total": Metric("counter", (), "Results of workers that are in SQL."),
    "tuna_up": Metric("gauge", ("service",), "Whether the service answered this scrape."),
}


@dataclass(eq=False)  # a registry keeps its collectors as keys
class Samples(Collector):
    """Values by metric and label values; a collector of prometheus_client, which writes them
    down."""

    values: dict[str, dict[tuple[str, ...], float]] = field(default_factory=dict)

    def set(self, name: str, value: float, *labels: object) -> None:
        """One value; `labels` in the order of the table."""
        assert len(labels) == len(METRICS[name].labels), name
        self.values.setdefault(name, {})[tuple(map(str, labels))] = value

    def collect(self) -> Iterator[PrometheusMetric]:
        """The metrics that have a value, in the order of the table."""
        for name, metric in METRICS.items():
            values = self.values.get(name)
            if values:
                family = _FAMILIES[metric.kind](name, metric.help, labels=metric.labels)
                for labels in sorted(values):
                    family.add_metric(labels, values[labels])
                yield family


#: Without times of creation, which would be one more sample for each counter.
_FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


def text_of(samples: Samples) -> str:
    """The text format 0.0.4 of Prometheus; a metric without a value is left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(samples)
    return generate_latest(registry).decode()
