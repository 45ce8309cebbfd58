"""What MITuna's exports got wrong, done right, and the values that its own tests of exports
expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder, tuned_network
from queries import read_rows

from tuna.db import models
from tuna.db.engine import reading, writing
from tuna.exports import export
from tuna.exports.importer import import_db
from tuna.libraries.miopen.formats import find_db, perf_db

#: Every direction, groups, dilation, strides that lose a remainder, another layout and type, three
#: dimensions.
LAYERS = (
    "./bin/MIOpenDriver conv -n 16 -c 64 -H 28 -W 30 -k 128 -y 3 -x 5 -p 1 -q 2 -u 2 -v 1 -F 1",
    "./bin/MIOpenDriver conv -n 4 -c 64 -H 14 -W 14 -k 32 -y 1 -x 1 -u 2 -v 2 -F 2",
    "./bin/MIOpenDriver conv -n 4 -c 8 -H 9 -W 9 -k 8 -y 3 -x 3 -l 2 -j 2 -F 4",
    (
        "./bin/MIOpenDriver convfp16 -n 8 -c 32 -H 57 -W 57 -k 64 -y 3 -x 3 -p 1 -q 1 -g 4"
        " --in_layout NHWC -F 2"
    ),
    (
        "./bin/MIOpenDriver convbfp16 --spatial_dim 3 -n 2 -c 8 -! 7 -H 8 -W 9 -k 8 -y 3 -x 3 -@ 3"
        " -F 4"
    ),
)
#: 135 characters, as a Composable Kernel solver really has them.
CK_PARAMS = (
    "DeviceConv2dFwdXdl_Input_N_Hi_Wi_C_Weight_K_Y_X_C_Output_N_Ho_Wo_K<256, 128, 128, 4,"
    " Filter1x1Stride1Pad0, 4, 32, 32, 2, 2, 4, 4, 4, 4>"
)


@pytest.fixture
def database(sqlite_engine: sa.Engine) -> sa.Engine:
    """An empty database."""
    return sqlite_engine


def measured(engine: sa.Engine) -> int:
    """A session with two tunable solvers and one that is not for each of LAYERS."""
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        session = build.session("miopen", "gfx90a", 104)
        asm, ck = (
            build.solver(name, "miopen", "ImplicitGEMM")
            for name in ("ConvAsmX", "ConvWinograd3x3WrW<3-2>")
        )
        gemm = build.solver("GemmFwdRest", "miopen", "GEMM", tunable=False)
        for number, layer in enumerate(LAYERS, 1):
            config = build.config(layer)
            build.winner(
                session,
                config,
                asm,
                0.125 * number,
                params=f"{number},2,7",
                workspace_bytes=64 * number,
            )
            build.winner(session, config, ck, 1 / 3 * number, params=CK_PARAMS)
            build.winner(session, config, gemm, 9.0, workspace_bytes=2**33)
    return session


def empty(engine: sa.Engine, arch: str = "gfx90a", num_cu: int = 104) -> int:
    """A session to import into."""
    with writing(engine) as connection:
        return DatabaseBuilder(connection).session("miopen", arch, num_cu, "imported")


def exported(engine: sa.Engine, session: int, form: str, directory: Path, top: int = 4) -> Path:
    """The file of an export."""
    with reading(engine) as connection:
        return export(connection, session, form, directory, top=top).path


def results(engine: sa.Engine, session: int) -> list[tuple[Any, ...]]:
    """Layer, solver, time, workspace and params of every result; times as a find db holds them."""
    row = models.FindDb
    query = sa.select(
        models.ConfigRow.driver, models.SolverRow.name, row.time_ms, row.workspace_bytes, row.params
    )
    query = query.join(models.ConfigRow, models.ConfigRow.id == row.config_id)
    query = query.join(models.SolverRow, models.SolverRow.id == row.solver_id).where(
        row.session_id == session
    )
    found = read_rows(engine, query)
    return sorted(
        (layer, name, find_db.time_text(time_ms or 0.0), *rest)
        for layer, name, time_ms, *rest in found
    )


@pytest.mark.parametrize("forms", [("find", "perf"), ("perf", "find")])
def test_results_that_were_exported_and_imported_are_those_that_were_measured(
    database: sa.Engine, tmp_path: Path, forms: tuple[str, ...]
) -> None:
    session, copy = measured(database), empty(database)
    for form in forms:
        import_db(database, exported(database, session, form, tmp_path), session_id=copy)
    assert len(results(database, copy)) == 3 * len(LAYERS)
    assert results(database, copy) == results(database, session)


@pytest.mark.parametrize("forms", [("find",), ("perf",), ("find", "perf"), ("perf", "find")])
def test_what_was_exported_and_imported_is_exported_the_same(
    database: sa.Engine, tmp_path: Path, forms: tuple[str, ...]
) -> None:
    session = measured(database)
    files = {form: exported(database, session, form, tmp_path / "first") for form in forms}
    copy = empty(database)
    for form in forms:
        import_db(database, files[form], session_id=copy)
    for form, path in files.items():
        assert exported(database, copy, form, tmp_path / "second").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("form", ["find", "perf", "kernel", "tvm"])
def test_a_result_that_is_gone_is_not_in_the_next_export_to_the_same_file(
    build: DatabaseBuilder, tmp_path: Path, form: str
) -> None:
    session = tuned_network(build, trials=6)
    before = export(build.connection, session, form, tmp_path / "same")
    last = build.config(DRIVERS[3])
    rows = sa.select(models.FindDb.id).where(models.FindDb.config_id == last)
    build.connection.execute(
        sa.delete(models.FindDbKernel).where(models.FindDbKernel.find_db_id.in_(rows))
    )
    build.connection.execute(sa.delete(models.FindDb).where(models.FindDb.config_id == last))
    after = export(build.connection, session, form, tmp_path / "same")
    assert after.path == before.path
    assert after.configs == before.configs - 1
    anew = export(build.connection, session, form, tmp_path / "new")
    files = [
        sorted(p for p in path.rglob("*") if p.is_file()) or [path]
        for path in (after.path, anew.path)
    ]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]


@pytest.mark.parametrize("rows", [1, 9, 10, 11])
def test_a_perf_db_of_any_number_of_rows_is_written_and_counted(
    build: DatabaseBuilder, tmp_path: Path, rows: int
) -> None:
    session, config = build.session("miopen", "gfx90a", 104), build.config(DRIVERS[1])
    for number in range(rows):
        build.winner(session, config, build.solver(f"S{number:02}", "miopen"), 1.0, params="x")
    report = export(build.connection, session, "perf", tmp_path)
    assert (report.entries, report.configs) == (rows, 1)
    assert [record.solver for record in perf_db.read(report.path)] == [
        f"S{number:02}" for number in range(rows)
    ]


def test_the_file_name_that_was_asked_for_gets_the_extension(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session = build.session("miopen", "gfx90a", 110)
    kernel = build.kernel(b"code")
    build.winner(
        session,
        build.config(DRIVERS[1]),
        build.solver("A", "miopen"),
        1.0,
        params="p",
        kernel=kernel,
    )
    wishes: dict[str, Any] = {"filename": "testing_export_db_outfile"}
    names = [
        export(build.connection, session, f, tmp_path, **wishes).path.name
        for f in ("find", "perf", "kernel")
    ]
    expected = {"testing_export_db_outfile" + end for end in (".HIP.fdb.txt", ".db", ".kdb")}
    assert set(names) == expected
    opencl = export(build.connection, session, "find", tmp_path, opencl=True, **wishes)
    assert opencl.path.name == "testing_export_db_outfile.OpenCL.fdb.txt"


def test_times_stand_after_the_first_colon_and_before_the_first_comma(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session, solver = build.session("miopen", "gfx90a", 104), build.solver("ConvAsm1x1U", "miopen")
    for layer, time_ms in zip(DRIVERS[1:3], (10.0, 20.0), strict=True):
        build.winner(session, build.config(layer), solver, time_ms)
    lines = export(build.connection, session, "find", tmp_path).path.read_text().splitlines()
    times = {
        line.partition("=")[0]: float(line.partition(":")[2].partition(",")[0]) for line in lines
    }
    assert times == {
        "64-56-56-3x3-64-56-56-1-1x1-1x1-1x1-0-NCHW-FP32-F": 10.0,
        "64-56-56-1x1-256-56-56-1-0x0-1x1-1x1-0-NCHW-FP32-F": 20.0,
    }
