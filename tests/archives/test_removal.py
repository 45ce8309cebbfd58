"""Deleting a session frees what nothing else needs, and golden versions keep what they need; sizes
of sessions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from baseline_database import SESSIONS
from jobs_builder import make_jobs
from queries import execute, read_value

from tuna.archives import removal, sizes
from tuna.archives.archive import archive
from tuna.archives.restore import restore
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.db.engine import reading, transaction, writing
from tuna.db.models import (
    Base,
    ConfigRow,
    FindDb,
    FindDbKernel,
    Golden,
    GoldenEntry,
    GoldenKernel,
    Job,
    JobArtifact,
    KernelRow,
    Session,
    TrialRow,
)
from tuna.errors import BadInput, NotFound
from tuna.golden import explain

#: Of the first release: sessions with results in golden versions, and those without.
OWN = ("job", "trial", "step_result", "find_db", "find_db_kernel", "solver_applicability")


def count(engine: sa.Engine, of: type[Base]) -> int:
    return read_value(engine, sa.select(sa.func.count()).select_from(of))


def kept(connection: sa.Connection) -> list[dict[str, Any]]:
    """What a golden version itself knows of its first entry: not repeats and failures, which go
    with the session."""
    (found,) = explain(connection, 1, "1", library="miopen")
    document = found.as_json()
    names = ("entry", "base", "base_version", "changes", "verdict", "history")
    return [{name: document[name] for name in names}]


def delete(engine: sa.Engine, session_id: int, removed: set[str] | None = None) -> removal.Deleted:
    with reading(engine) as connection:
        removal.check(connection, session_id)
    return removal.delete(engine, session_id, (removed if removed is not None else set()).update)


def settled(engine: sa.Engine) -> None:
    """No jobs in flight and no drafts."""
    with writing(engine) as connection:
        connection.execute(
            sa.update(Job)
            .where(Job.state.not_in(["evaluated", "errored"]))
            .values(state="canceled")
        )
        connection.execute(
            sa.update(Golden).where(Golden.state == "draft").values(state="promoted")
        )


def test_all_sessions_deleted_leave_what_is_shared_and_what_is_golden(source: sa.Engine) -> None:
    settled(source)
    before = {
        model: count(source, model) for model in (ConfigRow, GoldenEntry, GoldenKernel, Golden)
    }
    with reading(source) as connection:
        golden = set(connection.execute(sa.select(GoldenEntry.session_id).distinct()).scalars())
        explained = kept(connection)
        sessions = connection.execute(sa.select(Session.id)).scalars().all()
    assert golden
    assert golden < set(sessions)
    for session_id in sessions:
        deleted = delete(source, session_id)
        assert bool(deleted.golden) is (session_id in golden)
    with reading(source) as connection:
        for name in OWN:
            table = Base.metadata.tables[name]
            assert (
                connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() == 0
            ), name
        assert set(connection.execute(sa.select(Session.id)).scalars()) == golden
        needed = set(connection.execute(sa.select(GoldenKernel.kernel)).scalars())
        needed |= set(
            connection.execute(
                sa.select(GoldenEntry.workload).where(GoldenEntry.workload.is_not(None))
            ).scalars()
        )
        needed |= set(
            connection.execute(
                sa.select(ConfigRow.body).where(ConfigRow.body.is_not(None))
            ).scalars()
        )
        assert set(connection.execute(sa.select(KernelRow.digest)).scalars()) == needed
        again = kept(connection)
    assert again == explained
    assert explained[0]["entry"]["reason"] == "first release"
    assert {model: count(source, model) for model in before} == before


def test_what_was_archived_deleted_and_restored_is_what_it_was(
    source: sa.Engine, tmp_path: Path
) -> None:
    """Also a session whose row golden versions kept."""
    settled(source)
    for session_id in range(1, 6):
        first, again = tmp_path / f"{session_id}", tmp_path / f"{session_id}-again"
        archive(source, session_id, first)
        delete(source, session_id)
        assert restore(source, first).session_id == session_id
        archive(source, session_id, again)
        assert again.read_bytes() == first.read_bytes()


def test_jobs_with_workers_and_drafts_are_in_the_way(source: sa.Engine, engine: sa.Engine) -> None:
    session_id = make_jobs(engine, 1)
    execute(engine, sa.update(Job).where(Job.id < 3).values(state="compiling", chunk="c"))
    with pytest.raises(BadInput, match="has 2 jobs with workers"):
        delete(engine, session_id)
    with pytest.raises(NotFound):
        delete(engine, 99)
    execute(engine, sa.update(Job).where(Job.id < 3).values(state="new"))
    assert delete(engine, session_id).jobs == 10
    settled(source)
    with writing(source) as connection:
        session_id = connection.execute(sa.select(GoldenEntry.session_id).limit(1)).scalar_one()
        connection.execute(sa.update(Golden).values(state="draft"))
    with pytest.raises(BadInput, match="draft of golden version"):
        delete(source, session_id)


def test_only_artifacts_that_no_other_job_needs_are_removed(
    engine: sa.Engine, tmp_path: Path
) -> None:
    """Neither from SQL nor from the store."""
    session_id = make_jobs(engine, 1, solvers=["Noop0", "Noop1"])
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c", Keys.of_secret("6b" * 32))
    mine, shared, winner, shared_winner = (
        store.put(text) for text in (b"mine", b"shared", b"winner", b"winner too")
    )
    with writing(engine) as connection:
        other = connection.execute(sa.select(Session.environment_id)).scalar_one()
        other = connection.execute(
            sa.insert(Session).values(environment_id=other, reason="other")
        ).inserted_primary_key[0]
        first, second = connection.execute(sa.select(Job.id).order_by(Job.id)).scalars().all()
        config_id, solver_id = connection.execute(
            sa.select(Job.config_id, Job.solver_id).where(Job.id == second)
        ).one()
        connection.execute(
            sa.update(Job)
            .where(Job.id == second)
            .values(session_id=other, state="compiled", step="measure")
        )
        trial = {"output_tail": "", "times_ms": "[]"}
        for number, (job_id, digest) in enumerate(
            ((first, mine), (first, shared), (second, shared))
        ):
            connection.execute(
                sa.insert(TrialRow).values(job_id=job_id, number=number, artifact=digest, **trial)
            )
        connection.execute(sa.insert(JobArtifact).values(job_id=second, digest=shared))
        for digest, blob in ((winner, b"winner"), (shared_winner, b"winner too")):
            connection.execute(
                sa.insert(KernelRow).values(digest=digest, blob=blob, size_bytes=len(blob))
            )
        for owner, digests in ((session_id, (winner, shared_winner)), (other, (shared_winner,))):
            facts = {
                "session_id": owner,
                "config_id": config_id,
                "solver_id": solver_id,
                "workspace_bytes": 0,
            }
            key = connection.execute(
                sa.insert(FindDb).values(**facts, params="", time_ms=1.0)
            ).inserted_primary_key[0]
            for number, digest in enumerate(digests):
                code = {
                    "find_db_id": key,
                    "number": number,
                    "kernel": digest,
                    "name": "",
                    "args": "",
                }
                connection.execute(sa.insert(FindDbKernel).values(**code))
    removed: set[str] = set()
    deleted = delete(engine, session_id, removed)
    assert (deleted.jobs, deleted.results, deleted.kernels, removed) == (1, 1, 1, {mine})
    outside = tmp_path / "outside"
    outside.write_bytes(b"of somebody")
    store.remove([*removed, "0" * 64, f"../../{outside.name}"])
    assert outside.exists(), "a worker may name a path"
    assert store.get(shared) == b"shared"
    with pytest.raises(KeyError):
        store.get(mine)
    assert not [path for path in (tmp_path / "a").rglob("*") if path.name.startswith(mine)]
    with reading(engine) as connection:
        assert connection.execute(sa.select(KernelRow.digest)).scalars().all() == [shared_winner]
        assert connection.execute(sa.select(Session.id)).scalars().all() == [other]


def test_a_deletion_that_was_interrupted_goes_on(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = make_jobs(engine, 3)
    monkeypatch.setattr(removal, "_JOBS", 7)
    seen: list[int] = []

    def interrupt(done: int, _: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        removal.delete(engine, session_id, set().update, interrupt)
    assert count(engine, Job) == 16
    assert removal.delete(engine, session_id, set().update).jobs == 16
    assert count(engine, Session) == 0


def test_what_sessions_have_and_take(source: sa.Engine) -> None:
    found = sizes.read(source)
    assert [one.id for one in found] == [*SESSIONS]
    with reading(source) as connection:
        for one in found:
            jobs = sa.select(sa.func.count()).where(
                Job.session_id == one.id, Job.search_id.is_(None)
            )
            assert sum(one.jobs.values()) == connection.execute(jobs).scalar_one()
            trials = (
                sa.select(sa.func.count())
                .select_from(TrialRow)
                .join(Job)
                .where(Job.session_id == one.id)
            )
            assert one.trials == connection.execute(trials).scalar_one()
            results = sa.select(sa.func.count()).where(FindDb.session_id == one.id)
            assert one.results == connection.execute(results).scalar_one()
            assert (one.trial_bytes > 0) is (one.trials > 0)
            assert (one.artifact_bytes > 0) is (one.artifacts > 0)
            assert one.state in ("running", "waiting", "ended", "empty")
    assert len({one.uuid for one in found}) == len(SESSIONS)
    assert any(one.golden for one in found)
    assert sizes.read(source, 3) == [found[2]]
    with pytest.raises(NotFound):
        sizes.read(source, 99)


class Killed(BaseException):
    """The end of a process in mid-work."""


@pytest.mark.both_databases_in_drills
@pytest.mark.parametrize("moment", range(20))
def test_a_removal_that_was_killed_is_ended_by_the_next_one(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """At twenty moments, before and after writes of SQL and of the store in turn: no artifact is
    left."""
    monkeypatch.setattr(removal, "_JOBS", 3)
    session_id = make_jobs(engine, 10, solvers=["Noop0"])
    store = Artifacts((tmp_path / "store").as_uri(), tmp_path / "c", Keys.of_secret("6b" * 32))
    with writing(engine) as connection:
        jobs = connection.execute(sa.select(Job.id)).scalars().all()
        digests = [store.put(f"code {job}".encode()) for job in jobs]
        rows = [{"job_id": job, "digest": one} for job, one in zip(jobs, digests, strict=True)]
        connection.execute(sa.insert(JobArtifact), rows)
        connection.execute(sa.update(Job).values(state="evaluated"))
    left = moment

    def passes() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    def in_steps(engine: sa.Engine, work: Any, *args: Any) -> Any:
        passes()
        found = transaction(engine, work, *args)
        passes()
        return found

    def remove(digests: set[str]) -> None:
        for one in sorted(digests):
            passes()
            store.remove([one])

    with monkeypatch.context() as patch:
        patch.setattr(removal, "transaction", in_steps)
        with pytest.raises(Killed):
            removal.delete(engine, session_id, remove)
    with reading(engine) as connection:
        removal.check(connection, session_id)
    removal.delete(engine, session_id, store.remove)
    files = [path for path in (tmp_path / "store").glob("??/*") if path.is_file()]
    assert (files, count(engine, Session), count(engine, Job)) == ([], 0, 0)


def test_what_killed_writers_left_in_a_store_is_swept(tmp_path: Path) -> None:
    store = Artifacts((tmp_path / "store").as_uri(), tmp_path / "c", Keys.of_secret("6b" * 32))
    kept = store.put(b"code")
    (folder,) = {path.parent for path in (tmp_path / "store").glob(f"??/{kept}")}
    old, new = (folder / f"{kept}.{word}.tmp" for word in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.sweep()
    assert (old.exists(), new.exists(), store.get(kept)) == (False, True, b"code")
