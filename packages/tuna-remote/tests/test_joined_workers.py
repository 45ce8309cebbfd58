"""Workers that joined by token: they know a gateway and nothing else of an installation, do all
that own workers do, and have nothing once revoked."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from command_lines import Ended
from jobs_builder import accepted, make_jobs, states
from processes import Processes

from tuna.db import joined_workers
from tuna.db.engine import make_engine, reading
from tuna.db.models import StepResultRow
from tuna.services.ports import announced_urls
from tuna.settings import get_settings
from tuna_remote.gateway.ports import GATEWAY

Eventually = Callable[[Callable[[], object], float], None]


class Site:
    """An installation with a gateway, and the homes of workers that join it."""

    def __init__(
        self,
        processes: Processes,
        type_in: Callable[..., Ended],
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        knows_machine: Callable[[Path], None],
        eventually: Eventually,
    ) -> None:
        self.processes = processes
        self._type_in = type_in
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._knows_machine = knows_machine
        self._eventually = eventually
        self.port = 0

    def gateway(self) -> psutil.Popen:
        """Start the gateway, on the same port each time."""
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        process = self.processes.start("tuna", "gateway", "--port", str(self.port))
        self._eventually(lambda: announced_urls(get_settings().run_dir, GATEWAY), 60)
        return process

    def joined(self, role: str, *words: str) -> psutil.Popen:
        """A worker that knows its token's line and nothing else of this installation."""
        line = self._type_in("tuna", "token", "create", "--role", role).out.strip()
        home = self._folder / f"home-{role}-{os.urandom(4).hex()}"
        self._knows_machine(home)
        with self._monkeypatch.context() as its:
            for name in [name for name in os.environ if name.startswith("TUNA_")]:
                its.delenv(name)
            its.setenv("TUNA_SIMULATED", "1")  # the library noop
            its.setenv("TUNA_HOME", str(home))
            its.setenv("TUNA_JOIN", line)
            return self.processes.start("tuna", "worker", role, *words)


@pytest.fixture()
def engine(tuna_home: Path) -> sa.Engine:
    """The embedded database."""
    return make_engine(get_settings().sql_url)


@pytest.fixture()
def site(
    processes: Processes,
    type_in: Callable[..., Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    knows_machine: Callable[[Path], None],
    eventually: Eventually,
) -> Site:
    return Site(processes, type_in, tmp_path, monkeypatch, knows_machine, eventually)


def test_a_worker_joins_works_and_is_revoked_and_another_does_its_work_again(
    engine: sa.Engine,
    site: Site,
    eventually: Eventually,
    type_in: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    # on a busy machine a revocation takes its time too
    make_jobs(engine, 2, options={"sleep_s": 0.4})
    site.processes.coordinator()
    site.gateway()
    compiler = site.joined("compile")
    victim = site.joined("eval")
    eventually(lambda: states(engine).get("evaluated", 0) > 0, 60)
    with reading(engine) as connection:
        there = joined_workers.remote_workers(connection)
    name = next(worker.name for worker in there if worker.role == "eval")
    assert type_in("tuna", "workers", "revoke", name).code == 0
    done = {job for job, step, _ in accepted(engine) if step == "measure"}
    assert len(done) < 20, "it was revoked too late to show anything"
    assert victim.wait(60) == 0, "a worker that was revoked ends by itself"

    heir = site.joined("eval")
    eventually(lambda: states(engine) == {"evaluated": 20}, 60)
    assert {count for *_, count in accepted(engine)} == {1}
    with reading(engine) as connection:
        rows = connection.execute(
            sa.select(
                StepResultRow.job_id, StepResultRow.worker, StepResultRow.cause, StepResultRow.ok
            )
        ).all()
    assert {row.cause for row in rows if not row.ok} <= {"worker_lost"}
    assert len({row.worker.partition(":")[0] for row in rows if row.ok}) == 3
    late = {row.job_id for row in rows if row.worker.startswith(name) and row.ok} - done
    assert len(late) < 10, "no more than what was in the stream when it was revoked"
    name = next(worker.name for worker in there if worker.role == "compile")
    assert type_in("tuna", "workers", "drain", name).code == 0
    heir.send_signal(signal.SIGTERM)
    assert [worker.wait(60) for worker in (compiler, heir)] == [0, 0]
    log = (tmp_path / "home" / "log").read_text()
    assert "worker revoked" in log
    assert not re.search("Traceback|Exception in thread", log)


def test_a_killed_gateway_costs_a_retry(
    engine: sa.Engine, site: Site, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a busy machine the other one begins later than the 2 s of other tests
    monkeypatch.setenv("TUNA_LEASE_S", "20")
    get_settings.cache_clear()
    make_jobs(engine, 4, options={"sleep_s": 0.1})
    site.processes.coordinator()
    first = site.gateway()
    workers = [site.joined("compile"), site.joined("eval")]
    eventually(lambda: states(engine).get("evaluated", 0) > 0, 60)
    site.processes.kill(first)
    site.gateway()
    eventually(lambda: states(engine) == {"evaluated": 40}, 120)
    assert {count for *_, count in accepted(engine)} == {1}
    said = (StepResultRow.step, StepResultRow.cause, StepResultRow.output_tail)
    with reading(engine) as connection:
        failed = connection.execute(sa.select(*said).where(~StepResultRow.ok)).all()
    # one message at most is with a gateway, and no worker began it
    assert len(failed) <= 1, failed
    assert all(one.cause == "infra" and "left the queue" in one.output_tail for one in failed)
    assert all(worker.is_running() for worker in workers)
