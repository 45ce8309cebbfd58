"""The trace of a session: what is appended, what a killed process leaves, and the session that is
restored from it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from baseline_database import SESSIONS, facts
from databases import SqliteTemplate
from jobs_builder import make_jobs
from little_memory import little_memory

from tuna.db.engine import reading, writing
from tuna.db.models import Job, KernelRow, Session, SolverRow, TrialRow
from tuna.errors import BadInput
from tuna.vocabulary import END_STATES, State
from tuna_remote.master import MasterPlan, _default_trace
from tuna_remote.trace import Trace, packed
from tuna_remote.trace_restore import restore, session_of


def traced(engine: sa.Engine, path: Path, session_id: int) -> Trace:
    """The trace of a session, with all of its jobs."""
    trace = Trace(path)
    trace.begin(engine, session_id)
    trace.record(engine, session_id)
    return trace


def test_the_same_command_goes_on_with_its_newest_trace(
    sqlite_engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session_id = make_jobs(sqlite_engine, 1)
    plan = MasterPlan("none", (), "test", {}, library="noop")

    def default(plan: MasterPlan) -> str:
        return str(_default_trace(sqlite_engine, plan, {}))

    for name in ("1", "2"):
        traced(sqlite_engine, Path(f"lorien-tune-{name}.trace"), session_id).close()
    elsewhere = Path("lorien-tune-2.trace").read_text().replace('"session":"', '"session":"0', 1)
    Path("lorien-tune-3.trace").write_text(elsewhere)
    Path("lorien-tune-4.trace").write_text("no trace")
    assert default(plan) == "lorien-tune-2.trace"
    with contextlib.closing(Trace(Path("lorien-tune-2.trace"))):
        assert default(plan) == "lorien-tune-1.trace", "another master appends to the other"
    assert not Path(default(replace(plan, table="another"))).exists()


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def copy_solvers(source: sa.Engine, engine: sa.Engine) -> None:
    """The solvers, as `update_solvers` would store them."""
    with reading(source) as connection:
        rows = [dict(row) for row in connection.execute(sa.select(SolverRow.__table__)).mappings()]
    with writing(engine) as connection:
        connection.execute(sa.insert(SolverRow), rows)


# which was imported: it has no jobs
@pytest.mark.parametrize("session_id", sorted({*SESSIONS} - {3}))
def test_a_session_is_restored_from_its_trace(
    source: sa.Engine, sqlite_engine: sa.Engine, tmp_path: Path, session_id: int
) -> None:
    with writing(source) as connection:  # a job that had not ended would be new again
        ended = {"state": State.ERRORED.value, "cause": "infra", "chunk": None, "leased_at": None}
        connection.execute(sa.update(Job).where(Job.state.not_in(END_STATES)).values(**ended))
    copy_solvers(source, sqlite_engine)
    trace = traced(source, tmp_path / "trace", session_id)
    kept: list[bytes] = []
    found = restore(sqlite_engine, trace, kept.append)
    assert facts(sqlite_engine, found) == facts(source, session_id)
    with reading(sqlite_engine) as connection:
        assert session_of(connection, trace.header) == found
        assert sorted(connection.execute(sa.select(KernelRow.blob)).scalars()) == sorted(kept)
    assert trace.record(sqlite_engine, found) == [], "it is as the trace says"
    trace.close()
    again = traced(sqlite_engine, tmp_path / "again", found)
    again.close()
    assert without_artifacts(tmp_path / "again") == without_artifacts(tmp_path / "trace")


def test_rounds_and_parts_of_a_search_are_restored_each(
    sqlite_engine: sa.Engine, sqlite_template: SqliteTemplate, tmp_path: Path
) -> None:
    other_engine = sqlite_template.engine(tmp_path / "other.sqlite")
    session_id = make_jobs(sqlite_engine, 1)
    with writing(sqlite_engine) as connection:
        row = dict(
            connection.execute(sa.select(Job.__table__).order_by(Job.id)).mappings().first() or {}
        )
        connection.execute(sa.delete(Job))
        for round_, part in ((0, 0), (1, 0), (1, 1)):
            own = {
                "id": 10 + 2 * round_ + part,
                "round": round_,
                "part": part,
                "state": State.EVALUATED.value,
            }
            connection.execute(sa.insert(Job).values({**row, **own}))
            trial = {"job_id": own["id"], "number": 0, "params": f"round {round_} part {part}"}
            connection.execute(sa.insert(TrialRow).values(**trial, output_tail="", times_ms="[]"))
    copy_solvers(sqlite_engine, other_engine)
    trace = traced(sqlite_engine, tmp_path / "trace", session_id)
    assert len(documents(trace.path)) == 4
    restore(other_engine, trace, lambda blob: None)
    query = (
        sa.select(Job.round, Job.part, TrialRow.params)
        .join(TrialRow, TrialRow.job_id == Job.id)
        .order_by(Job.id)
    )
    with reading(other_engine) as connection:
        parts = connection.execute(query).all()
    assert parts == [(0, 0, "round 0 part 0"), (1, 0, "round 1 part 0"), (1, 1, "round 1 part 1")]
    trace.close()


def without_artifacts(path: Path) -> list[Any]:
    """The lines by job; artifacts are in the first that needs them."""
    lines = documents(path)
    for line in lines[1:]:
        (line["result"] or {}).pop("artifacts", None)
    return sorted(lines, key=str)


def test_what_a_killed_process_did_not_write_the_next_one_writes(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    session_id = make_jobs(sqlite_engine, 1)
    path = tmp_path / "trace"
    traced(sqlite_engine, path, session_id).close()
    whole = path.read_bytes()
    assert len(documents(path)) == 11
    assert {line["state"] for line in documents(path)[1:]} == {"new"}
    last = whole.splitlines(keepends=True)[-1]
    for torn in (whole[:-1], whole[: -len(last) + 7], whole + b'{"session":', whole + b"\0" * 40):
        path.write_bytes(torn)
        trace = Trace(path)
        trace.record(sqlite_engine, session_id)
        trace.close()
        assert path.read_bytes() == whole
    path.write_bytes(whole + last)
    trace = Trace(path)
    assert trace.record(sqlite_engine, session_id) == [], "a repeated line changes nothing"
    trace.close()


def test_a_torn_first_line_is_a_trace_that_has_not_begun(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    session_id = make_jobs(sqlite_engine, 1)
    path = tmp_path / "trace"
    path.write_text('{"format":"tuna-tr')
    trace = traced(sqlite_engine, path, session_id)
    assert trace.header is not None
    assert len(documents(path)) == 11


def test_jobs_that_had_not_ended_are_new_again(
    sqlite_engine: sa.Engine, mariadb_engine: sa.Engine, tmp_path: Path
) -> None:
    engine = mariadb_engine
    session_id = make_jobs(sqlite_engine, 2, options={"sleep_s": 2.0})
    with writing(sqlite_engine) as connection:
        connection.execute(
            sa.update(Job).where(Job.id <= 5).values(state="compiled", step="measure", attempt=1)
        )
        connection.execute(
            sa.update(Job).where(Job.id > 18).values(state="errored", attempt=3, cause="infra")
        )
        connection.execute(sa.update(Job).where(Job.id == 7).values(state="compiling", chunk="c"))
    trace = traced(sqlite_engine, tmp_path / "trace", session_id)
    with writing(sqlite_engine) as connection:  # in flight: written when its state is settled
        connection.execute(
            sa.update(Job).where(Job.id == 7).values(state="new", attempt=1, chunk=None)
        )
    trace.record(sqlite_engine, session_id, [7])
    make_jobs(engine, 1)
    with writing(engine) as connection:
        connection.execute(sa.update(Session).values(reason="another"))
    restored = restore(engine, trace)
    with reading(engine) as connection:
        rows = connection.execute(
            sa.select(Job.state, Job.step, Job.attempt, sa.func.count())
            .where(Job.session_id == restored)
            .group_by(Job.state)
        ).all()
        options = (
            connection.execute(sa.select(Job.options).where(Job.session_id == restored))
            .scalars()
            .all()
        )
    assert {tuple(row) for row in rows} == {("new", "build", 0, 18), ("errored", "build", 3, 2)}
    assert options == [{"sleep_s": 2.0}] * 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a note\n", "is not a trace file"),
        ('{"format":"tuna-results"}\n', "is not a trace file"),
        ('{"format":"tuna-trace","version":9,"tuna":"7"}\n', "of Tuna 7"),
        ('{"format":"tuna-trace","version":1}\n', ":1: this line"),
        ("HEAD\nnonsense\n{}\n", ":2: this line"),
        ('HEAD\n{"job":3}\n{}\n', ":2: this line"),
    ],
    ids=str,
)
def test_what_is_no_trace_is_refused_and_stays(
    sqlite_engine: sa.Engine, tmp_path: Path, text: str, said: str
) -> None:
    traced(sqlite_engine, tmp_path / "good", make_jobs(sqlite_engine, 1)).close()
    path = tmp_path / "trace"
    path.write_text(text.replace("HEAD", (tmp_path / "good").read_text().splitlines()[0]))
    before = path.read_bytes()
    with pytest.raises(BadInput, match=said):
        Trace(path)
    assert path.read_bytes() == before


def test_two_masters_do_not_share_a_trace(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace")
    with pytest.raises(BadInput, match="Another master"):
        Trace(tmp_path / "trace")
    trace.close()
    Trace(tmp_path / "trace").close()


def test_a_trace_that_cannot_be_restored_changes_nothing(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    session_id = make_jobs(sqlite_engine, 1)
    trace = traced(sqlite_engine, tmp_path / "trace", session_id)
    with pytest.raises(BadInput, match="is another"):
        restore(sqlite_engine, trace)
    with writing(sqlite_engine) as connection:
        connection.execute(sa.update(Session).values(reason="another", uuid="another"))
        connection.execute(
            sa.update(SolverRow).where(SolverRow.name == "Noop3").values(name="Gone")
        )
    with pytest.raises(BadInput, match="no solver Noop3"):
        restore(sqlite_engine, trace)
    with reading(sqlite_engine) as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(Session)).scalar() == 1


def _other_bytes(lines: list[Any]) -> None:
    found = next(line["result"]["artifacts"] for line in lines if line["result"]["artifacts"])
    found[min(found)] = packed(b"other code")


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (_other_bytes, "other bytes than its name says"),
        (lambda lines: lines[0]["job"].__setitem__("key", "0" * 64), "the key of .* is .*, not 00"),
        (lambda lines: lines[0]["job"]["config"].__setitem__("batchsize", 77), "the key of"),
        (lambda lines: lines[0]["job"]["config"].__setitem__("kind", "of nobody"), "unknown kind"),
    ],
    ids=range(4),
)
def test_contents_that_do_not_have_their_key_are_refused(
    source: sa.Engine, sqlite_engine: sa.Engine, tmp_path: Path, forge: Any, said: str
) -> None:
    copy_solvers(source, sqlite_engine)
    traced(source, tmp_path / "trace", 4).close()
    lines = documents(tmp_path / "trace")
    forge(lines[1:])
    (tmp_path / "trace").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(BadInput, match=said):
        restore(sqlite_engine, Trace(tmp_path / "trace"))
    with reading(sqlite_engine) as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(Session)).scalar() == 0


def test_a_trace_whose_session_is_a_path_is_refused(source: sa.Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    traced(source, path, 1).close()
    first, rest = path.read_text().split("\n", 1)
    forged = json.loads(first) | {"session": "../../outside"}
    path.write_text(f"{json.dumps(forged)}\n{rest}")
    with pytest.raises(BadInput, match="damaged"):
        Trace(path)


def test_a_trace_with_an_endless_line_is_refused_in_little_memory(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace"
    with open(path, "wb") as stream:
        stream.truncate(1 << 31)
        stream.write(b'{"format":"tuna-trace"')
    code = """
from tuna_remote.trace import Trace
try:
    Trace(Path(sys.argv[1]))
except BadInput as refused:
    print(refused)
"""
    assert "line 1 has more than 256 MiB" in little_memory(tmp_path)(code, path, megabytes=1200)
