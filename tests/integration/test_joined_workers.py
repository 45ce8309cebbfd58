"""Celery workers that joined by token: they can do all they need with their own Redis user, and
nothing once revoked."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis
import sqlalchemy as sa
from command_lines import Ended
from guarded_redis import ADMIN, guarded_redis
from jobs_builder import accepted, make_jobs, states
from processes import Processes

from tuna.db.engine import reading
from tuna.db.models import StepResult
from tuna.membership import members
from tuna.settings import get_settings
from tuna.testing.servers import with_password

Eventually = Callable[[Callable[[], object], float], None]


@pytest.fixture()
def url(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Redis that the settings name with the admin's password; its URL without one."""
    with guarded_redis() as found:
        monkeypatch.setenv("TUNA_BROKER_URL", with_password(found, ADMIN))
        get_settings.cache_clear()
        yield found


def test_a_worker_joins_works_and_is_revoked_and_another_does_its_work_again(
    url: str,
    engine: sa.Engine,
    processes: Processes,
    eventually: Eventually,
    type_in: Callable[..., Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    knows_machine: Callable[[Path], None],
) -> None:
    # on a busy machine a revocation takes its time too
    make_jobs(engine, 2, options={"sleep_s": 0.4})
    processes.coordinator()
    admin: redis.Redis = redis.Redis.from_url(os.environ["TUNA_BROKER_URL"])

    def joined(role: str) -> psutil.Popen:
        """A worker that knows its token's line and nothing else of this installation."""
        line = type_in("tuna", "token", "create", "--role", role, "--url", url).out.strip()
        home = tmp_path / f"home-{role}-{os.urandom(4).hex()}"
        knows_machine(home)
        with monkeypatch.context() as its:
            for name in [name for name in os.environ if name.startswith("TUNA_")]:
                its.delenv(name)
            its.setenv("TUNA_SIMULATED", "1")  # the library noop
            its.setenv("TUNA_HOME", str(home))
            its.setenv("TUNA_JOIN", line)
            return processes.start("tuna", "worker", role)

    compiler = joined("compile")
    victim = joined("eval")
    eventually(lambda: states(engine).get("evaluated", 0) > 0, 60)
    with reading(engine) as connection:
        member = next(
            worker.name for worker in members.members(connection) if worker.role == "eval"
        )
    assert any(member in user for user in admin.acl_users())
    assert type_in("tuna", "workers", "revoke", member).code == 0
    done = {job for job, step, _ in accepted(engine) if step == "measure"}
    assert not any(member in user for user in admin.acl_users())
    assert not [key for key in admin.scan_iter() if member.encode() in key]
    assert len(done) < 20, "it was put out too late to show anything"

    heir = joined("eval")
    eventually(lambda: states(engine) == {"evaluated": 20}, 60)
    assert {count for *_, count in accepted(engine)} == {1}
    with reading(engine) as connection:
        rows = connection.execute(
            sa.select(StepResult.job_id, StepResult.worker, StepResult.cause, StepResult.ok)
        ).all()
    # `infra`, uncharged: a message that the revoked worker had taken and not begun.
    assert {row.cause for row in rows if not row.ok} <= {"worker_lost", "infra"}
    assert len({row.worker.partition(":")[0] for row in rows if row.ok}) == 3
    late = {row.job_id for row in rows if row.worker.startswith(member) and row.ok} - done
    assert len(late) < 10, "no more than what was in the stream when it was put out"
    assert victim.wait(30) is not None, "a worker that was put out ends by itself"
    for worker in (compiler, heir):
        worker.send_signal(signal.SIGTERM)
    assert [worker.wait(30) for worker in (compiler, heir)] == [0, 0]
    assert not any(member in user for user in admin.acl_users())
    assert not [key for key in admin.scan_iter() if member.encode() in key], (
        "nor has a coordinator written any again"
    )
    log = (tmp_path / "home" / "log").read_text()
    assert "worker revoked" in log
    assert "Exception in thread" not in log
    records = re.split(r"^(?=\d{4}-\d\d-\d\dT)", log, flags=re.MULTILINE)
    assert all("Couldn't ack" in record for record in records if "Traceback" in record), (
        "Celery's own, and no other"
    )
    assert ADMIN not in log
