"""`tuna metrics`: what Prometheus gets, from services that answer and from services that do not."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import make_jobs, make_searches
from kombu import Connection, Queue
from million_jobs import fill
from prometheus_client.parser import text_string_to_metric_families
from raw_requests import RawRequests, logged_in_lines, send_all

from tuna.db import models
from tuna.db.engine import make_engine, reading, writing
from tuna.errors import BadInput, ServiceError
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.reports import prometheus
from tuna.reports.prometheus import METRICS, Collector, Samples, metrics, text_of
from tuna.settings import Settings

AWAY = dict.fromkeys(("TUNA_REDIS_URL", "TUNA_BROKER_URL"), "redis://127.0.0.1:1/0")
LINE = re.compile(r'^(tuna_\w+)(\{((\w+)="((?:[^"\\\n]|\\["\\n])*)",?)*\})? (\S+)$')


def _settings(tmp_path: Path, urls: Mapping[str, str]) -> Settings:
    return Settings(
        home=tmp_path, redis_url=urls["TUNA_REDIS_URL"], broker_url=urls["TUNA_BROKER_URL"]
    )


def _read(text: str) -> dict[str, float]:
    """Samples by name with labels in the order of the table; checks each line."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = LINE.match(line)
        assert match, line
        labels = dict(re.findall(r'(\w+)="((?:[^"\\\n]|\\["\\n])*)"', match[2] or ""))
        assert set(labels) == set(metrics()[match[1]].labels)
        pairs = ",".join(f'{name}="{labels[name]}"' for name in metrics()[match[1]].labels)
        sample = match[1] + (f"{{{pairs}}}" if pairs else "")
        assert sample not in found, "given twice"
        found[sample] = float(match[6])
    return found


@pytest.fixture
def filled(engine: sa.Engine) -> sa.Engine:
    fill(engine, 1000)
    with writing(engine) as connection:
        job = connection.execute(sa.select(sa.func.min(models.Job.id))).scalar_one()
        rows = [{"job_id": job, "number": n, "output_tail": "", "times_ms": "[]"} for n in range(7)]
        connection.execute(sa.insert(models.TrialRow), rows)
        waiting = connection.execute(
            sa.select(sa.func.min(models.Job.id)).where(models.Job.state == "new")
        ).scalar_one()
        make_searches(connection, models.Job.id == waiting)
    return engine


def test_every_metric_is_there(
    filled: sa.Engine, tmp_path: Path, redis_client: redis.Redis, redis_urls: dict[str, str]
) -> None:
    with reading(filled) as connection:
        namespace = connection.execute(sa.select(models.Installation.namespace)).scalar_one()
        key = connection.execute(sa.select(models.EnvironmentRow.key)).scalar_one()
    facts: dict[str, Any] = {
        "host": "h",
        "pid": 1,
        "device": "",
        "environment": "",
        "toolchains": (),
        "job_ids": (),
    }
    for name, role in (("a", "compile"), ("b", "compile"), ("c", "eval")):
        HeartbeatBoard(redis_client, namespace, 20).announce(
            WorkerStatus(name=name, role=role, started_at=0.0, seen_at=0.0, **facts)
        )
    redis_client.xadd(f"tuna:{{{namespace}}}:results", {"r": "x"})
    settings = _settings(tmp_path, redis_urls)
    with Connection(settings.broker_url.get_secret_value()) as connection:  # type: ignore[union-attr]
        producer = connection.Producer()
        for _ in range(3):
            producer.publish({}, routing_key="compile.noop-1", declare=[Queue("compile.noop-1")])
    found = _read(Collector(filled, settings).scrape())
    assert found == {
        'tuna_jobs{session="1",state="compile_queued"}': 40,
        'tuna_jobs{session="1",state="compiled"}': 150,
        'tuna_jobs{session="1",state="compiling"}': 20,
        'tuna_jobs{session="1",state="errored"}': 50,
        'tuna_jobs{session="1",state="eval_queued"}': 30,
        'tuna_jobs{session="1",state="evaluated"}': 500,
        'tuna_jobs{session="1",state="evaluating"}': 10,
        'tuna_jobs{session="1",state="new"}': 209,
        'tuna_searches{session="1",state="going_on"}': 1,
        'tuna_searches{session="1",state="ended"}': 0,
        'tuna_rounds{session="1",state="new"}': 1,
        'tuna_errors_total{session="1",cause="run_error"}': 10,
        'tuna_errors_total{session="1",cause="run_timeout"}': 20,
        'tuna_errors_total{session="1",cause="worker_lost"}': 10,
        'tuna_errors_total{session="1",cause="wrong_result"}': 10,
        'tuna_queue_items{queue="compile.noop-1"}': 3,
        f'tuna_queue_items{{queue="eval.{key}"}}': 0,
        'tuna_queue_items{queue="results"}': 1,
        'tuna_workers{role="compile"}': 2,
        'tuna_workers{role="eval"}': 1,
        'tuna_device_idle_ratio{session="1"}': pytest.approx(1 - 550 * 0.25 / 8 / 3600, abs=0.01),
        'tuna_trials_total{session="1"}': 7,
        "tuna_messages_dropped_total": 0,
        "tuna_results_drained_total": 1350,
        'tuna_up{service="broker"}': 1,
        'tuna_up{service="redis"}': 1,
        'tuna_up{service="sql"}': 1,
    }
    assert {name.partition("{")[0] for name in found} == set(METRICS)


def test_without_redis_there_is_what_sql_knows(engine: sa.Engine, tmp_path: Path) -> None:
    make_jobs(engine, 1)
    found = _read(Collector(engine, _settings(tmp_path, AWAY)).scrape())
    assert found['tuna_jobs{session="1",state="new"}'] == 10
    assert (
        found['tuna_up{service="sql"}'],
        found['tuna_up{service="redis"}'],
        found['tuna_up{service="broker"}'],
    ) == (
        1,
        0,
        0,
    )
    assert not any(name.startswith(("tuna_workers", "tuna_queue")) for name in found)


def test_without_sql_there_is_what_redis_knows(
    engine: sa.Engine, tmp_path: Path, redis_urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_jobs(engine, 1)
    collector = Collector(engine, _settings(tmp_path, redis_urls))
    assert _read(collector.scrape())['tuna_up{service="sql"}'] == 1
    away = make_engine("mysql+pymysql://root@127.0.0.1:1/tuna")
    monkeypatch.setattr(collector, "_engine", away)
    found = _read(collector.scrape())
    assert found == {
        'tuna_queue_items{queue="compile.noop-1"}': 0,
        **{name: 0 for name in found if name.startswith('tuna_queue_items{queue="eval.')},
        'tuna_queue_items{queue="results"}': 0,
        "tuna_messages_dropped_total": 0,
        'tuna_workers{role="compile"}': 0,
        'tuna_workers{role="eval"}': 0,
        'tuna_up{service="broker"}': 1,
        'tuna_up{service="redis"}': 1,
        'tuna_up{service="sql"}': 0,
    }
    monkeypatch.setattr(collector, "_engine", engine)
    assert _read(collector.scrape())['tuna_up{service="sql"}'] == 1, "it comes back by itself"


def test_with_nothing_at_all_there_is_that(tmp_path: Path) -> None:
    found = _read(
        Collector(
            make_engine("mysql+pymysql://root@127.0.0.1:1/tuna"), _settings(tmp_path, AWAY)
        ).scrape()
    )
    assert found == {f'tuna_up{{service="{name}"}}': 0 for name in ("broker", "redis", "sql")}


def test_a_counter_that_is_still_being_read_is_left_out(
    filled: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuna.reports import totals

    for name, value in (("_CHUNK", 100), ("_UNSETTLED", 10)):
        monkeypatch.setattr(totals, name, value)
    monkeypatch.setattr(prometheus, "_READ_S", 0.0)
    collector = Collector(filled, _settings(tmp_path, AWAY))
    assert "tuna_results_drained_total" not in _read(collector.scrape())
    drained = [_read(collector.scrape()).get("tuna_results_drained_total") for _ in range(20)]
    assert drained[-1] == 1350
    assert set(drained) == {None, 1350}


def test_label_values_are_escaped() -> None:
    samples = Samples()
    samples.set("tuna_queue_items", 1, 'compile.a"b\\c\nd')
    assert text_of(samples).splitlines()[-1] == r'tuna_queue_items{queue="compile.a\"b\\c\nd"} 1.0'


def test_big_counters_keep_their_digits() -> None:
    samples = Samples()
    samples.set("tuna_results_drained_total", 12_345_678_901)
    assert _read(text_of(samples)) == {"tuna_results_drained_total": 12_345_678_901}


def test_prometheus_own_parser_finds_each_metric_with_its_kind_and_nothing_else() -> None:
    samples = Samples()
    for name, metric in metrics().items():
        samples.set(name, 1, *metric.labels)
    families = list(text_string_to_metric_families(text_of(samples)))
    assert {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families
    } == {name: metric.kind for name, metric in metrics().items()}
    assert [sample.name for family in families for sample in family.samples] == list(metrics())


@pytest.fixture
def served(tmp_path: Path, sqlite_engine: sa.Engine) -> Iterator[str]:
    make_jobs(sqlite_engine, 1)
    with prometheus.server(
        Collector(sqlite_engine, _settings(tmp_path, AWAY)), "127.0.0.1:0"
    ) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def _get(url: str) -> Any:
    return urllib.request.urlopen(url)  # noqa: S310 (http, of our own server)


def test_the_page_is_served_at_metrics_and_nowhere_else(served: str) -> None:
    with _get(f"{served}/metrics") as answer:
        assert answer.headers["Content-Type"] == prometheus.CONTENT_TYPE
        assert _read(answer.read().decode())['tuna_jobs{session="1",state="new"}'] == 10
    with pytest.raises(urllib.error.HTTPError, match="404"):
        _get(f"{served}/etc/passwd")
    head = urllib.request.Request(f"{served}/metrics", method="HEAD")  # noqa: S310
    with urllib.request.urlopen(head) as answer:  # noqa: S310
        assert (answer.status, answer.read()) == (200, b"")


def test_malformed_requests_for_metrics_are_refused_in_a_line(
    served: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.3)
    host = served.removeprefix("http://")
    requests = RawRequests(7, host, ["GET /metrics", "HEAD /metrics", "GET /{}"], [], ["a"])
    with logged_in_lines():
        answers = send_all(list(islice(requests, 60)), int(host.partition(":")[2]))
        assert _get(f"{served}/metrics").status == 200
    assert {*answers.statuses} <= {0, 200, 400, 404, 414, 431, 501, 505}
    assert "Traceback" not in capfd.readouterr().err


def test_scrapes_at_once_all_get_the_same(served: str) -> None:
    texts: list[str] = []

    def scrape() -> None:
        with _get(f"{served}/metrics") as answer:
            texts.append(answer.read().decode())

    threads = [threading.Thread(target=scrape) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_an_address_that_cannot_be_used_is_one_sentence(served: str, tmp_path: Path) -> None:
    collector = Collector(make_engine("sqlite://"), _settings(tmp_path, AWAY))
    with pytest.raises(ServiceError, match="already in use"):
        prometheus.server(collector, served.removeprefix("http://"))
    for listen in ("9464", "localhost:http", "localhost:70000"):
        with pytest.raises(BadInput, match="HOST:PORT"):
            prometheus.server(collector, listen)
