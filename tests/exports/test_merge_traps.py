"""The values that MITuna's own tests of merge_db expect, as far as they are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_data import shared_data

from tuna.errors import BadInput
from tuna.exports.database_files import merge
from tuna.libraries.imported_records import FindItem, FindRecord
from tuna.libraries.miopen.formats import find_db

KEYS = [f"64-{size}-28-3x3-64-{size}-28-16-1x1-1x1-1x1-0-NCHW-FP32-F" for size in range(8, 14)]
DIRECT, GEMM = "miopenConvolutionFwdAlgoDirect", "miopenConvolutionFwdAlgoGEMM"
Database = dict[str, dict[str, float]]

times = st.integers(1, 10**6).map(lambda number: number / 1000)
solvers = st.sampled_from(["ConvAsm3x3U", "ConvAsm1x1U", "GemmFwdRest", "ConvWinograd<3-2>"])
databases = st.dictionaries(
    st.sampled_from(KEYS), st.dictionaries(solvers, times, min_size=1), min_size=1
)


def write(path: Path, database: Database) -> Path:
    """A find db with these times by key and solver."""
    with open(path, "wb") as stream:
        for key, items in database.items():
            find_db.write(
                stream,
                [FindRecord(key, tuple(FindItem(s, t, 0, DIRECT) for s, t in items.items()))],
            )
    return path


def read(path: Path) -> Database:
    """Times by key and solver."""
    return {
        record.key: {item.solver: item.time_ms for item in record.items}
        for record in find_db.read(path)
    }


@pytest.mark.parametrize("keep_keys", [False, True])
@given(old=databases, new=databases)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_keys_of_both_files_are_in_the_merged_one_and_the_target_wins(
    tmp_path: Path, keep_keys: bool, old: Database, new: Database
) -> None:
    master, target = (
        write(tmp_path / "master.fdb.txt", old),
        write(tmp_path / "target.fdb.txt", new),
    )
    merge(master, target, tmp_path / "merged.HIP.fdb.txt", keep_keys=keep_keys)
    found = read(tmp_path / "merged.HIP.fdb.txt")
    assert found == old | (
        {key: old.get(key, {}) | items for key, items in new.items()} if keep_keys else new
    )
    assert list(found) == sorted(found)
    for items in found.values():
        assert list(items) == sorted(items, key=lambda solver: (items[solver], solver))


@pytest.mark.parametrize("keep_keys", [False, True])
def test_the_user_file_of_mitunas_test_is_merged_into_the_old_one(
    tmp_path: Path, keep_keys: bool
) -> None:
    """Both are in the old format, with its five fields; what comes out is in the one that MIOpen
    reads today."""
    master, target = (
        shared_data("miopen_db", f"{name}_gfx90a68.HIP.fdb.txt") for name in ("old", "usr")
    )
    merge(master, target, tmp_path / "gfx90a68.HIP.fdb.txt", keep_keys=keep_keys)
    found = read(tmp_path / "gfx90a68.HIP.fdb.txt")
    old, new = read(master), read(target)
    assert (len(old), len(new), len(found)) == (4, 4, 5)
    assert found["1024-14-14-1x1-256-14-14-15-0x0-1x1-1x1-0-NCHW-FP16-F"] == {
        "ConvHipImplicitGemmForwardV4R4Xdlops_Padded_Gemm": 0.03808,
        "ConvAsm1x1U": 0.11072,
        "ConvBinWinogradRxSf3x2": 0.208159,
        "GemmFwd1x1_0_1": 2730.97,
    }
    key = "1-160-698-5x5-64-79-348-1-1x1-2x2-1x1-0-NCHW-FP32-F"
    assert found[key]["ConvMlirIgemmFwdXdlops"] == 0.03776
    assert len(found[key]) == (5 if keep_keys else 1)
    kept = "1-48-480-3x3-16-48-480-1-1x1-1x1-1x1-0-NCHW-FP16-F"
    assert found[kept] == old[kept]
    assert "not used" not in (tmp_path / "gfx90a68.HIP.fdb.txt").read_text()


@pytest.mark.parametrize("damaged", ["master", "target"])
@pytest.mark.parametrize("line", [f"=ConvAsm3x3U:1,0,{DIRECT}", f"{KEYS[1]}=", KEYS[1]])
def test_a_merge_with_an_empty_key_or_value_is_refused_and_writes_nothing(
    tmp_path: Path, damaged: str, line: str
) -> None:
    paths = {
        name: write(tmp_path / f"{name}.fdb.txt", {KEYS[0]: {"A": 1.0}})
        for name in ("master", "target")
    }
    with open(paths[damaged], "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(BadInput, match=f"{damaged}.fdb.txt:2"):
        merge(paths["master"], paths["target"], tmp_path / "out" / "x.fdb.txt")
    assert not (tmp_path / "out" / "x.fdb.txt").exists()


def test_a_merge_into_an_empty_master_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    target = write(tmp_path / "target.fdb.txt", {KEYS[0]: {"A": 1.0}})
    (tmp_path / "master.fdb.txt").write_text("")
    with pytest.raises(BadInput, match=r"master\.fdb\.txt"):
        merge(tmp_path / "master.fdb.txt", target, tmp_path / "x.fdb.txt")
    assert not (tmp_path / "x.fdb.txt").exists()
