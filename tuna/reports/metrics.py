"""The metrics of `tuna metrics`: their names, once, and the text in which Prometheus takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """What one metric means; `kind` is Prometheus's, counter or gauge."""

    kind: str
    labels: tuple[str, ...]
    help: str


METRICS = {
    "tuna_jobs": Metric("gauge", ("session", "state"), "Jobs by state."),
    "tuna_errors_total": Metric("counter", ("session", "cause"), "Failed attempts by cause."),
    "tuna_queue_items": Metric("gauge", ("queue",), "Chunks that wait in a queue; results that wait for the drain."),
    "tuna_workers": Metric("gauge", ("role",), "Worker processes that announce themselves."),
    "tuna_device_idle_ratio": Metric(
        "gauge", ("session",), "Share of the time from its first to its last measurement that a device was idle."
    ),
    "tuna_trials_total": Metric("counter", ("session",), "Trials, good or failed."),
    "tuna_results_drained_total": Metric("counter", (), "Results of workers that are in SQL."),
    "tuna_up": Metric("gauge", ("service",), "Whether the service answered this scrape."),
}


@dataclass
class Samples:
    """Values by metric and label values."""

    values: dict[str, dict[tuple[str, ...], float]] = field(default_factory=dict)

    def set(self, name: str, value: float, *labels: object) -> None:
        """One value; `labels` in the order of the table."""
        assert len(labels) == len(METRICS[name].labels), name
        self.values.setdefault(name, {})[tuple(map(str, labels))] = value


def text_of(samples: Samples) -> str:
    """The text format 0.0.4 of Prometheus; a metric without a value is left out."""
    lines: list[str] = []
    for name, metric in METRICS.items():
        values = samples.values.get(name)
        if values:
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
            lines += [f"{name}{_labels(metric.labels, labels)} {values[labels]:.12g}" for labels in sorted(values)]
    return "".join(f"{line}\n" for line in lines)


def _labels(names: Iterable[str], values: Iterable[str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


_ESCAPES: Mapping[int, str] = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
