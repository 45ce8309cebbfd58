"""Sessions that are deleted in the middle of their run, or by a command that is killed, leave
nothing in the artifact store."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs
from processes import Processes
from queries import read_value
from shared_data import DRILLS

from tuna.api.services import artifact_store
from tuna.db.engine import writing
from tuna.db.models import Job, JobArtifact, Session

Eventually = Callable[[Callable[[], object], float], None]

_KILLS, _LAYERS = (2, 20) if DRILLS == 1 else (20, 60)


def artifacts(home: Path) -> list[str]:
    """Names of the files of artifacts in the store of a home, which may be half written."""
    return sorted(path.name for path in (home / "artifacts").glob("??/*"))


def count(engine: sa.Engine, of: type[Session] | type[Job]) -> int:
    return read_value(engine, sa.select(sa.func.count()).select_from(of))


def delete(processes: Processes, session_id: int, *words: str) -> subprocess.Popen[bytes]:
    """Start the command that deletes a session."""
    return processes.start("tuna", "session", "delete", str(session_id), "--yes", *words)


def test_a_session_that_is_canceled_and_deleted_in_mid_run_leaves_no_artifact(
    engine: sa.Engine, processes: Processes, tuna_home: Path, eventually: Eventually
) -> None:
    """Neither of results that come late nor of items that had no result yet."""
    options = {"trials": 1, "stores": 1, "sleep_s": 0.02}
    session_id = make_jobs(engine, 60, options=options)
    run = processes.start("tuna", "run", "--session-id", str(session_id))
    eventually(lambda: len(artifacts(tuna_home)) > 40, 60)
    assert delete(processes, session_id, "--cancel").wait(60) == 0
    assert run.wait(60) == 3
    assert f"Session {session_id} was deleted while it ran." in (tuna_home / "log").read_text()
    assert (artifacts(tuna_home), count(engine, Session), count(engine, Job)) == ([], 0, 0)


@pytest.mark.timeout(600)
def test_the_same_command_ends_a_deletion_that_was_killed(
    engine: sa.Engine, processes: Processes, tuna_home: Path
) -> None:
    took_s = 0.0
    for moment in range(_KILLS + 1):
        session_id, store = make_jobs(engine, _LAYERS), artifact_store(engine)
        with writing(engine) as connection:
            ids = connection.execute(sa.select(Job.id)).scalars().all()
            rows = [{"job_id": job, "digest": store.put(f"{job}".encode())} for job in ids]
            connection.execute(sa.insert(JobArtifact), rows)
            connection.execute(sa.update(Job).values(state="evaluated"))
        began_at, deletion = time.monotonic(), delete(processes, session_id)
        with suppress(psutil.TimeoutExpired):
            deletion.wait(took_s * moment / (_KILLS + 1) if moment else 60)
        took_s = took_s or time.monotonic() - began_at
        with suppress(psutil.NoSuchProcess):  # it was faster
            processes.kill(deletion)
        if count(engine, Session):
            assert delete(processes, session_id).wait(60) == 0
        assert (artifacts(tuna_home), count(engine, Session), count(engine, Job)) == ([], 0, 0)
