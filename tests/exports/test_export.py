"""Exports of whole sessions: what is in the files, what is left out and why, and that nothing is
left behind."""

from __future__ import annotations

import json
import math
import os
import random
import sqlite3
import stat
import tempfile
from pathlib import Path

import pytest
import sqlalchemy as sa
from builders import DRIVERS, START, DatabaseBuilder, memory, schedule, tuned_network, workload

from tuna.configs import ConvConfig, Direction, parse_line
from tuna.db import models
from tuna.errors import BadInput, NotFound, StorageFull
from tuna.exports import export
from tuna.libraries.exporter import base_name
from tuna.libraries.miopen.formats import find_db, kernel_db, perf_db
from tuna.libraries.results import NO_TIME
from tuna.libraries.tvm import tvm_db

pytestmark = pytest.mark.both_databases_in_drills

LAYER = DRIVERS[1]
KEY = "64-56-56-3x3-64-56-56-1-1x1-1x1-1x1-0-NCHW-FP32-F"
FORMS = ["find", "perf", "kernel", "tvm", "json", "csv"]


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a path, by its name."""
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return {
        str(file.relative_to(path.parent)): file.read_bytes() for file in found if file.is_file()
    }


def miopen_session(build: DatabaseBuilder) -> int:
    """A session with two solvers for one layer."""
    session = build.session(library="miopen", arch="gfx90a", num_cu=104)
    config = build.config(LAYER, tag="resnet50")
    asm = build.solver("ConvAsm3x3U", "miopen", "direct")
    gemm = build.solver("GemmFwdRest", "miopen", "GEMM", tunable=False)
    build.winner(session, config, gemm, 0.5, workspace_bytes=4096, params="none")
    build.winner(session, config, asm, 0.25, params="0,2,7")
    return session


@pytest.mark.parametrize("form", FORMS)
def test_two_exports_are_the_same_and_an_older_one_is_replaced(
    build: DatabaseBuilder, tmp_path: Path, form: str
) -> None:
    session = tuned_network(build)
    first = export(build.connection, session, form, tmp_path)
    before = contents(first.path)
    build.connection.execute(sa.update(models.FindDb).values(time_ms=models.FindDb.time_ms * 2))
    changed = export(build.connection, session, form, tmp_path)
    assert form == "perf" or form == "kernel" or contents(changed.path) != before
    build.connection.execute(sa.update(models.FindDb).values(time_ms=models.FindDb.time_ms / 2))
    again = export(build.connection, session, form, tmp_path)
    assert contents(again.path) == before
    assert again == first
    assert list(tmp_path.iterdir()) == [first.path]


@pytest.mark.parametrize("form", FORMS)
def test_the_order_in_which_rows_came_does_not_matter(tmp_path: Path, form: str) -> None:
    results = []
    for seed in (1, 2):
        with memory().connect() as connection:
            build = DatabaseBuilder(connection)
            session = build.session()
            pairs = [(driver, name) for driver in DRIVERS[:4] for name in ("A", "B", "C")]
            # a job's id is part of a whole result
            ids = {pair: number for number, pair in enumerate(pairs, 1)}
            random.Random(seed).shuffle(pairs)
            for driver, name in pairs:
                config, solver = build.config(driver), build.solver(name)
                job = build.job(session, config, solver, id=ids[driver, name])
                build.trial(job, 0, 1.0, measured_at=START)
                kept = {
                    "workload": build.kernel(workload(driver + name)),
                    "kernel": build.kernel((driver + name).encode()),
                }
                build.winner(session, config, solver, 1.0, job, params=schedule(0), **kept)
            report = export(connection, session, form, tmp_path / str(seed))
            results.append((contents(report.path), report.entries, report.configs, report.skipped))
    assert results[0] == results[1]


def test_a_find_db_of_miopen(build: DatabaseBuilder, tmp_path: Path) -> None:
    report = export(build.connection, miopen_session(build), "find", tmp_path / "new" / "place")
    assert report.path == tmp_path / "new" / "place" / "gfx90a68.HIP.fdb.txt"
    assert report.path.read_text() == (
        f"{KEY}=ConvAsm3x3U:0.25,0,miopenConvolutionFwdAlgoDirect;GemmFwdRest:0.5,4096,miopenConvolutionFwdAlgoGEMM\n"
    )
    assert (report.entries, report.configs, report.skipped) == (2, 1, {})
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(report.path.stat().st_mode) == 0o666 & ~umask


def test_a_perf_db_of_miopen_holds_tunable_solvers_only(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    report = export(build.connection, miopen_session(build), "perf", tmp_path)
    assert report.path.name == "gfx90a68.db"
    (record,) = perf_db.read(report.path)
    assert (record.solver, record.params) == ("ConvAsm3x3U", "0,2,7")
    assert report.skipped == {"its solver is not tunable": 1}


def test_the_tvm_session_in_every_form(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = tuned_network(build)
    reports = {form: export(build.connection, session, form, tmp_path) for form in FORMS}
    names = {form: report.path.name for form, report in reports.items()}
    assert names == {
        "find": "znver5_2.TVM.fdb.txt",
        "perf": "znver5_2.db",
        "kernel": "znver5_2.kdb",
        "tvm": "znver5_2.tvm",
        "json": "znver5_2.tvm.results.jsonl",
        "csv": "znver5_2.tvm.results.csv",
    }
    assert reports["find"].skipped == {"MIOpen has no key for a gemm config": 1}
    assert {form: (r.entries, r.configs) for form, r in reports.items()} == {
        "find": (12, 4),
        "perf": (12, 4),
        "kernel": (5, 5),
        "tvm": (52, 5),
        "json": (13, 5),
        "csv": (13, 5),
    }
    assert all(json.loads(record.params) for record in perf_db.read(reports["perf"].path))


def test_the_find_db_is_sorted_and_its_items_too(build: DatabaseBuilder, tmp_path: Path) -> None:
    report = export(build.connection, tuned_network(build), "find", tmp_path)
    records = list(find_db.read(report.path))
    assert [record.key for record in records] == sorted(record.key for record in records)
    for record in records:
        assert [item.time_ms for item in record.items] == sorted(
            item.time_ms for item in record.items
        )


def test_equal_times_are_ordered_by_solver_and_top_keeps_the_fastest(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session, config = build.session(), build.config(LAYER)
    for name, time_ms in [("D", 1.0), ("B", 1.0), ("C", 0.5), ("A", 1.0), ("E", 9.0)]:
        build.winner(session, config, build.solver(name), time_ms)
    report = export(build.connection, session, "find", tmp_path, top=3)
    (record,) = find_db.read(report.path)
    assert [item.solver for item in record.items] == ["C", "A", "B"]
    assert report.skipped == {"slower than the 3 fastest of its config": 2}
    with pytest.raises(BadInput, match="at least one"):
        export(build.connection, session, "find", tmp_path, top=0)


@pytest.mark.parametrize("time_ms", [0.0, -1.0, 5e-324, 1e308, math.inf])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_time_is_never_exported(
    build: DatabaseBuilder, tmp_path: Path, form: str, time_ms: float
) -> None:
    session, config = build.session(), build.config(LAYER)
    build.winner(session, config, build.solver("A"), time_ms, params=schedule(1))
    with pytest.raises(NotFound, match=f"1 left out: {NO_TIME}"):
        export(build.connection, session, form, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_backward_layers_with_the_same_perf_key_share_a_row(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    """Stride 2 maps inputs of 13 and of 14 to the same output; only the find db tells them
    apart."""
    session, solver = build.session(), build.solver("A")
    for size, time_ms, params in [(14, 2.0, "slow"), (13, 1.0, "fast")]:
        layer = ConvConfig(1, 8, size, size, 8, 1, 1, 0, 0, 2, 2, direction=Direction.BACKWARD_DATA)
        build.winner(session, build.config(layer), solver, time_ms, params=params)
    assert export(build.connection, session, "find", tmp_path).configs == 2
    report = export(build.connection, session, "perf", tmp_path)
    assert [record.params for record in perf_db.read(report.path)] == ["fast"]
    assert report.skipped == {"another config with the same key has a better time": 1}


def test_the_kernel_db_holds_the_code_of_the_fastest_and_of_products_too(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session = build.session(arch="gfx90a:sramecc+:xnack-", num_cu=104)
    gemm, conv = build.config(DRIVERS[5]), build.config(LAYER)
    build.winner(session, gemm, build.solver("TvmGemm"), 1.0, kernel=build.kernel(b"g" * 999))
    build.winner(session, conv, build.solver("Fast"), 1.0, kernel=build.kernel(b"f" * 999))
    build.winner(session, conv, build.solver("Slow"), 2.0, kernel=build.kernel(b"s" * 999))
    lost = build.config(DRIVERS[0])
    build.winner(session, lost, build.solver("Fast"), 1.0)
    report = export(build.connection, session, "kernel", tmp_path)
    kernels = {record.name: record for record in kernel_db.read(report.path)}
    config = parse_line(LAYER)[0]
    name = f"Fast_{config.key[:16]}.so.o"
    assert set(kernels) == {name, f"TvmGemm_{parse_line(DRIVERS[5])[0].key[:16]}.so.o"}
    assert kernels[name].code == b"f" * 999
    environment = build.connection.execute(sa.select(models.EnvironmentRow.key)).scalar_one()
    assert kernels[name].args == f"{config.driver()} -DTUNA_ENVIRONMENT={environment} -mcpu=gfx90a"
    assert report.skipped == {"its kernel was not kept": 1, "not the fastest of its config": 1}


def test_the_tvm_database_has_the_checked_winner_first_and_nothing_that_seemed_faster(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session, config, solver = build.session(), build.config(LAYER), build.solver("A")
    job = build.job(session, config, solver)
    for number, time_ms in enumerate([0.9, 1.0, 3.0, 2.0, 4.0]):
        build.trial(job, number, time_ms)
    build.trial(job, 5, 1.5, cause="wrong_result")
    build.trial(job, 6, 1.6, params=None)
    kept = build.kernel(workload("a"))
    build.winner(
        session, config, solver, 1.1, job, trial_number=1, params=schedule(1), workload=kept
    )
    report = export(build.connection, session, "tvm", tmp_path, top=3)
    (layer,) = tvm_db.read(report.path)
    assert [record.seconds for record in layer.records] == [0.0011, 0.002, 0.003]
    assert [json.loads(record.schedule)[0][1][0][1][2] for record in layer.records] == [1, 3, 2]
    assert (layer.driver, layer.solver) == (parse_line(LAYER)[0].driver(), "A")
    assert report.entries == 3


def test_layers_of_one_workload_share_its_record(build: DatabaseBuilder, tmp_path: Path) -> None:
    session, solver, kept = build.session(), build.solver("A"), build.kernel(workload("same"))
    for driver in DRIVERS[:2]:
        build.winner(session, build.config(driver), solver, 1.0, params=schedule(0), workload=kept)
    bad = build.kernel(b"no workload")
    build.winner(session, build.config(DRIVERS[2]), solver, 1.0, params=schedule(0), workload=bad)
    build.winner(session, build.config(DRIVERS[3]), solver, 1.0, params="?", workload=kept)
    build.winner(session, build.config(DRIVERS[4]), solver, 1.0, params=schedule(0))
    report = export(build.connection, session, "tvm", tmp_path)
    assert (report.path / tvm_db.WORKLOADS).read_text().count("\n") == 1
    assert len(list(tvm_db.read(report.path))) == 2
    assert sum(report.skipped.values()) == 3


def test_a_tag_limits_the_export(build: DatabaseBuilder, tmp_path: Path) -> None:
    session, solver = build.session(), build.solver("A")
    build.winner(session, build.config(LAYER, tag="mine"), solver, 1.0)
    build.winner(session, build.config(DRIVERS[0], tag="other"), solver, 1.0)
    build.config(DRIVERS[2], tag="empty")
    report = export(build.connection, session, "find", tmp_path, config_tag="mine")
    assert [record.key for record in find_db.read(report.path)] == [KEY]
    with pytest.raises(NotFound, match="tag 'nobody'"):
        export(build.connection, session, "find", tmp_path, config_tag="nobody")
    with pytest.raises(NotFound, match="no results with the tag 'empty' for a find db"):
        export(build.connection, session, "find", tmp_path, config_tag="empty")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_export_writes_nothing_and_keeps_what_was_there(
    build: DatabaseBuilder, tmp_path: Path, form: str
) -> None:
    session = build.session()
    build.winner(build.session(reason="another"), build.config(LAYER), build.solver("A"), 1.0)
    with pytest.raises(NotFound, match=f"Session {session} has no results for a "):
        export(build.connection, session, form, tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    old = tmp_path / f"znver5_2{'.TVM.fdb.txt' if form == 'find' else ''}"
    old.write_text("old")
    with pytest.raises(NotFound):
        export(build.connection, session, form, tmp_path)
    assert contents(old) == {old.name: b"old"}
    assert list(tmp_path.iterdir()) == [old]


def test_an_unknown_session_is_not_found(build: DatabaseBuilder, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="Unknown session 7"):
        export(build.connection, 7, "find", tmp_path)


def test_only_a_tvm_session_has_a_tvm_database(build: DatabaseBuilder, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="only a tvm session"):
        export(build.connection, miopen_session(build), "tvm", tmp_path)


def test_names_that_cannot_stand_in_a_find_db_are_left_out(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session, config = build.session(), build.config(LAYER)
    build.winner(session, config, build.solver("A;B"), 1.0)
    build.winner(session, config, build.solver("C", algorithm="Magic"), 1.0)
    build.winner(session, config, build.solver("D<3-2>"), 1.0)
    report = export(build.connection, session, "find", tmp_path)
    (record,) = find_db.read(report.path)
    assert [item.solver for item in record.items] == ["D<3-2>"]
    assert report.skipped == {
        "MIOpen has no algorithm 'Magic'": 1,
        "its solver's name holds characters that separate entries": 1,
    }


@pytest.mark.parametrize("filename", ["", ".", "..", "a/b", "/etc/x", "x" * 300, "a\0b"])
def test_a_filename_is_one_plain_name(
    build: DatabaseBuilder, tmp_path: Path, filename: str
) -> None:
    session = miopen_session(build)
    with pytest.raises(BadInput, match="file name"):
        export(build.connection, session, "find", tmp_path, filename=filename)
    report = export(build.connection, session, "perf", tmp_path, filename="mine")
    assert report.path.name == "mine.db"


@pytest.mark.parametrize(
    ("arch", "num_cu", "name"),
    [
        ("gfx90a", 104, "gfx90a68"),
        ("gfx90a", 110, "gfx90a6e"),
        ("gfx908", 120, "gfx90878"),
        ("gfx942", 304, "gfx942130"),
        ("gfx906", 60, "gfx906_60"),
        ("gfx906", 64, "gfx906_64"),
        ("gfx1030", 36, "gfx1030_36"),
        ("gfx950", 256, "gfx950100"),
        ("gfx90a:sramecc+:xnack-", 104, "gfx90a68"),
        ("gfx90a:sramecc+:xnack+", 104, "gfx90a_xnack68"),
        ("gfx908:sramecc-", 120, "gfx908_nosramecc78"),
        ("x86-64-v3", 2, "x86-64-v3_2"),
        ("../../etc/passwd", 0, "etc_passwd"),
        ("Ünïcode card", 8, "n_code_card_8"),
        ("", 0, "unknown"),
    ],
)
def test_base_names_follow_miopens_rule_and_fit_every_file_system(
    arch: str, num_cu: int, name: str
) -> None:
    assert base_name(arch, num_cu) == name


@pytest.mark.parametrize("form", FORMS)
def test_a_place_that_cannot_be_written_is_bad_input(
    build: DatabaseBuilder, tmp_path: Path, form: str
) -> None:
    session = tuned_network(build, trials=6)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        export(build.connection, session, form, tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), sqlite3.OperationalError("disk is full")]
)
def test_a_full_disk_leaves_the_older_file_and_nothing_else(
    build: DatabaseBuilder,
    tmp_path: Path,
    form: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = tuned_network(build, trials=6)
    report = export(build.connection, session, form, tmp_path)
    before = contents(report.path)

    def full(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("tuna.common.files._sync", full)
    with pytest.raises(StorageFull, match="No space is left"):
        export(build.connection, session, form, tmp_path)
    assert contents(report.path) == before
    assert list(tmp_path.iterdir()) == [report.path]


@pytest.mark.parametrize("form", ["find", "perf", "kernel"])
def test_a_really_full_disk_is_storage_full(build: DatabaseBuilder, form: str) -> None:
    """A limit on the size of files makes every write fail, much as a full disk does."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    session = tuned_network(build, trials=6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with tempfile.TemporaryDirectory() as directory:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises((StorageFull, BadInput)):
                export(build.connection, session, form, Path(directory) / "new")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert list(Path(directory).iterdir()) == []


def test_a_directory_is_replaced_also_without_an_exchange_of_names(
    build: DatabaseBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tuned_network(build, trials=6)
    report = export(build.connection, session, "tvm", tmp_path)
    (report.path / "stale").write_text("")
    monkeypatch.setattr("tuna.common.files._exchange", lambda one, other: False)
    export(build.connection, session, "tvm", tmp_path)
    assert sorted(contents(report.path)) == [
        f"{report.path.name}/{name}"
        for name in sorted([tvm_db.RECORDS, tvm_db.WORKLOADS, tvm_db.LAYERS])
    ]
    assert list(tmp_path.iterdir()) == [report.path]
