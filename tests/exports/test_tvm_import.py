"""TVM's databases come in with the records of one target, of the layers that are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder, workload

from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.errors import BadInput
from tuna.exports import export
from tuna.exports.importer import import_db
from tuna.libraries.tvm.tvm_db import LAYERS, RECORDS, WORKLOADS

OWN = {"kind": "llvm", "mcpu": "znver5", "num-cores": 2}
OTHER = "llvm -mcpu=znver4 -mtriple=x86_64 -num-cores=2"
#: As TVM completes a target.
COMPLETED = {"tag": "", "keys": ["cpu"], "mtriple": "x86_64-unknown-linux-gnu"}


def params(number: int) -> str:
    """A record of the session's target."""
    trace = [[["EnterPostproc", []]], [[0, [1, 2, number]]]]
    return json.dumps([trace, None, OWN, [["TENSOR", "float32", [1, 64]]]])


@pytest.fixture(autouse=True)
def _x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.fixture
def folder(sqlite_engine: sa.Engine, tmp_path: Path) -> Path:
    """An export of two layers, to which TVM added records, of two targets and of a function."""
    with writing(sqlite_engine) as connection:
        build = DatabaseBuilder(connection)
        made, solver = build.session(), build.solver("TvmConvDirectNCHW")
        for number, driver in enumerate(DRIVERS[:2]):
            kept = build.kernel(_text(number).encode())
            facts = {"params": params(number), "workload": kept, "clock": "cpu"}
            build.winner(made, build.config(driver), solver, 2.0 + number, **facts)
        path = export(connection, made, "tvm", tmp_path).path
    with open(path / WORKLOADS, "a") as stream:
        stream.write(f"{_text(7)}\n")
    index = {json.loads(line)[0]: n for n, line in enumerate((path / WORKLOADS).open())}
    first, unknown = index[json.loads(_text(0))[0]], index[json.loads(_text(7))[0]]
    with open(path / RECORDS, "a") as stream:
        for place, target, seconds in (
            (first, {**OWN, **COMPLETED}, [0.0005, 0.0015]),
            (first, {**OWN, "mcpu": "znver4"}, [0.0001]),
            (first, {"kind": "cuda", "arch": "sm_90"}, [0.0001]),
            (first, OWN, [1e10]),
            (first, OWN, None),
            (unknown, OWN, [0.001]),
        ):
            trace, _, _, arguments = json.loads(params(9))
            stream.write(f"{json.dumps([place, [trace, seconds, target, arguments]])}\n")
    return path


def _text(number: int) -> str:
    return json.dumps(json.loads(workload(str(number))), separators=(",", ":"))


SKIPPED = {
    f"its target is {OTHER}": 1,
    "its target is cuda -arch=sm_90": 1,
    "its time is not between 1 ns and a day": 2,
    "no session here has its workload": 1,
}


def imported(engine: sa.Engine, folder: Path, **facts: Any) -> tuple[int, Any]:
    """Import into a new session, which the environment has; returns it and the report."""
    with writing(engine) as connection:
        session = DatabaseBuilder(connection).session(reason=f"copy {facts}")
    return session, import_db(engine, folder, session, **facts)


def times(engine: sa.Engine, session: int, form: str, folder: Path) -> list[str]:
    """The lines of an export of the session."""
    with reading(engine) as connection:
        path = export(connection, session, form, folder).path
    return (path / RECORDS if form == "tvm" else path).read_text().splitlines()


@pytest.mark.parametrize("listed", [True, False], ids=["layers.json", "TVM's files alone"])
def test_the_records_of_the_sessions_target_come_in(
    sqlite_engine: sa.Engine, folder: Path, tmp_path: Path, listed: bool
) -> None:
    if not listed:
        (folder / LAYERS).unlink()
    session, report = imported(sqlite_engine, folder)
    assert (report.rows, report.configs, report.new_configs, report.new_solvers) == (3, 2, 0, 0)
    assert report.skipped == SKIPPED
    assert import_db(sqlite_engine, folder, session).changed == 0
    records = [json.loads(one) for one in times(sqlite_engine, session, "tvm", tmp_path / "out")]
    assert sorted(seconds for _, (_, (seconds,), *_) in records) == [0.001, 0.003]
    (_, line, _) = times(sqlite_engine, session, "json", tmp_path / "out")
    assert json.loads(line)["provenance"]["imported_from"].startswith(f"{folder.name} sha256:")


def test_a_target_that_is_named_is_taken_instead(sqlite_engine: sa.Engine, folder: Path) -> None:
    _, report = imported(sqlite_engine, folder, target="llvm -num-cores=2 -mcpu=znver4")
    own = "its target is llvm -mcpu=znver5 -mtriple=x86_64 -num-cores=2"
    assert report.rows == 1
    assert report.skipped == {own: 6, "its target is cuda -arch=sm_90": 1}


def test_what_is_no_target_or_has_none_is_refused(
    sqlite_engine: sa.Engine, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="for a target of kind llvm"):
        imported(sqlite_engine, folder, target="znver4")
    with writing(sqlite_engine) as connection:
        build = DatabaseBuilder(connection)
        path = export(connection, 1, "json", tmp_path).path
        other = build.session(library="miopen", target="gfx90a")
    with pytest.raises(BadInput, match="records of a JSON file have no target"):
        imported(sqlite_engine, path, target="llvm")
    with pytest.raises(BadInput):
        import_db(sqlite_engine, folder, other)


def _not_json(folder: Path) -> None:
    with open(folder / RECORDS, "a") as stream:
        stream.write("[0, [\n")


def _no_such_workload(folder: Path) -> None:
    with open(folder / RECORDS, "a") as stream:
        stream.write(f"{json.dumps([99, [[[], []], [1.0], OWN, []]])}\n")


def _no_target(folder: Path) -> None:
    with open(folder / RECORDS, "a") as stream:
        stream.write(f"{json.dumps([0, [[[], []], [1.0], 'llvm', []]])}\n")


def _text_for_time(folder: Path) -> None:
    with open(folder / RECORDS, "a") as stream:
        stream.write(f"{json.dumps([0, [[[], []], ['fast'], OWN, []]])}\n")


def _no_workload(folder: Path) -> None:
    (folder / WORKLOADS).write_text("[1]\n")


@pytest.mark.parametrize(
    "damage", [_not_json, _no_such_workload, _no_target, _text_for_time, _no_workload]
)
def test_a_damaged_folder_is_refused_before_anything_is_stored(
    sqlite_engine: sa.Engine, folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    with pytest.raises(BadInput):
        imported(sqlite_engine, folder)
    with reading(sqlite_engine) as connection:
        assert connection.execute(sa.text("SELECT COUNT(*) FROM find_db")).scalar() == 2


def test_the_command_takes_a_folder(folder: Path, type_in: Callable[..., Any]) -> None:
    with writing(open_database()) as connection:
        session = DatabaseBuilder(connection).session()
    words = ("tuna", "import-db", folder, "--session-id", session)
    ended = type_in(*words, "--target", "llvm -mcpu=znver4 -num-cores=2")
    assert "not imported: 1 (its target is cuda -arch=sm_90)" in ended.err
    assert "1 entry of 1 layer (1 of them new)" in ended.out
    assert type_in(*words, "--target", "llvm -mcpu").code == 2


def test_trials_go_out_and_records_come_in_on_both_databases(
    engine: sa.Engine, tmp_path: Path
) -> None:
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        session, solver = build.session(), build.solver("A")
        for number, driver in enumerate(DRIVERS[:3]):
            layer = build.config(driver)
            job = build.job(session, layer, solver)
            build.trial(job, 0, 1.0)
            build.trial(job, 1, None, cause="build_error")
            facts = {"params": params(number), "workload": build.kernel(_text(number).encode())}
            build.winner(session, layer, solver, 1.0, job, **facts)
        copy = build.session(reason="copy")
        assert export(connection, session, "t4", tmp_path).entries == 6
        path = export(connection, session, "tvm", tmp_path).path
    (path / LAYERS).unlink()
    assert import_db(engine, path, copy).rows == 3
    assert import_db(engine, path, copy).changed == 0
    assert len(times(engine, copy, "tvm", tmp_path / "again")) == 3
