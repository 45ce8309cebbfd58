"""Each format reads back what it wrote, byte for byte the same each time, and refuses what is
damaged."""

from __future__ import annotations

import bz2
import io
import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_data import shared_data

from tuna.configs.problem_key import PERF_FIELDS, PerfKey
from tuna.errors import BadInput
from tuna.libraries.imported_records import FindItem, FindRecord, PerfRecord
from tuna.libraries.miopen.formats import find_db, kernel_db, perf_db
from tuna.libraries.miopen.formats.kernel_db import KernelRecord
from tuna.libraries.tvm import tvm_db
from tuna.libraries.tvm.tvm_db import TunedLayer, TunedRecord

FORMAT_2 = ("gfx942130.HIP.fdb.txt.head", "gfx90a68.HIP.fdb.txt.head", "gfx90878.HIP.fdb.txt.head")
KEY = "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F"

files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
printable = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20
)
words = printable.filter(find_db.is_word)
#: Times as a find db holds them: what is written again with six digits.
times = st.floats(1e-6, 1e6).map(lambda value: float(find_db.time_text(value) or 1))
items = st.builds(FindItem, words, times, st.integers(0, 2**62), words)
keys = printable.filter(lambda text: find_db.is_word(text) and text == text.strip())
find_records = st.builds(FindRecord, keys, st.lists(items, min_size=1, max_size=5).map(tuple))
perf_keys = st.builds(
    PerfKey,
    *[st.sampled_from(["NCHW", "NHWC"]), st.just("FP32"), st.sampled_from("FBW")],
    *[st.integers(0, 9)] * 21,
)
perf_rows = st.tuples(perf_keys, st.dictionaries(printable, printable, min_size=1, max_size=3))
kernels = st.builds(
    KernelRecord, printable, printable, st.binary(max_size=2000) | st.just(b"a" * 9000)
)
schedules = st.lists(st.integers() | st.text(max_size=5), max_size=3).map(
    lambda trace: [trace, None, {"kind": "c"}, []]
)
tuned = st.builds(TunedRecord, schedules.map(tvm_db._compact), st.floats(1e-9, 10.0))
layers = st.builds(
    TunedLayer,
    *[printable] * 3,
    st.tuples(st.integers(0, 3).map(str), st.just("AA==")).map(tvm_db._compact),
    st.lists(tuned, min_size=1, max_size=3).map(tuple),
)


@given(st.lists(find_records, max_size=6))
@files
def test_a_find_db_reads_back(tmp_path: Path, records: list[FindRecord]) -> None:
    path = tmp_path / "x.fdb.txt"
    with open(path, "wb") as stream:
        assert find_db.write(stream, records) == sum(len(record.items) for record in records)
    assert list(find_db.read(path)) == records


def test_the_whole_find_db_of_gfx942_reads_and_writes_back(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(
        bz2.decompress(shared_data("miopen_db", "gfx942130.HIP.fdb.txt.bz2").read_bytes())
    )
    records = list(find_db.read(path))
    assert len(records) == 9600
    stream = io.BytesIO()
    find_db.write(stream, records)
    # The one difference: MITuna printed 9.0 where C++, and so MIOpen and we, print 9.
    assert stream.getvalue().decode() == path.read_text().replace(".0,", ",")


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (9.0, "9"),
        (0.051639, "0.051639"),
        (1e-5, "1e-05"),
        (1234567.0, "1.23457e+06"),
        (1 / 3, "0.333333"),
    ],
)
def test_times_are_printed_as_cpp_prints_floats(time_ms: float, text: str) -> None:
    assert find_db.time_text(time_ms) == text


@pytest.mark.parametrize("time_ms", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-60, 1e60])
def test_what_is_no_time_is_refused(time_ms: float) -> None:
    assert find_db.time_text(time_ms) is None
    with pytest.raises(BadInput, match="cannot stand"):
        find_db.format_record(FindRecord(KEY, (FindItem("A", time_ms, 0, "x"),)))


@pytest.mark.parametrize(
    "line",
    [KEY, f"{KEY}=", f"={KEY}", f"{KEY}=A", f"{KEY}=A:1,2", f"{KEY}=A:x,2,y", f"{KEY}=:1,2,y"],
)
def test_a_damaged_find_db_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x"
    path.write_text(f"\n{KEY}=A:1,0,x\n{line}\n")
    with pytest.raises(BadInput, match=r"x:3: "):
        list(find_db.read(path))


@given(st.lists(perf_rows, max_size=6, unique_by=lambda row: row[0]))
@files
def test_a_perf_db_reads_back_and_is_the_same_each_time(
    tmp_path: Path, rows: list[tuple[PerfKey, dict[str, str]]]
) -> None:
    records = [
        PerfRecord(key, solver, params)
        for key, by_solver in rows
        for solver, params in by_solver.items()
    ]
    first, second = _twice(tmp_path, lambda path: perf_db.write(path, records))
    assert first == second
    assert list(perf_db.read(tmp_path / "1")) == records


@given(st.lists(kernels, max_size=5, unique_by=lambda kernel: (kernel.name, kernel.args)))
@files
def test_a_kernel_db_reads_back_and_is_the_same_each_time(
    tmp_path: Path, records: list[KernelRecord]
) -> None:
    first, second = _twice(tmp_path, lambda path: kernel_db.write(path, records))
    assert first == second
    assert list(kernel_db.read(tmp_path / "1")) == records


def _twice(directory: Path, write: object) -> tuple[bytes, bytes]:
    for name in "12":
        (directory / name).unlink(missing_ok=True)
        write(directory / name)  # type: ignore[operator]
    return (directory / "1").read_bytes(), (directory / "2").read_bytes()


@given(st.lists(layers, max_size=5))
@files
def test_a_tvm_database_reads_back(tmp_path: Path, tuned_layers: list[TunedLayer]) -> None:
    assert tvm_db.write(tmp_path, "abc", tuned_layers) == sum(
        len(layer.records) for layer in tuned_layers
    )
    assert list(tvm_db.read(tmp_path)) == tuned_layers
    workloads = (tmp_path / tvm_db.WORKLOADS).read_text().splitlines()
    assert len(workloads) == len(set(workloads)) == len({layer.workload for layer in tuned_layers})


def test_the_perf_db_has_the_tables_of_the_one_that_miopen_ships(tmp_path: Path) -> None:
    perf_db.write(tmp_path / "ours", [])
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY rowid"
    pragmas = (
        "page_size",
        "journal_mode",
        "user_version",
        "encoding",
        "auto_vacuum",
        "application_id",
    )

    def described(path: Path) -> tuple[object, ...]:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            schema = sorted(connection.execute(query).fetchall())
            return schema, [connection.execute(f"PRAGMA {name}").fetchone() for name in pragmas]
        finally:
            connection.close()

    assert described(tmp_path / "ours") == described(
        shared_data("miopen_db", "gfx942130.trimmed.db")
    )


@pytest.mark.parametrize(
    "name", ["gfx942130.trimmed.db", "gfx906_60.trimmed.db", "gfx1030_36.trimmed.db"]
)
def test_a_perf_db_that_miopen_ships_reads_and_writes_back(name: str, tmp_path: Path) -> None:
    records = sorted(
        perf_db.read(shared_data("miopen_db", name)),
        key=lambda r: [str(getattr(r.key, f)) for f in PERF_FIELDS],
    )
    assert len(records) > 200
    perf_db.write(tmp_path / name, records)
    assert list(perf_db.read(tmp_path / name)) == records
    connection = sqlite3.connect(tmp_path / name)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_code_that_bzip2_does_not_shrink_is_stored_as_it_is(tmp_path: Path) -> None:
    records = [KernelRecord("a.so.o", "x", b"abc"), KernelRecord("b.so.o", "x", b"abc" * 1000)]
    kernel_db.write(tmp_path / "k", records)
    connection = sqlite3.connect(tmp_path / "k")
    rows = connection.execute(
        "SELECT kernel_blob, kernel_hash, uncompressed_size FROM kern_db ORDER BY id"
    ).fetchall()
    connection.close()
    assert rows[0] == (b"abc", "900150983cd24fb0d6963f7d28e17f72", 0)
    assert rows[1][0].startswith(b"BZh9")
    assert rows[1][2] == 3000


@pytest.mark.parametrize(
    "damage",
    [
        "kernel_blob = 'BZh9garbage'",
        "kernel_hash = '0'",
        "uncompressed_size = uncompressed_size - 1",
        "uncompressed_size = uncompressed_size + 1",
        "kernel_blob = substr(kernel_blob, 1, 20)",
    ],
)
def test_a_damaged_kernel_is_refused(tmp_path: Path, damage: str) -> None:
    kernel_db.write(tmp_path / "k", [KernelRecord("a.so.o", "x", b"code" * 500)])
    connection = sqlite3.connect(tmp_path / "k")
    connection.execute(f"UPDATE kern_db SET {damage}")
    connection.commit()
    connection.close()
    with pytest.raises(BadInput, match=r"the kernel a\.so\.o is damaged"):
        list(kernel_db.read(tmp_path / "k"))


@pytest.mark.parametrize("reader", [perf_db.read, kernel_db.read])
def test_a_file_of_another_format_is_refused(tmp_path: Path, reader: object) -> None:
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE other (id)").connection.close()
    (tmp_path / "text").write_text(
        "this is no database, but it is long enough to be looked at " * 20
    )
    for name in ("text", "other", "missing"):
        with pytest.raises(BadInput):
            list(reader(tmp_path / name))  # type: ignore[operator]


def test_a_tvm_database_whose_files_do_not_fit_is_refused(tmp_path: Path) -> None:
    layer = TunedLayer("k", "d", "s", '["1","AA=="]', (TunedRecord('[[],null,"c",[]]', 0.5),))
    tvm_db.write(tmp_path, "abc", [layer, replace(layer, workload='["2","AA=="]')])
    records = tmp_path / tvm_db.RECORDS
    records.write_text("\n".join(reversed(records.read_text().splitlines())))
    with pytest.raises(BadInput, match="do not fit"):
        list(tvm_db.read(tmp_path))


@pytest.mark.parametrize("params", ["", "x", "3", "[1]", "{}", "[1,2,3]"])
def test_params_that_are_no_tvm_record_are_refused(params: str) -> None:
    with pytest.raises(BadInput, match="params"):
        tvm_db.tuned_record(params, 1.0, "")


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1, 2]", b'["1"]', b'{"a": 1}'])
def test_an_artifact_that_is_no_workload_is_refused(data: bytes) -> None:
    with pytest.raises(BadInput, match="workload"):
        tvm_db.workload_text(data)
