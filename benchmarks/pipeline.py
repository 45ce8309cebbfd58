"""Jobs per second through the whole pipeline with a library that does nothing: SQLite and the embedded Redis.

A job here has both steps, so that each is claimed, published, run and drained twice; the budget counts jobs, and the
figures `steps_per_s` count each step. The baseline is plain Celery on the same Redis with one item per message.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome

BUDGET_JOBS_PER_S = 5000.0
_BASELINE_TASKS = 2000


def main() -> int:
    """Run it; options say how many jobs and which steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--steps", default="build", help="comma-separated: build, measure")
    parser.add_argument("--json", action="store_true", help="accepted; the output always is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tuna-bench-") as home:
        os.environ["TUNA_HOME"] = home
        for name in ("TUNA_DB_URL", "TUNA_BROKER_URL", "CELERY_BROKER_URL", "TUNA_REDIS_URL", "CELERY_RESULT_BACKEND"):
            os.environ.pop(name, None)
        return _measure(options.jobs, options.steps.split(","))


def _measure(count: int, steps: list[str]) -> int:
    from tuna.db.engine import reading
    from tuna.libraries.registry import get_library
    from tuna.pipeline.connection import ensure_services, release_services
    from tuna.pipeline.run import progress, run_session
    from tuna.settings import get_settings
    from tuna.workers.launch import WorkerSpec

    settings = get_settings()
    library = get_library("noop")
    engine, session_id, load_s = _load(count, steps)
    ensure_services(settings)
    split = _Stopwatch()
    queues = {"build": WorkerSpec("compile"), "measure": WorkerSpec("eval")}
    started = time.perf_counter()
    with split:
        state = run_session(engine, settings, session_id, workers=[queues[step] for step in steps])
    run_s = time.perf_counter() - started
    with reading(engine) as connection:
        assert progress(connection, library, session_id, []).unfinished == 0, state
    worker_s = _worker_alone(count)
    baseline = _one_per_message()
    release_services(settings)
    figures = {
        "jobs": float(count),
        "end_to_end_per_s": count / (load_s + run_s),
        "load_per_s": count / load_s,
        "claim_and_publish_per_s": count * len(steps) / split.seconds["publish"],
        "work_per_s": count / worker_s,
        "drain_per_s": count * len(steps) / split.seconds["drain"],
        "steps_per_s": count * len(steps) / run_s,
        "run_s": run_s,
    }
    outcome = Outcome(
        "pipeline",
        figures,
        baseline={"celery_one_item_per_message_per_s": baseline},
        ratios={"end_to_end_vs_celery": figures["end_to_end_per_s"] / baseline},
        budget={"end_to_end_per_s": BUDGET_JOBS_PER_S},
    )
    return outcome.print()


def _load(count: int, steps: list[str]) -> tuple[Any, int, float]:
    from tuna.configs import GemmConfig
    from tuna.db import configs, jobs, schema, sessions, solvers
    from tuna.db.engine import make_engine, writing
    from tuna.libraries.registry import get_library
    from tuna.settings import get_settings

    settings = get_settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    engine = make_engine(settings.sql_url)
    schema.require(engine, embedded=True)
    library = get_library("noop")
    layers = [GemmConfig(m=16, n=16, k=number + 1) for number in range(-(-count // 10))]
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, library.environment(), "benchmark")
        configs.store(connection, layers, "bench")
        solvers.update_solvers(connection, library)
    solvers.update_applicability(engine, library, session_id)
    started = time.perf_counter()
    with writing(engine) as connection:
        request = jobs.JobRequest(session_id, "noop", steps, "benchmark", "new", tag="bench")
        loaded = jobs.load(connection, request)
    assert loaded == count, loaded
    return engine, session_id, time.perf_counter() - started


class _Stopwatch:
    """Seconds that the enqueuing process spends in its two halves."""

    def __init__(self) -> None:
        self.seconds = {"publish": 0.0, "drain": 0.0}

    def __enter__(self) -> None:
        from tuna.pipeline.drain import Drain
        from tuna.pipeline.enqueue import Enqueuer

        self._patch(Enqueuer, "publish", "publish")
        self._patch(Drain, "write", "drain")

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)

    _originals: list[tuple[type, str, Any]] = []  # noqa: RUF012

    def _patch(self, owner: type, name: str, label: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                self.seconds[label] += time.perf_counter() - started

        self._originals.append((owner, name, original))
        setattr(owner, name, timed)


def _worker_alone(count: int) -> float:
    """Seconds in which one process takes, runs and reports `count` items in chunks, without Celery."""
    from tuna.artifacts import Artifacts
    from tuna.configs import GemmConfig
    from tuna.libraries.base import RunContext, WorkItem
    from tuna.libraries.registry import get_library
    from tuna.pipeline.connection import connect
    from tuna.pipeline.leases import Leases, new_id
    from tuna.pipeline.runner import Runner
    from tuna.pipeline.wire import Chunk
    from tuna.settings import get_settings

    settings = get_settings()
    client = connect(settings)
    library = get_library("noop")
    runner = Runner(client, settings.lease_s, RunContext(Artifacts.from_settings(settings), Path(settings.home), (0,)))
    config = GemmConfig(m=16, n=16, k=16).to_json()
    texts = []
    for start in range(0, count, 50):
        items = tuple(
            WorkItem(
                job_id=start + i, attempt=1, session_id=1, library="noop", step="build", solver="Noop0", config=config
            )
            for i in range(50)
        )
        chunk = Chunk(
            id=new_id(),
            namespace="bench",
            library="noop",
            step="build",
            environment="",
            toolchain="noop-1",
            items=items,
        )
        texts.append(chunk.model_dump_json())
        Leases(client, "bench", settings.lease_s).open([chunk.id])
    started = time.perf_counter()
    for text in texts:
        assert runner.run(Chunk.model_validate_json(text), library) == "finished"
    return time.perf_counter() - started


def _one_per_message() -> float:
    """Tasks per second of plain Celery: one no-op per message, published and run, worker start included."""
    from tuna.celery_app import app

    started = time.perf_counter()
    with app.producer_or_acquire() as producer:
        for _ in range(_BASELINE_TASKS):
            app.send_task(
                "tuna.run_chunk", kwargs={"chunk": "{}"}, queue="baseline", producer=producer, ignore_result=True
            )
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "tuna.celery_app", "worker", "-Q", "baseline", "-c", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with app.connection_for_read() as connection:
            client = connection.default_channel.client
            while client.llen("baseline") or client.hlen("unacked"):
                time.sleep(0.02)
        return _BASELINE_TASKS / (time.perf_counter() - started)
    finally:
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    raise SystemExit(main())
