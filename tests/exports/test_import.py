"""MIOpen's own databases go in and come out with the same entries, whatever the order and however
often."""

from __future__ import annotations

import bz2
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from queries import read_value
from shared_data import DRILLS, shared_data

from tuna.configs import problem_key
from tuna.db import models, sessions
from tuna.db.engine import reading, writing
from tuna.errors import BadInput, NotFound
from tuna.exports import export
from tuna.exports.database_files import diff
from tuna.exports.importer import import_db
from tuna.libraries.base import Environment
from tuna.libraries.miopen.formats import find_db, perf_db

KEY = "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F"
WRW = "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-W"
PERF = "2x64x28x28x1x3x3x1x64x16x1x1x0x1x1x0x1x1x0x0x1xNCHWxFP32xF"


#: Keys that no layer of Tuna has: a size that is no convolution's, tensor casts, other types and
#: layouts, a bias.
UNUSUAL = (
    "128-1-1-3x3-256-1-1-114-0x0-1x1-1x1-0-NCHW-FP32-F",
    f"{KEY}_ciFP8_coFP8",
    KEY.replace("FP32", "INT8INT8INT32"),
    KEY.replace("NCHW", "NCHW-NHWC-NCHW"),
    KEY.replace("1x1-0-NCHW", "1x1-1-NCHW"),
)


@pytest.fixture()
def session_id(engine: sa.Engine) -> int:
    with writing(engine) as connection:
        return sessions.create(
            connection, Environment("miopen", "3.3.0", "gfx942", 304, "6.2.0"), "imported"
        )[0]


@pytest.fixture()
def write(tmp_path: Path) -> Callable[..., Path]:
    def put(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return put


def exported(
    engine: sa.Engine, session_id: int, form: str, folder: Path, **options: object
) -> Path:
    with reading(engine) as connection:
        return export(connection, session_id, form, folder, top=10, **options).path  # type: ignore[arg-type]


def results(engine: sa.Engine) -> dict[tuple[str, str], tuple[float | None, int, str]]:
    query = (
        sa.select(models.ConfigRow.problem_key, models.SolverRow.name, models.FindDb)
        .join_from(models.FindDb, models.ConfigRow, models.ConfigRow.id == models.FindDb.config_id)
        .join(models.SolverRow, models.SolverRow.id == models.FindDb.solver_id)
    )
    with sa.orm.Session(engine) as session:
        return {
            (key, solver): (row.time_ms, row.workspace_bytes, row.params)
            for key, solver, row in session.execute(query)
        }


def _part_of(
    find: Path, perf: Path, folder: Path
) -> tuple[Path, Path, tuple[tuple[int, int], tuple[int, int]]]:
    """Every 20th line of a find db and what a perf db has for it, under the same names; (rows,
    configs) of both."""
    folder.mkdir()
    lines = bz2.decompress(find.read_bytes()).decode().splitlines(keepends=True)[::20]
    records = [find_db.parse_line(line) for line in lines]
    keys = {problem_key.parse(record.key).perf() for record in records}
    params = [record for record in perf_db.read(perf) if record.key in keys]
    (folder / find.name).write_bytes(bz2.compress("".join(lines).encode()))
    perf_db.write(folder / perf.name.removesuffix(".bz2"), params)
    found = (sum(len(record.items) for record in records), len(records))
    return (
        folder / find.name,
        folder / perf.name.removesuffix(".bz2"),
        (found, (len(params), len({record.key for record in params}))),
    )


@pytest.mark.both_databases_in_drills
def test_find_db_and_perf_db_of_gfx942_come_out_as_they_went_in(
    engine: sa.Engine, session_id: int, tmp_path: Path
) -> None:
    find = shared_data("miopen_db", "gfx942130.HIP.fdb.txt.bz2")
    perf = shared_data("miopen_db", "gfx942130.db.bz2")
    counts = ((37_792, 9_600), (21_058, 9_393))
    if DRILLS == 1:  # all of it in a drill
        find, perf, counts = _part_of(find, perf, tmp_path / "part")
    first = import_db(engine, find, session_id)
    assert (first.rows, first.configs, first.new_configs, dict(first.skipped)) == (
        *counts[0],
        counts[0][1],
        {},
    )
    second = import_db(engine, perf, session_id)
    # All of the perf db's configs follow from the keys of the find db.
    assert (second.rows, second.configs, second.new_configs, dict(second.skipped)) == (
        *counts[1],
        0,
        {},
    )
    assert (
        import_db(engine, find, session_id).changed
        == import_db(engine, perf, session_id).changed
        == 0
    )

    again = exported(engine, session_id, "find", tmp_path)
    # The one difference: MITuna printed 9.0 where C++, and so MIOpen and we, print 9.
    assert again.read_text() == bz2.decompress(find.read_bytes()).decode().replace(".0,", ",")
    rows = exported(engine, session_id, "perf", tmp_path)
    assert not diff(perf, rows).differs
    assert {record.key for record in perf_db.read(rows)} == {
        record.key for record in perf_db.read(perf)
    }
    assert len({record.key for record in perf_db.read(rows)}) == counts[1][1]
    for form, path in (("find", again), ("perf", rows)):
        before = path.read_bytes()
        assert exported(engine, session_id, form, tmp_path / "2").read_bytes() == before
    text = exported(engine, session_id, "perf", tmp_path, text=True, packed=True)
    assert text.name == "gfx942130.db.txt.bz2"
    assert not diff(perf, text).differs


def test_keys_that_no_layer_has_come_out_as_they_went_in(
    engine: sa.Engine, session_id: int, tmp_path: Path, write: Callable[..., Path]
) -> None:
    find = write(
        "gfx942130.HIP.fdb.txt",
        *(f"{key}=GemmFwdRest:0.5,0,miopenConvolutionFwdAlgoGEMM" for key in UNUSUAL),
    )
    assert dict(import_db(engine, find, session_id).skipped) == {}
    assert {
        record.key for record in find_db.read(exported(engine, session_id, "find", tmp_path))
    } == set(UNUSUAL)
    rows = dict.fromkeys([PERF, *(problem_key.parse(key).perf().text() for key in UNUSUAL)])
    perf = write("gfx942130.db.txt", *(f"{row}=ConvAsm1x1U:1,2" for row in rows))
    assert dict(import_db(engine, perf, session_id).skipped) == {}
    assert not diff(perf, exported(engine, session_id, "perf", tmp_path, text=True)).differs


def test_the_keys_of_gfx90a_that_are_of_no_layer_come_out_as_they_went_in(
    engine: sa.Engine, session_id: int, tmp_path: Path
) -> None:
    find = tmp_path / "gfx90a68.HIP.fdb.txt"
    find.write_bytes(shared_data("miopen_db", "gfx90a68.not_imported.fdb.txt").read_bytes())
    report = import_db(engine, find, session_id)
    assert (report.rows, report.configs, dict(report.skipped)) == (1315, 412, {})
    assert not diff(find, exported(engine, session_id, "find", tmp_path / "out")).differs


@pytest.mark.parametrize(
    "engine", ["sqlite", pytest.param("mariadb", marks=pytest.mark.drill(only=True))], indirect=True
)
def test_a_perf_db_with_rows_of_three_dimensions_comes_out_as_it_went_in(
    engine: sa.Engine, session_id: int, tmp_path: Path
) -> None:
    perf, count = shared_data("miopen_db", "gfx1030_36.db.bz2"), 9_872
    if DRILLS == 1:  # all of it in a drill
        rows = [
            record
            for number, record in enumerate(perf_db.read(perf))
            if record.key.spatial_dim == 3 or record.key.in_h < 0 or number % 10 == 0
        ]
        perf, count = tmp_path / "gfx1030_36.db", len(rows)
        # those of a key follow each other
        perf_db.write(perf, sorted(rows, key=lambda record: str(record.key)))
    report = import_db(engine, perf, session_id)
    # Four rows of MIOpen's file have inputs of -5 by -5, which is no convolution: they are kept as
    # they are.
    assert (report.rows, dict(report.skipped)) == (count, {})
    path = exported(engine, session_id, "perf", tmp_path)
    assert not diff(perf, path).differs
    assert sum(record.key.spatial_dim == 3 for record in perf_db.read(path)) == 36
    assert path.read_bytes() == exported(engine, session_id, "perf", tmp_path / "2").read_bytes()


@pytest.mark.parametrize("perf_first", [False, True])
def test_the_order_of_find_and_perf_db_does_not_matter(
    engine: sa.Engine, session_id: int, write: Callable[..., Path], perf_first: bool
) -> None:
    files = [
        write("gfx942130.HIP.fdb.txt", f"{KEY}=A:1.5,64,miopenConvolutionFwdAlgoDirect"),
        write("gfx942130.db.txt", f"{PERF}=A:1,2,3"),
    ]
    for path in reversed(files) if perf_first else files:
        import_db(engine, path, session_id)
    assert results(engine) == {(KEY, "A"): (1.5, 64, "1,2,3")}


def test_what_was_measured_is_never_replaced(
    engine: sa.Engine, session_id: int, write: Callable[..., Path]
) -> None:
    import_db(
        engine, write("a.fdb.txt", f"{KEY}=A:1.5,64,miopenConvolutionFwdAlgoDirect"), session_id
    )
    with writing(engine) as connection:
        row = connection.execute(sa.select(models.FindDb.config_id, models.FindDb.solver_id)).one()
        values = {"reason": "", "options": {}, "steps": "a", "step": "a", "state": "evaluated"}
        job = connection.execute(
            sa.insert(models.Job).values(
                session_id=session_id, config_id=row[0], solver_id=row[1], **values
            )
        ).inserted_primary_key
        assert job is not None
        connection.execute(sa.update(models.FindDb).values(job_id=job[0], trial_number=0))
    report = import_db(
        engine, write("b.fdb.txt", f"{KEY}=A:9,64,miopenConvolutionFwdAlgoDirect"), session_id
    )
    assert (report.changed, dict(report.skipped)) == (0, {"the session has measured it": 1})
    assert results(engine) == {(KEY, "A"): (1.5, 64, "")}


@pytest.mark.both_databases_in_drills
def test_the_old_form_of_a_find_db_is_read_in_all_its_dialects(
    engine: sa.Engine, session_id: int, tmp_path: Path
) -> None:
    # Three keys of gfx1030 have filters that reach over more than the padded input: no layer has
    # them, and they are kept.
    for name in ("gfx1030_36.HIP", "gfx906_60.OpenCL", "gfx803_36.OpenCL"):
        report = import_db(engine, shared_data("miopen_db", f"{name}.fdb.txt.head"), session_id)
        assert report.rows > 20
        assert dict(report.skipped) == {}
    path = exported(engine, session_id, "find", tmp_path)
    assert "not used" not in path.read_text()
    lines = path.read_text().splitlines()
    assert all(item.count(",") == 2 for line in lines for item in line.partition("=")[2].split(";"))


def test_a_time_of_zero_is_kept_and_never_exported(
    engine: sa.Engine, session_id: int, write: Callable[..., Path], tmp_path: Path
) -> None:
    algorithm = "miopenConvolutionFwdAlgoDirect"
    path = write("gfx942130.HIP.fdb.txt", f"{KEY}=A:0,64,{algorithm};B:2,0,{algorithm}")
    assert import_db(engine, path, session_id).zero_times == 1
    assert (
        exported(engine, session_id, "find", tmp_path / "out").read_text()
        == f"{KEY}=B:2,0,{algorithm}\n"
    )


@pytest.mark.both_databases_in_drills
def test_what_miopen_would_not_take_is_left_out_and_counted(
    engine: sa.Engine, session_id: int, write: Callable[..., Path]
) -> None:
    algorithm = "miopenConvolutionFwdAlgoDirect"
    path = write(
        "a.fdb.txt",
        f"{KEY}=A:1,0,{algorithm};A:2,0,{algorithm};B:nan,0,{algorithm};C:-1,0,{algorithm}",
        f"{KEY}=D:1,0,{algorithm}",
        f"{WRW}_ciFP8=A:1,0,{algorithm}",
    )
    report = import_db(engine, path, session_id)
    assert (report.rows, sum(report.skipped.values())) == (2, 4), "the key with a cast is kept"
    assert results(engine) == {(KEY, "A"): (1.0, 0, ""), (f"{WRW}_ciFP8", "A"): (1.0, 0, "")}


@pytest.mark.both_databases_in_drills
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.fdb.txt", f"{KEY}=A:1,0,x\n{KEY}"),
        ("a.db.txt", f"{PERF}=A:1\n{PERF}=B"),
        ("a.fdb.txt.bz2", "no bzip2"),
        ("a.db", "SQLite format 3\0 but not really"),
        ("a.txt", "hello"),
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_stored(
    engine: sa.Engine, session_id: int, tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(BadInput):
        import_db(engine, path, session_id)
    assert read_value(engine, sa.select(sa.func.count()).select_from(models.SolverRow)) == 0


@pytest.mark.both_databases_in_drills
def test_an_import_needs_a_session_that_is_there(
    engine: sa.Engine, write: Callable[..., Path]
) -> None:
    with pytest.raises(NotFound):
        import_db(engine, write("a.fdb.txt", f"{KEY}=A:1,0,miopenConvolutionFwdAlgoDirect"), 7)
