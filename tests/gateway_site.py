"""A gateway on a port of this machine, in a thread, with a session of the no-op library: its remote
workers are written by hand, or run in this process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import redis
import sqlalchemy as sa
from jobs_builder import accepted, make_jobs, states
from queries import execute, read_column
from settings_changes import change_setting
from web_service import served

from tuna import api
from tuna.artifacts.store import Artifacts
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.publisher import Backends
from tuna.db import joined_workers, sessions
from tuna.db.engine import reading
from tuna.db.models import Job, StepResultRow
from tuna.jobs.serving import SessionWork
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import Trial
from tuna.libraries.registry import get_library
from tuna.queue.connection import make_celery
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.queue.leases import Leases, new_id
from tuna.queue.messages import Chunk, Report, ReportKind
from tuna.settings import Settings, get_settings
from tuna.workers.runner import Runner
from tuna_remote import joining
from tuna_remote.gateway import https_client, joined, remote_link
from tuna_remote.gateway.protocol import Facts
from tuna_remote.gateway.server import GatewayApp
from tuna_remote.gateway.tokens import (
    Credentials,
    JoinToken,
    pin_of_secret,
    pinned_context,
    server_context,
)

LIBRARY = get_library("noop")
HOME = LIBRARY.environment()
COMPILES = Facts(host="some host", toolchains=(HOME.toolchain,), processes=1)
MEASURES = Facts(host="card1", device="card", environments=(HOME.machine_key,))


class GatewaySite:
    """A session with a coordinator that goes step by step, and a gateway."""

    def __init__(self, engine: sa.Engine, client: redis.Redis, layers: int = 1) -> None:
        """`client`: of the Redis that the settings name."""
        self.engine, self.client, self.jobs = engine, client, 10 * layers
        session_id = make_jobs(engine, layers)
        with reading(engine) as connection:
            environment = sessions.get(connection, session_id).environment
            self.namespace = sessions.namespace(connection)
            self.tls_secret = joined.tls_secret(connection)
        work = SessionWork(session_id, environment, LIBRARY)
        self.settings = get_settings()
        self.leases = Leases(client, self.namespace, self.settings.lease_s)
        self.board = HeartbeatBoard(client, self.namespace, self.settings.lease_s)
        celery = make_celery(self.settings)
        self.coordinator = Coordinator(Backends(engine, client, celery, self.settings), [work])
        self.artifacts = Artifacts.from_settings(
            self.settings, self.namespace, self.coordinator._read_keys()
        )
        self.url = ""

    @contextlib.contextmanager
    def serving(self, port: int = 0) -> Iterator[GatewayApp]:
        """A gateway in a thread; `url` is its address."""
        app = GatewayApp(self.engine, self.client, make_celery(self.settings), self.settings)
        try:
            with served(app.asgi(), server_context(self.tls_secret), port) as taken:
                self.url = f"https://127.0.0.1:{taken}"
                yield app
        finally:
            app.close()

    def token(self, role: str = "compile", ttl_s: float = 60.0) -> JoinToken:
        return JoinToken.parse(joining.create_token(role, ttl_s, self.url))  # type: ignore[arg-type]

    def join(self, role: str = "compile", processes: int = 1) -> RemoteDouble:
        """A worker that joined."""
        facts = COMPILES if role == "compile" else MEASURES
        facts = facts.model_copy(update={"processes": processes})
        credentials = https_client.join(self.token(role), role, facts)  # type: ignore[arg-type]
        return RemoteDouble(self, credentials)

    def publish(self) -> int:
        """Fill the queues."""
        self.coordinator.publisher._no_work.clear()
        return self.coordinator.publish()

    def turn(self) -> None:
        """A round of the coordinator, with all that is due in a second."""
        execute(self.engine, sa.update(Job).values(ready_at=None))  # a retry need not wait
        self.publish()
        self.coordinator.drain.once()
        self.coordinator._publish_bootstrap()
        self.coordinator.reaper.reclaim(self.coordinator._works)

    def is_done(self) -> bool:
        return states(self.engine) == {"evaluated": self.jobs}

    def each_once(self) -> bool:
        """Whether each step of each job has one good result."""
        found = accepted(self.engine)
        return len(found) == 2 * self.jobs and {count for *_, count in found} == {1}

    def worker(self, name: str) -> joined_workers.RemoteWorker:
        with reading(self.engine) as connection:
            found = joined_workers.find(connection, name)
        assert found is not None
        return found

    def results(self) -> list[Report]:
        """What stands in the stream."""
        entries: Any = self.client.xrange(self.leases.results_key)
        return [Report.model_validate_json(fields[b"r"]) for _, fields in entries]

    def failures(self) -> list[str | None]:
        """The cause of each failure."""
        query = sa.select(StepResultRow.cause).where(StepResultRow.ok.is_(False))
        return read_column(self.engine, query)


class Held:
    """A chunk that a double holds."""

    def __init__(self, lease: str, handed: dict[str, Any]) -> None:
        self.lease = lease
        self.begun: bool = handed["begun"]
        self.chunk = Chunk.model_validate_json(handed["chunk"])

    def results(self, **facts: Any) -> list[Result]:
        """Good results of all its items."""
        trial = {"index": 0, "params": "{}", **facts}
        return [
            Result(
                job_id=item.job_id,
                attempt=item.attempt,
                step=item.step,
                ok=True,
                trials=(Trial(**trial),) if facts else (),
                simulated=True,
            )
            for item in self.chunk.items
        ]

    def report(self, kind: str = "finished", results: Any = None, **facts: Any) -> Report:
        """A report about it."""
        found = self.results() if results is None and kind == "finished" else results or []
        given = {"worker": "somebody:1", "chunk": self.chunk.id, **facts}
        return Report(kind=ReportKind(kind), results=tuple(found), **given)


class RemoteDouble:
    """A remote worker by hand, with one process."""

    def __init__(self, site: GatewaySite, credentials: Credentials, process: int = 1) -> None:
        self.site = site
        self.name = credentials.name
        self.credentials = credentials
        self.process = process
        self.http = httpx.Client(
            base_url=f"{site.url}/v1",
            verify=pinned_context(credentials.gateway.pin),
            headers={"authorization": f"Bearer {credentials.name}.{credentials.secret}"},
            timeout=30,
        )

    def post(self, path: str, body: Any = None) -> httpx.Response:
        """Send a document, or bytes."""
        text = body if isinstance(body, bytes | str) else json.dumps(body)
        return self.http.post(path, content=text)

    def next(self, wait_s: float = 0.0, lease: str = "") -> Held | None:
        """The next chunk, if there is one."""
        lease = lease or new_id()
        answer = self.post("/next", {"id": lease, "process": self.process, "wait_s": wait_s})
        if answer.status_code in (204, 404):
            return None
        assert answer.status_code == 200, answer.text
        return Held(lease, answer.json())

    def held(self) -> Held:
        """The next chunk, once one more is published."""
        self.site.publish()
        found = self.next(wait_s=10.0)
        assert found is not None
        return found

    def path(self, held: Held, rest: str = "") -> str:
        return f"/leases/{self.process}/{held.lease}{rest}"

    def report(self, held: Held, report: Report | bytes | str) -> int:
        """Send a report; returns the status."""
        body = report.to_json() if isinstance(report, Report) else report
        return self.post(self.path(held, "/report"), body).status_code

    def renew(self, *held: Held, **heartbeat: Any) -> httpx.Response:
        said = {"started_at": 1.0, "toolchains": [HOME.toolchain], **heartbeat}
        leases = [one.lease for one in held]
        return self.post("/renew", {"process": self.process, "heartbeat": said, "leases": leases})

    def put(self, held: Held, data: bytes, digest: str = "") -> int:
        digest = digest or hashlib.sha256(data).hexdigest()
        answer = self.http.put(self.path(held, f"/artifacts/{digest}"), content=data)
        return answer.status_code

    def get(self, held: Held, digest: str) -> httpx.Response:
        return self.http.get(self.path(held, f"/artifacts/{digest}"))

    def work(self) -> int:
        """Do all that there is; returns the number of chunks."""
        done = 0
        while (held := self.next()) is not None:
            assert self.report(held, held.report()) == 204
            done += 1
        return done


def raw(site: GatewaySite) -> ssl.SSLSocket:
    """A connection to the gateway on which nothing is said yet."""
    plain = socket.create_connection(("127.0.0.1", int(site.url.rpartition(":")[2])), 60)
    return pinned_context(pin_of_secret(site.tls_secret)).wrap_socket(plain)


def link_of(credentials: Credentials, home: Path) -> remote_link.GatewayLink:
    """The connection of a process of a worker that joined, with a home of its own."""
    settings = Settings(home=home, gateway=credentials.text(), worker_name=credentials.name)
    return remote_link.GatewayLink(settings, 1)


def run_next(link: remote_link.GatewayLink, folder: Path, library: Any = LIBRARY) -> str:
    """Take the next chunk and run it with the runner of all workers; returns the outcome."""
    handed = link.next(new_id(), 0.0)
    if handed is None:
        return ""
    chunk = Chunk.model_validate_json(handed.chunk)
    store = link.store(chunk)
    runner = Runner(link, RunContext(store, folder, (0,)), "remote")
    return runner.run(chunk, library, artifacts=store).value


@contextlib.contextmanager
def open_site(
    home: Path, client: redis.Redis, urls: dict[str, str], monkeypatch: Any, layers: int = 1
) -> Iterator[GatewaySite]:
    """A site on the embedded database of `home`, whose gateway runs."""
    for name, value in urls.items():
        monkeypatch.setenv(name, value)
    change_setting(monkeypatch, "TUNA_ARTIFACTS_URL", (home / "artifacts").as_uri())
    site = GatewaySite(api.open_database(), client, layers)
    with site.serving():
        yield site
