"""`tuna metrics`: the metrics by name, gathered from SQL, Redis and the broker, and the answer to
Prometheus. A package registers more of SQL under the entry point group `tuna.metrics`:

    [project.entry-points."tuna.metrics"]
    mine = "my_package.figures:METRICS"
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import redis
import sqlalchemy as sa
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as PrometheusMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector as PrometheusCollector
from sqlalchemy.exc import DBAPIError

from tuna.common.signals import INTERRUPTS
from tuna.db import models, overview, sessions
from tuna.db.engine import reading
from tuna.errors import BadInput, ServiceError, TunaError
from tuna.plugins import Plugins
from tuna.queue.connection import connect_broker, queue_depth, redis_url
from tuna.queue.envelopes import dropped
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.queue.leases import Leases
from tuna.reports.totals import Totals
from tuna.services import redis_client
from tuna.settings import Settings
from tuna.vocabulary import queue_name

log = structlog.get_logger(__name__)

#: Seconds of a scrape, whose default timeout is 10 s, for reading new results, and for waiting till
#: a service answers
_READ_S = 4.0
_WAIT_S = 2
#: Seconds that a client may send nothing
_CLIENT_S = 10.0
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


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
    "tuna_messages_dropped_total": Metric(
        "counter", (), "Messages on a queue that no coordinator sent."
    ),
    "tuna_results_drained_total": Metric("counter", (), "Results of workers that are in SQL."),
    "tuna_up": Metric("gauge", ("service",), "Whether the service answered this scrape."),
}


@dataclass(eq=False)  # a registry keeps its collectors as keys
class Samples(PrometheusCollector):
    """Values by metric and label values; a collector of prometheus_client, which writes them
    down."""

    values: dict[str, dict[tuple[str, ...], float]] = field(default_factory=dict)

    def set(self, name: str, value: float, *labels: object) -> None:
        """One value; `labels` in the order of the table."""
        assert len(labels) == len(metrics()[name].labels), name
        self.values.setdefault(name, {})[tuple(map(str, labels))] = value

    def collect(self) -> Iterator[PrometheusMetric]:
        """The metrics that have a value, in the order of the table."""
        for name, metric in metrics().items():
            values = self.values.get(name)
            if values:
                family = _FAMILIES[metric.kind](name, metric.help, labels=metric.labels)
                for labels in sorted(values):
                    family.add_metric(labels, values[labels])
                yield family


@dataclass(frozen=True)
class SqlMetrics:
    """Metrics of a package, from SQL."""

    metrics: Mapping[str, Metric]
    read: Callable[[sa.Connection, Samples], None]


_OF_PACKAGES: Plugins[SqlMetrics] = Plugins("tuna.metrics", "set of metrics", SqlMetrics)


@functools.cache
def metrics() -> Mapping[str, Metric]:
    """Return all metrics by name, the core's first."""
    found = dict(METRICS)
    for one in _OF_PACKAGES.all().values():
        found.update(one.metrics)
    return found


#: Families without times of creation, which would be one more sample for each counter
_FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


def text_of(samples: Samples) -> str:
    """The text format 0.0.4 of Prometheus; a metric without a value is left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(samples)
    return generate_latest(registry).decode()


class Collector:
    """Answers one scrape after the other. Facts about queues are cached for outages of SQL."""

    def __init__(self, engine: sa.Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._totals = Totals(trials=True)
        self._one_at_a_time = threading.Lock()
        self._namespace: str | None = None
        self._queues: set[str] = set()

    def scrape(self) -> str:
        """The text; metrics of unreachable services are left out, and their `tuna_up` is 0."""
        samples = Samples()
        parts = {"sql": self._from_sql, "redis": self._from_redis, "broker": self._from_broker}
        with self._one_at_a_time:
            for service, gather in parts.items():
                samples.set("tuna_up", float(self._try(service, gather, samples)), service)
        return text_of(samples)

    def _try(self, service: str, gather: Callable[[Samples], None], samples: Samples) -> bool:
        part = Samples()
        try:
            gather(part)
        except (DBAPIError, TunaError, redis.RedisError, OSError, ValueError) as error:
            log.warning("service unreachable", service=service, error=str(error).splitlines()[0])
            return False
        for name, values in part.values.items():
            samples.values.setdefault(name, {}).update(values)
        return True

    def _from_sql(self, samples: Samples) -> None:
        with reading(self._engine) as connection:
            whole = self._totals.advance(connection, _READ_S)
            self._namespace = sessions.namespace(connection)
            self._queues = _queues(connection)
            for source in _OF_PACKAGES.all().values():
                source.read(connection, samples)
        for session in overview.read(self._engine):
            for state, number in session.jobs.items():
                samples.set("tuna_jobs", number, session.session_id, state)
            for state, number in session.searches.rounds.items():
                samples.set("tuna_rounds", number, session.session_id, state)
            if session.searches.total:
                ended = sum(session.searches.ended.values())
                samples.set(
                    "tuna_searches", session.searches.going_on, session.session_id, "going_on"
                )
                samples.set("tuna_searches", ended, session.session_id, "ended")
            for failure in session.failures:
                samples.set(
                    "tuna_errors_total", failure.attempts, session.session_id, failure.cause
                )
        if not whole:
            return  # a counter that is still being read would look like a burst
        totals = self._totals.sessions()
        samples.set("tuna_results_drained_total", sum(total.drained for total in totals.values()))
        for session_id, total in totals.items():
            samples.set("tuna_trials_total", total.trials, session_id)
            if total.idle_share is not None:
                samples.set("tuna_device_idle_ratio", total.idle_share, session_id)

    def _from_redis(self, samples: Samples) -> None:
        with redis_client.single_attempt_client(redis_url(self._settings), _WAIT_S) as client:
            samples.set("tuna_messages_dropped_total", dropped(client))
            if self._namespace is None:
                return
            lease_s = self._settings.lease_s
            samples.set(
                "tuna_queue_items",
                client.xlen(Leases(client, self._namespace, lease_s).results_key),
                "results",
            )
            roles = Counter({"compile": 0, "eval": 0})
            roles.update(
                worker.role for worker in HeartbeatBoard(client, self._namespace, lease_s).live()
            )
            for role, number in roles.items():
                samples.set("tuna_workers", number, role)

    def _from_broker(self, samples: Samples) -> None:
        with connect_broker(self._settings, _WAIT_S) as connection:
            for queue in sorted(self._queues):
                samples.set("tuna_queue_items", queue_depth(connection, queue), queue)


def _queues(connection: sa.Connection) -> set[str]:
    """The queues of all sessions."""
    environment = models.EnvironmentRow
    rows = connection.execute(sa.select(environment.toolchain, environment.machine_key)).all()
    return {
        queue_name(on_device, row.toolchain, row.machine_key)
        for row in rows
        for on_device in (False, True)
    }


class _Handler(BaseHTTPRequestHandler):
    collector: Collector
    timeout = _CLIENT_S

    def do_GET(self) -> None:
        """`/metrics`, and nothing else."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the metrics are at /metrics")
            return
        try:
            body = self.collector.scrape().encode()
        except Exception:
            log.exception("scrape failed")
            self.send_error(500)
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        """The same without a body."""
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Log a line: a client that goes away is no reason for a traceback."""
        error = sys.exc_info()[1]
        log.warning("request for metrics failed", error=f"{type(error).__name__}: {error}"[:300])


def server(collector: Collector, listen: str) -> ThreadingHTTPServer:
    """A server that is bound to `listen` (HOST:PORT); raises BadInput or ServiceError."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise BadInput(f"{listen!r} is not of the form HOST:PORT.")
    handler = type("Handler", (_Handler,), {"collector": collector})
    try:
        return _Server((host.strip("[]"), int(port)), handler)
    except OSError as error:
        raise ServiceError(
            f"Metrics cannot be offered at {listen}: {error.strerror}.",
            hint="choose another address with --listen",
        ) from None


def serve(
    engine: sa.Engine, settings: Settings, listen: str, started: Callable[[str], None]
) -> None:
    """Answer until Ctrl-C; `started` gets the URL."""
    with server(Collector(engine, settings), listen) as http:
        host, port = http.server_address[:2]
        started(f"http://{host!s}:{port}/metrics")
        try:
            http.serve_forever()
        except INTERRUPTS:
            return
