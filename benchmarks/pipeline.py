"""Jobs per second through the whole pipeline, with the servers on the same machine.

`--db sqlite` is the embedded SQLite and Redis, `--db mariadb` a private MariaDB and Redis with the
settings of docker/. `--library noop` does no work, so that all time is the pipeline's overhead; the
baseline is plain Celery on the same Redis with one item per message. `--library miopen` runs the
fin double as a subprocess: the figure is the share of the wall time, including worker start, in
which the worker of the busiest queue does not run fin. The double takes `--fin-s` per solver; with
0 the share is dominated by starting a Python program. `--gate` compares a remote worker, through a
gateway, with an own worker, in turn, without their start. `--memory` compares the coordinator's
peak memory for 10,000 and 200,000 jobs. CPU seconds are those of all processes, including servers.
`--baseline DIR` compares with another checkout, which has a `.venv` of its own, such as one of the
first release (commit a1b94d1): both run in turn, `--rounds` times, and the ratios are those of the
medians. On a busy machine look at the CPU seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import joined as joined_workers
from benchmarks.baseline import compare
from benchmarks.harness import Outcome, command_line
from benchmarks.servers import CpuMeter, home, peak_mib

BUDGET_JOBS_PER_S = {"sqlite": 5000.0, "mariadb": 3000.0}
BUDGET_MEMORY_RATIO = 1.3
BUDGET_NOT_FIN_SHARE = 0.15
_MEMORY_JOBS = (10_000, 200_000)
_BASELINE_TASKS = 2000
_JOBS = {"noop": 60_000, "miopen": 350}
_ROUNDS = 3
_STEPS = {"noop": "build", "miopen": "miopen_find_compile,miopen_find_eval"}


@dataclass(frozen=True)
class Run:
    """Figures reported by the coordinator process."""

    run_s: float
    start_s: float  #: part of run_s before the first report of a worker: mostly worker start
    publish_s: float  #: part of run_s spent claiming and publishing
    drain_s: float  #: part of run_s spent draining
    cpu_s: float
    peak_mib: float


def main() -> int:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--db", choices=("sqlite", "mariadb"), default="sqlite")
    parser.add_argument("--library", choices=("noop", "miopen"), default="noop")
    parser.add_argument("--jobs", type=int, help=f"default: {_JOBS}")
    parser.add_argument("--steps", help=f"comma-separated; default: {_STEPS}")
    parser.add_argument(
        "--fin-s", type=float, default=0.25, help="seconds that the fin double takes per solver"
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure the coordinator's memory at two sizes"
    )
    parser.add_argument(
        "--gate",
        action="store_true",
        help="compare a remote worker, through a gateway, with an own worker",
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="DIR", help="checkout to compare with; it has a .venv"
    )
    parser.add_argument(
        "--rounds", type=int, default=_ROUNDS, help="runs of each, for --baseline and --gate"
    )
    parser.add_argument(
        "--child", nargs=3, metavar=("SESSION", "STEPS", "WORKERS"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.child:
        session, steps, workers = options.child
        return _child(int(session), steps.split(","), is_remote=workers == "remote")
    count = options.jobs or _JOBS[options.library]
    steps = (options.steps or _STEPS[options.library]).split(",")
    if options.baseline:
        return compare(options.baseline, options.db, count, steps, options.rounds)
    with home(options.db) as folder:
        if options.gate:
            return joined_workers.compare(
                f"pipeline {options.db}",
                count * len(steps),
                options.rounds,
                lambda *kind: _busy_s(count, steps, *kind),
            )
        if options.library == "miopen":
            return _miopen(folder, count, steps, options.fin_s)
        return _noop(options.db, count, steps, memory=options.memory)


def _noop(db: str, count: int, steps: list[str], *, memory: bool) -> int:
    from tuna.queue.connection import ensure_services, release_services
    from tuna.settings import get_settings

    ensure_services(get_settings())
    session_id, loaded, load_s = _load("noop", count, steps, "benchmark")
    with CpuMeter() as meter:
        run = _run(session_id, steps)
    cpu = meter.seconds()
    worker_s = _worker_alone(count)
    baseline = _one_per_message()
    figures = {
        "jobs": float(loaded),
        "end_to_end_per_s": loaded / (load_s + run.run_s),
        "load_per_s": loaded / load_s,
        "claim_and_publish_per_s": loaded * len(steps) / run.publish_s,
        "work_per_s": loaded / worker_s,
        "drain_per_s": loaded * len(steps) / run.drain_s,
        "steps_per_s": loaded * len(steps) / run.run_s,
        "run_s": run.run_s,
        "start_s": run.start_s,
        "cpu_s": sum(cpu.values()),
        "cpu_coordinator_s": run.cpu_s,
        "jobs_per_cpu_s": loaded / sum(cpu.values()),
    }
    figures |= {f"cpu_{name.replace('-', '_')}_s": seconds for name, seconds in cpu.items()}
    ratios = {"end_to_end_vs_celery": figures["end_to_end_per_s"] / baseline}
    limits = {}
    if memory:
        sizes = [_memory(jobs, steps) for jobs in _MEMORY_JOBS]
        figures |= {
            f"coordinator_mib_{jobs}_jobs": mib
            for jobs, mib in zip(_MEMORY_JOBS, sizes, strict=True)
        }
        ratios["coordinator_memory_large_vs_small"] = sizes[1] / sizes[0]
        limits["coordinator_memory_large_vs_small"] = BUDGET_MEMORY_RATIO
    release_services(get_settings())
    outcome = Outcome(
        f"pipeline {db}",
        figures,
        baseline={"celery_one_item_per_message_per_s": baseline},
        ratios=ratios,
        budget={"end_to_end_per_s": BUDGET_JOBS_PER_S[db]},
        limits=limits,
    )
    return outcome.print()


def _busy_s(count: int, steps: list[str], reason: str, is_remote: bool) -> float:
    """Seconds of a run after the first report of its worker."""
    session_id, _, _ = _load("noop", count, steps, reason)
    run = _run(session_id, steps, "remote" if is_remote else "own")
    return run.run_s - run.start_s


def _memory(count: int, steps: list[str]) -> float:
    session_id, _, _ = _load("noop", count, steps, f"{count} jobs")
    return _run(session_id, steps).peak_mib


def _miopen(folder: Path, count: int, steps: list[str], fin_s: float) -> int:
    from tests.fin_double.rocm import install
    from tuna.queue.connection import ensure_services, release_services
    from tuna.settings import get_settings

    os.environ.update(install(folder / "rocm", options={"sleep_s": fin_s}))
    calls = folder / "calls"
    calls.touch()  # fin's box opens what is there
    os.environ["TUNA_SANDBOX_WRITE"] = str(calls)
    os.environ["TUNA_FIN"] = _timed_fin(folder, os.environ["TUNA_FIN"], calls)
    get_settings.cache_clear()
    ensure_services(get_settings())
    session_id, loaded, _ = _load("miopen", count, steps, "benchmark")
    calls.write_text("")  # drop the calls made while loading: get_solvers and applicability
    run = _run(session_id, steps)
    release_services(get_settings())
    fin = _calls_by_step(calls, steps)
    busiest = max(fin.values(), key=sum)
    figures = {
        "jobs": float(loaded),
        "fin_s_per_solver": fin_s,
        "steps_per_s": loaded * len(steps) / run.run_s,
        "run_s": run.run_s,
        "start_s": run.start_s,
        "cpu_coordinator_s": run.cpu_s,
        "calls_of_busiest_queue": float(len(busiest)),
        "not_fin_ms_per_call": (run.run_s - run.start_s - sum(busiest)) / len(busiest) * 1000,
    }
    figures |= {f"fin_{step}_s": sum(seconds) for step, seconds in fin.items()}
    ratios = {"not_fin_share": 1 - sum(busiest) / run.run_s}
    baseline = {"fin_alone_s": sum(busiest)}
    limits = {"not_fin_share": BUDGET_NOT_FIN_SHARE}
    return Outcome("pipeline miopen", figures, baseline, ratios, limits=limits).print()


def _timed_fin(folder: Path, fin: str, calls: Path) -> str:
    """A wrapper script around fin that appends start, end and step of each call to `calls`."""
    path = folder / "fin"
    log = shlex.quote(str(calls))
    path.write_text(
        f'#!/bin/bash\nstart=$EPOCHREALTIME\n{shlex.quote(fin)} "$@"\n'
        "code=$?\nend=$EPOCHREALTIME\n"
        '[[ $(head -c 4000 "$2") =~ miopen_[a-z]+_[a-z]+ ]]\n'
        f'echo "$start $end $BASH_REMATCH" >>{log}\nexit $code\n'
    )
    path.chmod(0o755)
    return str(path)


def _calls_by_step(calls: Path, steps: list[str]) -> dict[str, list[float]]:
    """Duration of each call of fin in seconds, by step."""
    seconds: dict[str, list[float]] = {step: [] for step in steps}
    for line in calls.read_text().splitlines():
        start, end, step = line.split()
        seconds[step].append(float(end) - float(start))
    return seconds


def _load(library_name: str, count: int, steps: list[str], reason: str) -> tuple[int, int, float]:
    """Create a session with at least `count` jobs; return its id, jobs and seconds of loading."""
    from tuna.db import configs, database, jobs, sessions, solvers
    from tuna.db.engine import make_engine, writing
    from tuna.libraries.registry import get_library
    from tuna.settings import get_settings

    settings = get_settings()
    engine = make_engine(settings.sql_url)
    database.upgrade(engine)
    library = get_library(library_name)
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, library.environment(), reason)
        configs.store(connection, _layers(library_name, count), reason)
        solvers.update_solvers(connection, library)
    solvers.update_applicability(engine, library, session_id, reason)
    started = time.perf_counter()
    with writing(engine) as connection:
        loaded = jobs.load(
            connection, jobs.JobRequest(session_id, library_name, steps, reason, "new", tag=reason)
        )
    seconds = time.perf_counter() - started
    assert loaded >= count, loaded
    engine.dispose()
    return session_id, loaded, seconds


def _layers(library: str, count: int) -> list[Any]:
    from tuna.configs import ConvConfig, GemmConfig

    if library == "noop":  # ten applicable solvers each
        return [GemmConfig(m=16, n=16, k=number + 1) for number in range(-(-count // 10))]
    return [  # at least seven applicable solvers each
        ConvConfig(1 + number % 16, 16 * (1 + number % 7), 7 + number, 14, 32, 3, 3, 1, 1)
        for number in range(-(-count // 7))
    ]


def _run(session_id: int, steps: list[str], workers: str = "own") -> Run:
    """Run the session in a separate coordinator process, with one worker process for each step;
    `workers`: own or remote."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.pipeline",
        "--child",
        str(session_id),
        ",".join(steps),
        workers,
    ]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Run(**json.loads(result.stdout))


def _child(session_id: int, steps: list[str], *, is_remote: bool) -> int:
    from tuna.common import logs
    from tuna.coordinator.session_run import run_sessions
    from tuna.db import sessions
    from tuna.db.engine import make_engine, reading
    from tuna.libraries.registry import get_library
    from tuna.settings import get_settings
    from tuna.vocabulary import Resource
    from tuna.workers.launch import WorkerSpec

    settings = get_settings()
    logs.configure(settings.log_level, settings.log_format)
    engine = make_engine(settings.sql_url)
    with reading(engine) as connection:
        library = get_library(sessions.get(connection, session_id).environment.library)
    queues = {Resource.CPU: WorkerSpec("compile"), Resource.DEVICE: WorkerSpec("eval")}
    workers = [queues[step.resource] for step in library.steps if step.name in steps]
    with _Stopwatch() as split, contextlib.ExitStack() as stack:
        if is_remote:
            for spec in workers:
                stack.enter_context(joined_workers.remote_worker(spec.queue))
            workers.clear()
        started = time.perf_counter()
        state = run_sessions(engine, settings, [session_id], workers=lambda _: workers)
        run_s = time.perf_counter() - started
    assert state.unfinished == state.errored == 0, state
    cpu_s = time.process_time()
    print(
        json.dumps(
            asdict(
                Run(
                    run_s,
                    split.first_report_at - started,
                    split.seconds["publish"],
                    split.seconds["drain"],
                    cpu_s,
                    peak_mib(),
                )
            )
        )
    )
    return 0


class _Stopwatch:
    """Seconds that the coordinator spends publishing and draining."""

    def __init__(self) -> None:
        self.seconds = {"publish": 0.0, "drain": 0.0}
        self.first_report_at = 0.0
        self._originals: list[tuple[type, str, Any]] = []

    def __enter__(self) -> _Stopwatch:
        from tuna.coordinator.coordinator import Coordinator
        from tuna.coordinator.drain import Drain

        self._patch(Coordinator, "publish", "publish")
        self._patch(Drain, "write", "drain")
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)

    def _patch(self, owner: type, name: str, label: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            if label == "drain" and args[1] and not self.first_report_at:
                self.first_report_at = started
            try:
                return original(*args, **options)
            finally:
                self.seconds[label] += time.perf_counter() - started

        self._originals.append((owner, name, original))
        setattr(owner, name, timed)


def _worker_alone(count: int) -> float:
    """Seconds in which one process leases, runs and reports `count` items without Celery."""
    from tuna.artifacts.store import Artifacts
    from tuna.configs import GemmConfig
    from tuna.libraries.context import RunContext
    from tuna.libraries.items import WorkItem
    from tuna.libraries.registry import get_library
    from tuna.queue.connection import connect
    from tuna.queue.leases import Leases, new_id
    from tuna.queue.messages import Chunk
    from tuna.settings import get_settings
    from tuna.workers.link import RedisLink
    from tuna.workers.runner import Runner

    settings = get_settings()
    client = connect(settings)
    library = get_library("noop")
    runner = Runner(
        RedisLink(client, settings.lease_s),
        RunContext(Artifacts.from_settings(settings), Path(settings.home), (0,)),
    )
    config = GemmConfig(m=16, n=16, k=16).to_json()
    texts = []
    for start in range(0, count, 50):
        items = tuple(
            WorkItem(
                job_id=start + i,
                attempt=1,
                session_id=1,
                library="noop",
                step="build",
                solver="Noop0",
                config=config,
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
    """Tasks per second of plain Celery, one no-op per message, including worker start."""
    from benchmarks.plain_celery import app, no_op

    started = time.perf_counter()
    with app.producer_or_acquire() as producer:
        for _ in range(_BASELINE_TASKS):
            no_op.apply_async(("{}",), producer=producer)
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "benchmarks.plain_celery", "worker", "-c", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with app.connection_for_read() as connection:
            channel: Any = connection.default_channel
            client = channel.client
            while client.llen(app.conf.task_default_queue) or client.hlen("unacked"):
                if worker.poll() is not None:
                    raise SystemExit(
                        f"The worker of plain Celery ended with exit code {worker.returncode}."
                    )
                time.sleep(0.02)
        return _BASELINE_TASKS / (time.perf_counter() - started)
    finally:
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    raise SystemExit(main())
