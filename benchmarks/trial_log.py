"""Jobs per second of the pipeline while it logs all trials to S3, and while that is away.

Three kinds of run in turn, `--rounds` times, each with a session of its own and one process for
each step of the library that does nothing: without a log, with one at an S3 server of this machine
(moto, which stands in for AWS), and with that server stopped (SIGSTOP: it takes connections and
does not answer) from the start, for `--away-s` seconds. Then the trials that arrived are counted.
On a busy machine look at the ratios, which are of medians. It needs `moto[server]` and the extra
`s3`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time

from benchmarks.harness import Outcome, command_line
from benchmarks.servers import home
from tests.private_servers import s3_server

BUDGET_RATIO = 0.95
_KINDS = ("none", "there", "away")


def main() -> int:
    """Command line."""
    parser = command_line(__doc__, jobs=100_000, rounds=3, away_s=60)
    parser.add_argument("--db", choices=("sqlite", "mariadb"), default="sqlite")
    parser.add_argument("--child", nargs=2, metavar=("SESSION", "URL"))
    asked = parser.parse_args()
    if asked.child:
        return _child(int(asked.child[0]), asked.child[1])
    with home(asked.db), s3_server() as server:
        return _compare(server, asked.jobs, asked.rounds, asked.away_s, asked.db)


def _compare(server: int, jobs: int, rounds: int, away_s: float, db: str) -> int:
    from tuna.queue.connection import ensure_services, release_services
    from tuna.settings import get_settings

    get_settings.cache_clear()
    ensure_services(get_settings())
    per_s: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    end_s: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    missing = 0
    for number in range(rounds):
        for kind in _KINDS:
            name = f"{kind}{number}"
            loaded, session_id = _load(jobs, name)
            url = "" if kind == "none" else f"s3://tuna/{name}"
            resume = threading.Timer(away_s, os.kill, [server, signal.SIGCONT])
            if kind == "away":
                os.kill(server, signal.SIGSTOP)
                resume.start()
            run_s, last_s = _run(session_id, url)
            resume.join() if kind == "away" else None
            per_s[kind].append(loaded / run_s)
            end_s[kind].append(last_s)
            if url:
                missing += loaded - _arrived(url)
            print(name, round(run_s, 1), round(last_s, 1), missing, file=sys.stderr)
    release_services(get_settings())
    least = statistics.median(per_s["none"])
    return Outcome(
        f"trial log {db}",
        {"missing": float(missing), "jobs": float(jobs)}
        | {f"{kind}_per_s": statistics.median(per_s[kind]) for kind in _KINDS}
        | {f"{kind}_end_s": statistics.median(end_s[kind]) for kind in _KINDS},
        ratios={f"{kind}_vs_none": statistics.median(per_s[kind]) / least for kind in _KINDS[1:]},
        budget={f"{kind}_vs_none": BUDGET_RATIO for kind in _KINDS[1:]},
        limits={"missing": 0},
    ).print()


def _load(jobs: int, reason: str) -> tuple[int, int]:
    from tuna.configs import GemmConfig
    from tuna.db import configs, database, sessions, solvers
    from tuna.db import jobs as of_sessions
    from tuna.db.engine import make_engine, writing
    from tuna.libraries.registry import get_library
    from tuna.settings import get_settings

    engine = make_engine(get_settings().sql_url)
    database.upgrade(engine)
    library = get_library("noop")
    with writing(engine) as connection:
        session_id, _ = sessions.create(connection, library.environment(), reason)
        layers = [GemmConfig(m=16, n=16, k=number + 1) for number in range(-(-jobs // 10))]
        configs.store(connection, layers, "all")
        solvers.update_solvers(connection, library)
    solvers.update_applicability(engine, library, session_id, "all")
    steps = [step.name for step in library.steps]
    wanted = of_sessions.JobRequest(
        session_id, "noop", steps, reason, "new", tag="all", options={"trials": True}
    )
    with writing(engine) as connection:
        loaded = of_sessions.load(connection, wanted)
    engine.dispose()
    return loaded, session_id


def _run(session_id: int, url: str) -> tuple[float, float]:
    """Seconds of a run, from the first results on, and of the end of its log."""
    command = [sys.executable, "-m", "benchmarks.trial_log", "--child", str(session_id), url]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    run_s, end_s = json.loads(done.stdout)
    return run_s, end_s


def _child(session_id: int, url: str) -> int:
    from tuna import api
    from tuna.coordinator.session_run import run_sessions
    from tuna.db.database import open_database
    from tuna.settings import get_settings
    from tuna.workers.launch import WorkerSpec

    first_at = 0.0
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(api.log_trials(url)) if url else None

        def stored(job_ids: object) -> None:
            nonlocal first_at
            first_at = first_at or time.perf_counter()
            if log is not None:
                log.add(job_ids)  # type: ignore[arg-type]

        workers = [WorkerSpec("compile"), WorkerSpec("eval")]
        state = run_sessions(
            open_database(),
            get_settings(),
            [session_id],
            workers=lambda _: workers,
            events=api.RunEvents(on_stored=stored),
        )
        ended_at = time.perf_counter()
    assert state.unfinished == state.errored == 0, state
    print(json.dumps([ended_at - first_at, time.perf_counter() - ended_at]))
    return 0


def _arrived(url: str) -> int:
    """The number of trials there."""
    import fsspec

    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    found = set()
    for name in files.ls(url, detail=False):
        for line in gzip.decompress(files.cat_file(name)).splitlines():
            one = json.loads(line)
            found.add((one["session"], one["job"], one["number"]))
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
