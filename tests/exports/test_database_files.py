"""Databases as files: their forms, names, differences, merging, and the rules that they keep."""

from __future__ import annotations

import bz2
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_data import shared_data

from tuna.configs.problem_key import PerfKey
from tuna.errors import BadInput
from tuna.exports.database_files import check as check_known
from tuna.exports.database_files import diff, diff_line, merge
from tuna.exports.registry import exporter_of
from tuna.libraries import compressed
from tuna.libraries.exporter import CheckFacts, Findings, Pair, base_name
from tuna.libraries.imported_records import FindItem, PerfRecord
from tuna.libraries.miopen.formats import database_file, find_db, kernel_db, perf_db
from tuna.libraries.miopen.formats.kernel_db import KernelRecord
from tuna.libraries.miopen.library import MiopenLibrary
from tuna.libraries.results import KernelOf

KEY = "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F"
WRW = "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-W"
PERF = "2x64x28x28x1x3x3x1x64x16x1x1x0x1x1x0x1x1x0x0x1xNCHWxFP32xF"
FWD = "miopenConvolutionFwdAlgoDirect"
WRITTEN = ("gfx906_60.HIP.3_3_0_2d1fd997a-dirty.udb.txt", "gfx906_60.HIP.3_4_0_.udb.txt")

words = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zs"], exclude_characters=";:="),
    min_size=1,
    max_size=9,
)
perf_keys = st.builds(
    PerfKey,
    *[st.sampled_from(["NCHW", "NHWC"]), st.just("FP32"), st.sampled_from("FBW")],
    *[st.integers(-9, 99)] * 21,
)


def differences(a: Path, b: Path) -> list[Pair]:
    found: list[Pair] = []
    diff(a, b, found.append)
    return found


def put(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


# --- forms
# --------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(perf_keys, st.dictionaries(words, words, min_size=1, max_size=3), max_size=4)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_perf_db_in_text_reads_back(tmp_path: Path, rows: dict[PerfKey, dict[str, str]]) -> None:
    records = [
        PerfRecord(key, solver, params)
        for key, found in rows.items()
        for solver, params in found.items()
    ]
    with open(tmp_path / "x.db.txt", "wb") as stream:
        assert perf_db.write_text(stream, records) == len(records)
    assert list(perf_db.read(tmp_path / "x.db.txt")) == records


@pytest.mark.parametrize("name", WRITTEN)
def test_a_perf_db_that_miopen_wrote_reads_and_writes_back(tmp_path: Path, name: str) -> None:
    path = shared_data("miopen_db", "written_by_miopen", name)
    with open(tmp_path / "again", "wb") as stream:
        perf_db.write_text(stream, perf_db.read(path))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_find_db_that_miopen_wrote_reads_and_writes_back(tmp_path: Path) -> None:
    path = shared_data("miopen_db", "written_by_miopen", "gfx906_60.HIP.3_4_0_.ufdb.txt")
    with open(tmp_path / "again", "wb") as stream:
        find_db.write(stream, find_db.read(path))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "text", [PERF, f"{PERF}=", f"{PERF}=A", f"{PERF}=A:", f"{PERF}x1=A:1", f"a{PERF}=A:1"]
)
def test_a_damaged_perf_db_in_text_names_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match=r"x\.db\.txt:2: "):
        list(perf_db.read(put(tmp_path / "x.db.txt", f"{PERF}=A:1", text)))


@pytest.mark.parametrize("params", ["", "a;b", "a:b", "a=b", "a\nb"])
def test_params_that_text_cannot_hold_are_refused(tmp_path: Path, params: str) -> None:
    with open(tmp_path / "x", "wb") as stream, pytest.raises(BadInput):
        perf_db.write_text(stream, [PerfRecord(PerfKey.parse(PERF), "A", params)])


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            f"{FWD}:ConvOclDirectFwd,2.5,64,{FWD},<unused>",
            FindItem("ConvOclDirectFwd", 2.5, 64, FWD),
        ),
        (
            f"{FWD}:A,1,0,192x13x13x3x3x384x13x13x1024xNCHWxFP32,not used",
            FindItem("A", 1.0, 0, FWD),
        ),
        (
            "miopenTransposeBwdDataAlgoGEMM:G,1,0,rocBlas,x",
            FindItem("G", 1.0, 0, "miopenTransposeBwdDataAlgoGEMM"),
        ),
        (f"A:1e-05,0,{FWD}", FindItem("A", 1e-5, 0, FWD)),
    ],
)
def test_items_of_both_formats_are_read_alone_and_mixed(item: str, expected: FindItem) -> None:
    assert find_db.parse_line(f"{KEY}={item}").items == (expected,)
    assert find_db.parse_line(f"{KEY}=B:3,0,{FWD};{item}").items == (
        FindItem("B", 3.0, 0, FWD),
        expected,
    )


@pytest.mark.parametrize(
    "item", ["A:1_0,0,x", "A:1,1_0,x", "A:1,-1,x", "A:1, 1,x", f"Other:A,1,0,{FWD},x"]
)
def test_numbers_that_only_python_would_take_are_refused(item: str) -> None:
    with pytest.raises(BadInput):
        find_db.parse_line(f"{KEY}={item}")


# --- packed files
# --------------------------------------------------------------------------------------------------


def test_a_packed_file_reads_like_a_plain_one_and_is_the_same_each_time(tmp_path: Path) -> None:
    plain = put(tmp_path / "x", *(f"{PERF}=A:{number}" for number in range(9)))
    for name in ("1.bz2", "2.bz2"):
        compressed.pack(plain, tmp_path / name)
    assert (tmp_path / "1.bz2").read_bytes() == (tmp_path / "2.bz2").read_bytes()
    assert bz2.decompress((tmp_path / "1.bz2").read_bytes()) == plain.read_bytes()
    assert list(compressed.lines(tmp_path / "1.bz2", "x")) == list(compressed.lines(plain, "x"))


def test_a_packed_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.fdb.txt.bz2"
    path.write_bytes(bz2.compress(f"{KEY}=A:1,0,{FWD}\n".encode() * 9)[:-9])
    with pytest.raises(BadInput, match=r"cannot be"):
        list(find_db.read(path))


# --- names
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filename", "arch", "num_cu"),
    [
        ("gfx90a68.HIP.fdb.txt", "gfx90a", 104),
        ("gfx90a6e.db", "gfx90a", 110),
        ("gfx940e4.db", "gfx940", 228),
        ("gfx110136.db.txt.bz2", "gfx1101", 54),
        # no such card is known, and the name says so all the same
        ("gfx90aaa.db", "gfx90a", 170),
        ("gfx908_70.db", "gfx908", 70),
        ("gfx90878.db.txt.bz2", "gfx908", 120),
        ("gfx942130.HIP.fdb.txt.bz2", "gfx942", 304),
        ("gfx942e4.kdb", "gfx942", 228),
        ("gfx950100.db", "gfx950", 256),
        ("gfx906_60.OpenCL.fdb.txt", "gfx906", 60),
        ("gfx1030_36.db", "gfx1030", 36),
        ("gfx103048.HIP.fdb.txt", "gfx1030", 72),
        ("gfx1201_64.db", "gfx1201", 64),
        ("gfx115128.HIP.fdb.txt", "gfx1151", 20),
        ("gfx1151_20.kdb", "gfx1151", 20),
        ("gfx120020.db.txt", "gfx1200", 16),
        ("gfx110060.db.txt", "gfx1100", 48),
        ("gfx90a.kdb", "gfx90a", None),
        ("gfx906_60_1.1.0.udb", "gfx906", 60),
        ("gfx906_60.HIP.3_4_0_.ufdb.txt", "gfx906", 60),
    ],
)
def test_architecture_and_compute_units_are_read_from_names(
    filename: str, arch: str, num_cu: int | None
) -> None:
    assert database_file.parse_name(filename) == (arch, num_cu)


@given(
    st.sampled_from(
        [
            "gfx803",
            "gfx900",
            "gfx906",
            "gfx908",
            "gfx90a",
            "gfx942",
            "gfx950",
            "gfx1030",
            "gfx1101",
            "gfx1201",
        ]
    ),
    st.none() | st.integers(1, 600),
)
def test_names_are_read_as_they_are_made(arch: str, num_cu: int | None) -> None:
    """The kernel dbs' rule has no second reading for devices of up to 64 units."""
    names = {database_file.device_name(arch, num_cu or 0, "")}
    if (num_cu or 0) <= 64:
        names.add(base_name(arch, num_cu or 0))
    assert {database_file.parse_name(f"{name}.db") for name in names} == {(arch, num_cu)}


@pytest.mark.parametrize(
    ("arch", "toolchain", "name"),
    [
        ("gfx1151", "rocm-7.2.0+miopen-3.5.1.a1b2", "gfx1151_20"),
        ("gfx1151", "rocm-8.0.0+miopen-3.6.0.a1b2", "gfx115128"),
        ("gfx1151", "", "gfx115128"),
        ("gfx1101", "rocm-8.0.0+miopen-3.6.0.a1b2", "gfx1101_20"),
        ("gfx90a", "rocm-8.0.0+miopen-3.6.0.a1b2", "gfx90a_20"),
    ],
)
def test_a_devices_name_follows_the_rule_of_its_miopen(
    arch: str, toolchain: str, name: str
) -> None:
    assert database_file.device_name(arch, 20, toolchain) == name
    assert database_file.parse_name(f"{name}.HIP.fdb.txt") == (arch, 20)


@pytest.mark.parametrize(
    ("content", "form"),
    [(f"{KEY}=A:1,0,{FWD}", "find"), (f"{PERF}=A:1", "perf"), ("", None)],
)
def test_contents_say_what_a_database_is(tmp_path: Path, content: str, form: str | None) -> None:
    path = put(tmp_path / "x", content)
    found = [one.form for one in MiopenLibrary.exporters if one.recognises(path, content.encode())]
    assert found == ([] if form is None else [form])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("ending", ["", ".bz2"])
def test_a_text_with_a_byte_order_mark_is_read_as_without(
    tmp_path: Path, encoding: str, ending: str
) -> None:
    content = f"{'' if encoding == 'utf-8-sig' else chr(0xFEFF)}{KEY}=A:1,0,{FWD}\r\n"
    path = tmp_path / f"gfx906_60.HIP.fdb.txt{ending}"
    data = content.encode(encoding)
    path.write_bytes(bz2.compress(data) if ending else data)
    assert exporter_of(path).form == "find"
    assert [record.key for record in find_db.read(path)] == [KEY]


# --- differences and merging
# -------------------------------------------------------------------------------------------


def test_differences_are_counted_by_solver_and_type(tmp_path: Path) -> None:
    a = put(tmp_path / "a.fdb.txt", f"{KEY}=A:1,0,{FWD};B:2,0,{FWD};S:1,0,{FWD}", f"{WRW}=A:1,0,x")
    b = put(
        tmp_path / "b.fdb.txt", f"{KEY}=C:3,0,{FWD};A:0.5,0,{FWD};S:1,0,{FWD}", f"{WRW}=A:1,64,x"
    )
    found = diff(a, b)
    assert found.rows() == [
        ("A", "FP32 F", 0, 0, 1),
        ("A", "FP32 W", 0, 0, 1),
        ("B", "FP32 F", 0, 1, 0),
        ("C", "FP32 F", 1, 0, 0),
    ]
    assert (found.faster, found.slower, found.differs) == (1, 0, True)
    assert found.summary() == "1 added, 1 removed, 2 changed (1 faster, 0 slower), 1 same"
    assert [diff_line(pair)[: len(KEY) + 4] for pair in differences(a, b)] == [
        f"~ {KEY} A",
        f"- {KEY} B",
        f"+ {KEY} C",
        f"~ {WRW} A",
    ]
    assert not diff(a, a).differs


def test_a_perf_db_in_text_equals_the_one_in_sqlite(tmp_path: Path) -> None:
    shipped = shared_data("miopen_db", "gfx942130.trimmed.db")
    with open(tmp_path / "x.db.txt", "wb") as stream:
        count = perf_db.write_text(stream, perf_db.read(shipped))
    found = diff(shipped, tmp_path / "x.db.txt")
    assert (found.total("same"), found.differs) == (count, False)


def test_databases_of_different_kinds_are_not_compared(tmp_path: Path) -> None:
    find, perf = put(tmp_path / "a", f"{KEY}=A:1,0,{FWD}"), put(tmp_path / "b", f"{PERF}=A:1")
    with pytest.raises(BadInput, match=r"is a find db, .* a perf db"):
        diff(find, perf)


@pytest.mark.parametrize(
    ("keep_keys", "expected", "counts"),
    [
        (False, f"{KEY}=A:0.5,0,{FWD}\n{WRW}=A:1,0,x\n", (1, 1, 0, 1)),
        (True, f"{KEY}=A:0.5,0,{FWD};B:2,0,{FWD}\n{WRW}=A:1,0,x\n", (2, 1, 0, 0)),
    ],
)
def test_a_targets_line_replaces_the_masters_or_completes_it(
    tmp_path: Path, keep_keys: bool, expected: str, counts: tuple[int, ...]
) -> None:
    master = put(tmp_path / "m.fdb.txt", f"{WRW}=A:1,0,x", f"{KEY}=B:2,0,{FWD};A:1,0,{FWD}")
    target = put(tmp_path / "t.fdb.txt", f"{KEY}=A:0.5,0,{FWD}")
    report = merge(master, target, tmp_path / "o.fdb.txt", keep_keys=keep_keys)
    assert (tmp_path / "o.fdb.txt").read_text() == expected
    assert (report.kept, report.replaced, report.added, report.dropped) == counts


def test_old_lines_become_new_ones_and_lines_without_a_time_go(tmp_path: Path) -> None:
    master = shared_data("miopen_db", "old_gfx90a68.HIP.fdb.txt")
    target = put(tmp_path / "t.fdb.txt", f"{KEY}=A:0,0,{FWD};B:1,0,{FWD}", f"{WRW}=A:0,0,x")
    assert merge(master, target, tmp_path / "o.fdb.txt.bz2").unusable == 2
    records = {record.key: record.items for record in find_db.read(tmp_path / "o.fdb.txt.bz2")}
    assert records.pop(KEY) == (FindItem("B", 1.0, 0, FWD),)
    assert records == {
        record.key: tuple(sorted(record.items, key=lambda item: item.time_ms))
        for record in find_db.read(master)
    }


def test_perf_dbs_are_merged_row_by_row_from_any_form_to_any(tmp_path: Path) -> None:
    master = put(tmp_path / "m.db.txt", f"{PERF}=A:old;B:kept")
    target = put(tmp_path / "t.db.txt", f"{PERF}=A:new;C:added")
    report = merge(master, target, tmp_path / "o.db")
    assert (report.kept, report.replaced, report.added, report.dropped) == (1, 1, 1, 0)
    assert [(record.solver, record.params) for record in perf_db.read(tmp_path / "o.db")] == [
        ("A", "new"),
        ("B", "kept"),
        ("C", "added"),
    ]
    with pytest.raises(BadInput, match="not a name of a perf db"):
        merge(master, target, tmp_path / "o.fdb.txt".replace(".txt", ".kdb"))


def test_the_params_of_a_target_win_in_a_shipped_perf_db(tmp_path: Path) -> None:
    shipped = shared_data("miopen_db", "gfx1030_36.trimmed.db")
    record = next(iter(perf_db.read(shipped)))
    target = put(tmp_path / "t.db.txt", f"{record.key.text()}={record.solver}:mine")
    merge(shipped, target, tmp_path / "o.db")
    (only,) = differences(shipped, tmp_path / "o.db")
    assert (only.a, only.b) == ((record.params,), ("mine",))


def test_kernels_are_merged_and_checked(tmp_path: Path) -> None:
    kernel_db.write(
        tmp_path / "m.kdb",
        [KernelRecord("a.o", "-x", b"old"), KernelRecord("b.o", "-x", b"kept" * 99)],
    )
    kernel_db.write(
        tmp_path / "t.kdb", [KernelRecord("a.o", "-x", b"new"), KernelRecord("a.o", "-y", b"added")]
    )
    report = merge(tmp_path / "m.kdb", tmp_path / "t.kdb", tmp_path / "o.kdb")
    assert (report.kept, report.replaced, report.added) == (1, 1, 1)
    found = [
        (kernel.name, kernel.args, kernel.code) for kernel in kernel_db.read(tmp_path / "o.kdb")
    ]
    assert found == [("a.o", "-x", b"new"), ("a.o", "-y", b"added"), ("b.o", "-x", b"kept" * 99)]


# --- rules
# --------------------------------------------------------------------------------------------------


def rules(findings: Findings) -> list[str]:
    return [fault.rule for fault in findings.faults]


Kernels = dict[tuple[str, str], list[list[KernelOf]]]


def check(
    directory: Path, solvers: dict[str, bool] | None, kernels_of: Callable[..., Kernels]
) -> Findings:
    return check_known(directory, CheckFacts(solvers, kernels_of))


def none_known(*_: object) -> Kernels:
    return {}


def test_what_miopen_ships_keeps_the_rules(tmp_path: Path) -> None:
    for name in ("gfx942130.HIP.fdb.txt.bz2", "gfx942130.db.bz2"):
        (tmp_path / name).symlink_to(shared_data("miopen_db", name))
    solvers = {
        item.solver: False
        for record in find_db.read(tmp_path / "gfx942130.HIP.fdb.txt.bz2")
        for item in record.items
    }
    solvers |= {record.solver: True for record in perf_db.read(tmp_path / "gfx942130.db.bz2")}
    found = check(tmp_path, solvers, none_known)
    assert (found.faults, found.entries) == ([], 37_792 + 21_058)
    assert sum(found.left_out.values()) == 9_600


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("no line", "line"),
        (f"{KEY}=A:1,0,{FWD}", "duplicate"),
        (f"0{KEY}=A:1,0,{FWD}", "key"),
        (f"{WRW.replace('NCHW', 'NHWC')}=A:1,0,{FWD}", "key"),
        (f"{WRW}=A:1,0,x;A:2,0,x", "duplicate"),
        (f"{WRW}=A:0,0,x", "time"),
        (f"{WRW}=Unknown:1,0,x", "solver"),
        (f"{WRW}=T:1,0,x", "perf-row"),
    ],
)
def test_each_rule_of_a_find_db_is_checked(tmp_path: Path, text: str, rule: str) -> None:
    put(tmp_path / "gfx90a68.HIP.fdb.txt", f"{KEY}=A:1,0,{FWD};T:2,0,{FWD}", text)
    put(tmp_path / "gfx90a68.db.txt", f"{PERF}=T:1")
    assert rules(check(tmp_path, {"A": False, "T": True}, none_known)) == [rule]


def test_without_known_solvers_their_rules_are_left_out_and_said_so(tmp_path: Path) -> None:
    put(tmp_path / "gfx90a68.HIP.fdb.txt", f"{KEY}=Unknown:1,0,{FWD}")
    found = check(tmp_path, None, none_known)
    assert (rules(found), len(found.left_out)) == ([], 2)


@pytest.mark.parametrize(
    ("kdb", "faults"), [("gfx90a68.kdb", []), ("gfx90a.kdb", []), ("gfx90a6e.kdb", ["kernel"])]
)
def test_the_fastest_solvers_kernels_must_be_in_the_kernel_db(
    tmp_path: Path, kdb: str, faults: list[str]
) -> None:
    put(tmp_path / "gfx90a68.HIP.fdb.txt", f"{KEY}=Slow:2,0,{FWD};Fast:1,0,{FWD}")
    kernel_db.write(tmp_path / kdb, [KernelRecord("fast.o", "-mcpu=gfx90a", b"code")])
    asked = []

    def kernels_of(arch: str, num_cu: int | None, keys: object) -> Kernels:
        asked.append((arch, num_cu, keys))
        slow, fast = (
            [KernelOf(1, "S", "k", "d", "e", "digest", name, "-mcpu=gfx90a")]
            for name in ("slow.o", "fast.o")
        )
        return {(KEY, "Slow"): [slow], (KEY, "Fast"): [slow, fast]}

    assert rules(check(tmp_path, None, kernels_of)) == faults
    assert asked == [("gfx90a", 104, [KEY])]


def test_each_rule_of_a_kernel_db_is_checked(tmp_path: Path) -> None:
    def wal(path: Path) -> None:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA journal_mode = WAL")
        db.close()

    def damage(path: Path) -> None:
        with sqlite3.connect(path) as db:
            db.execute("UPDATE kern_db SET kernel_hash = 'x'")
        db.close()

    records = {"a.kdb": "-O3", "b.kdb": "-mcpu=gfx90a:xnack+", "c.kdb": "-O3", "d.kdb": "-O3"}
    for name, args in records.items():
        kernel_db.write(tmp_path / name, [KernelRecord("k.o", args, b"code")])
    wal(tmp_path / "c.kdb")
    damage(tmp_path / "d.kdb")
    found = check(tmp_path, None, none_known)
    assert [(fault.file.name, fault.rule) for fault in found.faults] == [
        ("b.kdb", "kernel-db"),
        ("c.kdb", "kernel-db"),
        ("d.kdb", "damaged"),
    ]


def test_rows_that_come_twice_are_found_where_the_index_is_missing(tmp_path: Path) -> None:
    perf_db.write(tmp_path / "gfx90a68.db", [PerfRecord(PerfKey.parse(PERF), "A", "1")])
    with sqlite3.connect(tmp_path / "gfx90a68.db") as db:
        db.execute("DROP INDEX idx_perf_db")
        db.execute("INSERT INTO perf_db (solver, config, params) VALUES ('A', 1, '2')")
    db.close()
    assert rules(check(tmp_path, None, none_known)) == ["duplicate"]


def test_a_folder_without_databases_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "README.md", "hello")
    with pytest.raises(BadInput, match="holds no database"):
        check(tmp_path, None, none_known)
