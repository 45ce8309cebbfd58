"""Databases as files, from the command line: in, out, merged, compared, checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TypeIn = Callable[..., Any]
KEY = "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F"
PERF = "2x64x28x28x1x3x3x1x64x16x1x1x0x1x1x0x1x1x0x0x1xNCHWxFP32xF"
FWD = "miopenConvolutionFwdAlgoDirect"
FROM = ("--rocm-version", "6.2.0", "--miopen-version", "3.3.0")


@pytest.fixture
def find(tmp_path: Path) -> Path:
    path = tmp_path / "gfx90a68.HIP.fdb.txt"
    path.write_text(f"{KEY}=A:1.5,64,{FWD};B:2,0,{FWD}\n")
    return path


@pytest.fixture
def perf(tmp_path: Path) -> Path:
    path = tmp_path / "gfx90a68.db.txt"
    path.write_text(f"{PERF}=A:1,2,3\n")
    return path


def test_databases_come_out_as_they_went_in(
    type_in: TypeIn, find: Path, perf: Path, tmp_path: Path
) -> None:
    first = type_in("tuna", "import-db", find, *FROM)
    assert first.out == "2 entries of 1 layer (1 of them new)\nsession 1\n"
    assert type_in("tuna", "import-db", perf, "--session-id", 1).out.endswith("session 1\n")
    out = tmp_path / "out"
    assert type_in("tuna", "export", "--session-id", 1, "--form", "find", "-d", out).out.endswith(
        f"{out / find.name}\n"
    )
    assert (out / find.name).read_text() == find.read_text()
    packed = type_in(
        "tuna", "export", "--session-id", 1, "--form", "perf", "--text", "--bz2", "-d", out
    )
    assert packed.out.endswith(f"{out}/gfx90a68.db.txt.bz2\n")
    for was, now in ((find, find.name), (perf, "gfx90a68.db.txt.bz2")):
        assert type_in("tuna", "db-diff", was, out / now).code == 0
    assert type_in("tuna", "check-db", out).out == "2 files, 3 entries: no faults\n"


def test_an_imported_session_is_of_the_device_in_the_files_name(
    type_in: TypeIn, find: Path
) -> None:
    type_in("tuna", "import-db", find, "--rocm-version", "6.2.0", "--miopen-version", "3.3.0")
    (session,) = json.loads(type_in("tuna", "status", "--json").out)
    assert "gfx90a" in json.dumps(session)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "--rocm-version is missing"),
        (("--session-id", 7), 3, "Unknown session 7"),
        (("--session-id", 1, "--arch", "gfx90a"), 2, "the environment is the session's"),
    ],
)
def test_an_import_needs_to_know_what_the_database_was_made_with(
    type_in: TypeIn, find: Path, words: tuple[object, ...], code: int, said: str
) -> None:
    ended = type_in("tuna", "import-db", find, *words)
    assert (ended.code, said in ended.err) == (code, True)
    assert json.loads(type_in("tuna", "status", "--json").out) == []


@pytest.mark.parametrize("words", [(), ("--session-id", 1, "--golden", 1), ("--golden", 1)])
def test_an_export_needs_to_know_whose_results(type_in: TypeIn, words: tuple[object, ...]) -> None:
    ended = type_in("tuna", "export", "--form", "find", *words)
    assert ended.code in (2, 3)
    assert ended.err.startswith("Error: ")


def test_a_release_is_exported_too(type_in: TypeIn, find: Path, tmp_path: Path) -> None:
    type_in("tuna", "import-db", find, *FROM)
    assert type_in("tuna", "golden", "build", 1, "--session-id", 1, "--allow-imported").code == 0
    words = ("--golden", 1, "--arch", "gfx90a", "--form", "find", "-d", tmp_path / "out")
    assert type_in("tuna", "export", *words, "--num-cu", 104).out.endswith("gfx90a68.HIP.fdb.txt\n")
    assert type_in("tuna", "export", *words).out.endswith("gfx90a.HIP.fdb.txt\n")
    assert type_in("tuna", "export", *words, "--num-cu", 110).code == 3


def test_differences_are_told_and_give_an_exit_code(
    type_in: TypeIn, find: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.fdb.txt"
    other.write_text(f"{KEY}=A:1,64,{FWD};C:2,0,{FWD}\n")
    ended = type_in("tuna", "db-diff", find, other, "--entries")
    assert ended.code == 1
    assert (
        f"~ {KEY} A: 1.5,64,{FWD} -> 1.0,64,{FWD}\n- {KEY} B: 2.0,0,{FWD}\n+ {KEY} C: 2.0,0,{FWD}\n"
        in ended.out
    )
    assert ended.out.endswith("1 added, 1 removed, 1 changed (1 faster, 0 slower), 0 same\n")
    found = json.loads(type_in("tuna", "db-diff", find, other, "--entries", "--json").out)
    assert (found["added"], found["removed"], found["changed"], len(found["entries"])) == (
        1,
        1,
        1,
        3,
    )


def test_a_merge_never_touches_what_it_reads(type_in: TypeIn, find: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / find.name
    mine.parent.mkdir()
    mine.write_text(f"{KEY}=C:1,0,{FWD}\n")
    before = find.read_text(), mine.read_text()
    out = tmp_path / "out"
    ended = type_in("tuna", "merge", find, mine, "-d", out, "--keep-keys")
    assert (ended.code, ended.err) == (0, "")
    assert (out / find.name).read_text() == f"{KEY}=C:1,0,{FWD};A:1.5,64,{FWD};B:2,0,{FWD}\n"
    assert (find.read_text(), mine.read_text()) == before
    assert type_in("tuna", "merge", find, mine, "-d", find.parent).code == 2


def test_broken_rules_are_told_and_give_an_exit_code(type_in: TypeIn, tmp_path: Path) -> None:
    folder = tmp_path / "dbs"
    folder.mkdir()
    (folder / "gfx90a68.HIP.fdb.txt").write_text(f"{KEY}=A:0,0,{FWD}\n")
    ended = type_in("tuna", "check-db", folder)
    assert (ended.code, ended.out.splitlines()[-1]) == (1, "1 file, 1 entry: 1 fault")
    assert "time: line 1: A takes 0.0 ms" in ended.out
    assert [
        fault["rule"]
        for fault in json.loads(type_in("tuna", "check-db", folder, "--json").out)["faults"]
    ] == ["time"]
    assert type_in("tuna", "check-db", tmp_path).code == 2
