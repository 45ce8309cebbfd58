"""The service over 1,000,000 jobs with 3,000,000 trials, asked over HTTP.

Two sessions have four tenths of the jobs each, eighteen the others; there are an import and three
golden versions. `--parts reads` asks for every page and table 200 times; `best` for one result on 8
connections at a time, and for 1,000; `events` opens 200 streams and changes jobs; `memory` reads
10,000 times; `pipeline` runs jobs with and without ten viewers in turn. Times are those of the
client, on the same cores; on a busy machine look at the CPU time of the service (`_cpu_ms`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks import pipeline
from benchmarks.harness import Outcome, command_line
from benchmarks.query import PER_LAYER, Filling, fill, release
from benchmarks.servers import home

if TYPE_CHECKING:
    import sqlalchemy as sa

_PARTS = ("reads", "best", "events", "memory", "pipeline")
_BIG = 0.8  #: of the layers: those of sessions 1 and 2, half of the solvers each
_SMALL = 17  #: sessions from 3 on
_REPORTED = 50  #: layers of session 20
_RELEASED = 50_000  #: entries of a golden version at most
_VERSIONS = 3
_CONNECTIONS, _STREAMS, _VIEWERS = 8, 200, 10
_STEPS = ["build", "measure"]
_REPORT = "golden_report"  #: compares 50,000 entries with 50,000
LIMITS = {
    "slowest_p99_ms": 300.0,
    f"{_REPORT}_p99_ms": 1500.0,
    "largest_kb": 500.0,
    "best_p99_ms": 25.0,
    "best_of_1000_keys_ms": 500.0,
    "streams_cpu_share": 0.05,
    "change_seen_s": 2.0,
    "resident_mib": 300.0,
    "resident_growth_mib": 20.0,
}
BUDGET = {"best_per_s": 400.0, "jobs_per_s_with_viewers": 0.95}


def main() -> int:
    """Command line; `--jobs`: jobs of the database, a third of its trials."""
    parser = command_line(__doc__, jobs=1_000_000, repeats=200, rounds=3)
    parser.add_argument("--db", choices=("sqlite", "mariadb"), default="sqlite")
    parser.add_argument("--parts", default=",".join(_PARTS), help="default: %(default)s")
    options = parser.parse_args()
    with home(options.db):
        return _measure(options.db, options)


def _measure(db: str, options: Any) -> int:
    from tuna.coordinator.coordinator import ALIVE
    from tuna.db.database import upgrade
    from tuna.db.engine import make_engine
    from tuna.queue.connection import ensure_services, release_services
    from tuna.settings import get_settings

    engine = make_engine(get_settings().sql_url)
    upgrade(engine)
    _say("filling the database")
    make(engine, options.jobs)
    ensure_services(get_settings())
    alive, tomorrow = get_settings().home / ALIVE, time.time() + 86_400
    alive.touch()
    os.utime(alive, (tomorrow, tomorrow))  # so that the service starts no coordinator
    scene, figures = Scene(engine, options.jobs), {"jobs": float(options.jobs)}
    parts = {
        "reads": lambda service: _reads(service, scene, options.repeats),
        "best": lambda service: _best(service, scene, options.repeats),
        "events": lambda service: _events(service, engine),
        "memory": lambda service: _memory(service, scene, 50 * options.repeats),
        "pipeline": lambda service: _pipeline(service, options.rounds),
    }
    try:
        for name in options.parts.split(","):
            _say(f"measuring {name}")
            with serving() as service:
                measured = parts[name](service)
            _say(json.dumps({key: round(value, 4) for key, value in measured.items()}))
            figures |= measured
    finally:
        release_services(get_settings())
    known = {name: limit for name, limit in LIMITS.items() if name in figures}
    budget = {name: least for name, least in BUDGET.items() if name in figures}
    return Outcome(f"serve {db}", figures, budget=budget, limits=known).print()


def make(engine: sa.Engine, jobs: int) -> None:
    """Store jobs with three trials each. Each fiftieth failed, and half of session 3 is still to be
    done; session 19 is imported."""
    import sqlalchemy as sa

    from tuna.db.engine import writing
    from tuna.db.models import ConfigTag, FindDb, Job, StepResultRow, TrialRow

    layers = jobs // PER_LAYER

    def session_of(layer: Any, solver: Any) -> Any:
        small = 3 + layer % _SMALL
        cases = (layer > layers - _REPORTED, 20), (layer > _BIG * layers, small)
        return sa.case(*cases, (solver <= PER_LAYER // 2, 1), else_=2)

    fill(engine, Filling(layers, trials=3, session_of=session_of, imported=19))
    spread = Job.config_id + Job.solver_id
    failed = sa.select(Job.id).where(spread % 50 == 0, Job.session_id != 19)
    waits = sa.select(Job.id).where(spread % 2 == 1, Job.session_id == 3)
    with writing(engine) as connection:
        for table in (FindDb, TrialRow, StepResultRow):
            connection.execute(sa.delete(table).where(table.job_id.in_(waits)))
        connection.execute(sa.delete(FindDb).where(FindDb.job_id.in_(failed)))
        says = {"ok": False, "cause": "run_error", "output_tail": "it failed\n" * 20}
        connection.execute(
            sa.update(StepResultRow).where(StepResultRow.job_id.in_(failed)).values(says)
        )
        error = {"state": "errored", "cause": "run_error", "failures": 1}
        connection.execute(sa.update(Job).where(Job.id.in_(failed)).values(error))
        new = {"state": "new", "attempt": 0, "cause": None, "failures": 0}
        connection.execute(sa.update(Job).where(Job.id.in_(waits)).values(new))
        tag = sa.select(ConfigTag.config_id, sa.literal("some"), ConfigTag.recurrent)
        some = tag.where(ConfigTag.tag == "bench", ConfigTag.config_id <= 1000)
        columns = ["config_id", "tag", "recurrent"]
        connection.execute(sa.insert(ConfigTag).from_select(columns, some))
    for version in range(1, _VERSIONS + 1):
        release(engine, version, session_id=2, most=_RELEASED)


class Scene:
    """Names in the database that questions are about, in any order."""

    def __init__(self, engine: sa.Engine, jobs: int) -> None:
        import sqlalchemy as sa

        from tuna.db.engine import reading
        from tuna.db.models import ConfigRow, GoldenEntry

        self.jobs, self.random = jobs, random.Random(7)  # noqa: S311  # the same in each run
        with reading(engine) as connection:
            self.keys = list(connection.execute(sa.select(ConfigRow.key)).scalars())
            query = sa.select(GoldenEntry.id).where(GoldenEntry.golden_id == 2)
            self.entries = list(connection.execute(query).scalars())

    def paths(self) -> dict[str, Callable[[], str]]:
        """Pages and tables by name."""
        some, any_of = self.random.randrange, self.random.choice
        both = "session_id=1&session_id=2&tag=some"

        def near_session() -> int:
            return some(3, 20)

        reads: dict[str, Callable[[], str]] = {
            "sessions": lambda: "sessions",
            "session": lambda: f"sessions/{any_of((1, 2, near_session()))}",
            "size": lambda: f"sessions/{near_session()}/size",
            "size_of_largest": lambda: "sessions/1/size",
            "jobs": lambda: f"sessions/1/jobs?cursor={some(self.jobs)}",
            "jobs_failed": lambda: "sessions/2/jobs?state=errored&cause=run_error",
            "jobs_by_solver": lambda: f"sessions/1/jobs?solver=Solver{some(5)}",
            "jobs_by_layer": lambda: f"sessions/1/jobs?layer=16x16x{some(10, 100)}1",
            "job": lambda: f"jobs/{some(1, self.jobs)}",
            "results": lambda: f"sessions/1/results?cursor={some(self.jobs // 20)}",
            "results_of_tag": lambda: "sessions/2/results?tag=some",
            "query": lambda: "query",
            "query_layer": lambda: f"query?layer={any_of(self.keys)}",
            "query_session": lambda: f"query?session_id={near_session()}",
            "query_solver": lambda: f"query?solver=Solver{some(10)}&arch=arch{some(4)}",
            "query_trials": lambda: "query?n_best=2&session_id=2",
            "coverage": lambda: "coverage/net?arch=arch1",
            "compare": lambda: f"compare?{both}",
            "golden": lambda: "golden",
            "golden_entries": lambda: f"golden/2/entries?cursor={any_of(self.entries)}",
            "golden_explain": lambda: f"golden/2/explain?key={any_of(self.entries)}",
            "models": lambda: "models",
            "workers": lambda: "workers",
            "actions": lambda: "actions",
        }
        pages = dict(reads) | {"coverage": lambda: "models?name=net&arch=arch1"}
        tables = dict(reads) | {
            "jobs_500": lambda: "sessions/1/jobs?limit=500",
            "query_500": lambda: "query?limit=500",
            "results_500": lambda: "sessions/1/results?limit=500",
            "entries_500": lambda: "golden/2/entries?limit=500",
            "devices": lambda: f"sessions/{any_of((1, near_session()))}/devices",
            "report": lambda: "sessions/20/report",
            "golden_report": lambda: "golden/3/report?against=2",
            "sizes": lambda: "sizes",
        }

        def below(place: str, path: Callable[[], str]) -> Callable[[], str]:
            return lambda: f"{place}/{path()}"

        askers = {f"page_{name}": below("", path) for name, path in pages.items()}
        return askers | {name: below("/v1", path) for name, path in tables.items()}


@dataclass
class Service:
    """A process of `tuna serve`."""

    host: str
    headers: dict[str, str]
    process: psutil.Process
    mine: threading.local = field(default_factory=threading.local)

    def get(self, path: str, body: str | None = None) -> tuple[float, bytes]:
        """Return the seconds that an answer took, and the answer; each thread has a connection."""
        if not hasattr(self.mine, "connection"):
            self.mine.connection = http.client.HTTPConnection(self.host, timeout=60)
        connection: http.client.HTTPConnection = self.mine.connection
        started = time.perf_counter()
        connection.request("GET" if body is None else "POST", path, body, self.headers)
        answer = connection.getresponse()
        content = answer.read()
        seconds = time.perf_counter() - started
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {content[:300]!r}")
        return seconds, content

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_mib(self) -> float:
        """Resident memory."""
        return float(self.process.memory_info().rss / (1 << 20))


@contextlib.contextmanager
def serving() -> Iterator[Service]:
    """The service on the database of the settings."""
    command = [sys.executable, "-m", "tuna", "serve", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        link = re.fullmatch(
            r"http://([0-9.:]+)/login\?token=(\S+)", process.stdout.readline().strip()
        )
        assert link is not None, "the service prints the owner's link"
        headers = {"Authorization": f"Bearer {link[2]}", "Content-Type": "application/json"}
        yield Service(link[1], headers, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()


def _reads(service: Service, scene: Scene, repeats: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    slowest, largest = 0.0, 0.0
    _wait_until_read(service)
    for name, path in scene.paths().items():
        for _ in range(3):
            service.get(path())  # what is imported or kept at the first question
        before = service.cpu_s()
        answers = [service.get(path()) for _ in range(repeats)]
        cpu_ms = (service.cpu_s() - before) / repeats * 1000
        p99_ms = 1000 * _percentile([seconds for seconds, _ in answers], 0.99)
        kb = max(len(content) for _, content in answers) / 1000
        _say(f"{name:24} p99 {p99_ms:8.1f} ms  CPU {cpu_ms:7.1f} ms  {kb:7.1f} kB")
        figures |= {f"{name}_p99_ms": p99_ms, f"{name}_cpu_ms": cpu_ms}
        slowest, largest = max(slowest, p99_ms if name != _REPORT else 0), max(largest, kb)
    return figures | {"slowest_p99_ms": slowest, "largest_kb": largest}


def _wait_until_read(service: Service) -> None:
    """Wait until the service has read the history, which devices are from."""
    while True:
        try:
            service.get("/v1/sessions/1/devices")
            return
        except SystemExit as error:
            if " 503 " not in str(error):
                raise
            time.sleep(0.2)


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def timed(
    name: str, service: Service, repeats: int, ask: Callable[[int], float]
) -> dict[str, float]:
    """Call `ask` on several connections at a time; it returns seconds."""
    timings: list[float] = []

    def worker(first: int) -> None:
        timings.extend([ask(number) for number in range(first, repeats, _CONNECTIONS)])

    ask(repeats)  # what is imported at the first question
    threads = [threading.Thread(target=worker, args=(first,)) for first in range(_CONNECTIONS)]
    before, started = service.cpu_s(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu_s = time.perf_counter() - started, service.cpu_s() - before
    return {
        f"{name}_per_s": len(timings) / seconds,
        f"{name}_p99_ms": 1000 * _percentile(timings, 0.99),
        f"{name}_cpu_ms": 1000 * cpu_s / len(timings),
    }


def _best(service: Service, scene: Scene, repeats: int) -> dict[str, float]:
    def ask(_: object = None) -> float:
        return service.get(f"/v1/best?layer={scene.random.choice(scene.keys)}&arch=arch1")[0]

    for _ in range(50):
        ask()
    figures = timed("best", service, 10 * repeats, ask)
    many = []
    for _ in range(10):
        asked = {"layers": scene.random.sample(scene.keys, min(1000, len(scene.keys)))}
        many.append(service.get("/v1/best", json.dumps(asked | {"arch": "arch1"}))[0])
    return figures | {"best_of_1000_keys_ms": 1000 * max(many)}


class Streams:
    """Open streams of a session's state, in a thread that notes when each said something."""

    def __init__(self, service: Service, session_id: int, number: int) -> None:
        self.said_at = [0.0] * number
        self._selector = selectors.DefaultSelector()
        self._ended = False
        host, _, port = service.host.partition(":")
        for place in range(number):
            stream = socket.create_connection((host, int(port)))
            lines = [f"GET /v1/sessions/{session_id}/events HTTP/1.1", f"Host: {service.host}"]
            lines += [f"{name}: {value}" for name, value in service.headers.items()]
            stream.sendall("\r\n".join([*lines, "", ""]).encode())
            self._selector.register(stream, selectors.EVENT_READ, place)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(0.1):
                if b"event: session" in key.fileobj.recv(1 << 20):  # type: ignore[union-attr]
                    self.said_at[key.data] = time.perf_counter()

    def wait(self, since: float) -> float:
        """Return the seconds from a moment until all have said something."""
        deadline = time.perf_counter() + 60
        while min(self.said_at) < since:
            if time.perf_counter() > deadline:
                raise SystemExit("Some streams say nothing.")
            time.sleep(0.01)
        return max(self.said_at) - since

    def close(self) -> None:
        """Hang up."""
        self._ended = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def _streaming(service: Service, session_id: int, number: int) -> Iterator[Streams]:
    streams = Streams(service, session_id, number)
    try:
        streams.wait(0.001)
        yield streams
    finally:
        streams.close()


def _events(service: Service, engine: sa.Engine) -> dict[str, float]:
    """Session 1 is watched, the largest."""
    import sqlalchemy as sa

    from tuna.db.engine import reading, writing
    from tuna.db.models import Job

    with reading(engine) as connection:
        mine = sa.select(Job.id).where(Job.session_id == 1, Job.state == "evaluated").limit(20)
        jobs = iter(connection.execute(mine).scalars().all())

    def change() -> None:
        with writing(engine) as connection:
            update = sa.update(Job).where(Job.id == next(jobs))
            connection.execute(update.values(state="canceled"))

    _wait_until_read(service)
    figures: dict[str, float] = {}
    for number in (1, _STREAMS):
        with _streaming(service, 1, number) as streams:
            seen, before, started = [], service.cpu_s(), time.perf_counter()
            for _ in range(10):
                changed_at = time.perf_counter()
                change()
                seen.append(streams.wait(changed_at))
                time.sleep(1)
            share = (service.cpu_s() - before) / (time.perf_counter() - started)
        figures |= {f"cpu_share_of_{number}": share, f"change_seen_by_{number}_s": max(seen)}
    figures["streams_cpu_share"] = figures[f"cpu_share_of_{_STREAMS}"]
    return figures | {"change_seen_s": figures[f"change_seen_by_{_STREAMS}_s"]}


def _memory(service: Service, scene: Scene, reads: int) -> dict[str, float]:
    """Read all but what takes long."""
    paths = [
        path for name, path in scene.paths().items() if not name.endswith(("compare", "sizes"))
    ]
    figures = {"resident_at_start_mib": service.resident_mib()}
    service.get("/v1/best", json.dumps({"layers": ['{"kind":"gemm","m":16,"n":16,"k":5}']}))
    _wait_until_read(service)
    found = []
    for number in range(reads):
        service.get(paths[number % len(paths)]())
        if number % 100 == 99:
            found.append(service.resident_mib())
    tenth = max(1, len(found) // 10)
    figures["resident_mib"] = max(found)
    before, after = statistics.median(found[tenth : 2 * tenth]), statistics.median(found[-tenth:])
    return figures | {"resident_growth_mib": after - before}


def _pipeline(service: Service, rounds: int) -> dict[str, float]:
    """Jobs per second of the pipeline, with and without ten who watch the session and go through
    its jobs."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        watched = number % 2 == 1
        session_id, loaded, _ = pipeline._load("noop", 20_000, _STEPS, f"round {number}")
        with contextlib.ExitStack() as stack:
            if watched:
                stack.enter_context(_watching(service, session_id))
            run = pipeline._run(session_id, _STEPS)
        rates[watched].append(loaded / (run.run_s - run.start_s))
        _say(f"{'with' if watched else 'without'} viewers {rates[watched][-1]:.0f} jobs/s")
    alone, seen = (statistics.median(rates[watched]) for watched in (False, True))
    return {"jobs_per_s_alone": alone, "jobs_per_s_with_viewers": seen / alone}


@contextlib.contextmanager
def _watching(service: Service, session_id: int) -> Iterator[None]:
    ended = threading.Event()

    def browse() -> None:
        while not ended.wait(5.0):
            service.get(f"/sessions/{session_id}")
            service.get(f"/sessions/{session_id}/jobs?state=evaluated")

    viewers = [threading.Thread(target=browse) for _ in range(_VIEWERS)]
    with _streaming(service, session_id, _VIEWERS):
        for viewer in viewers:
            viewer.start()
        try:
            yield
        finally:
            ended.set()
            for viewer in viewers:
                viewer.join()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
