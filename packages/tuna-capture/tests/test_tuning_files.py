"""Tuning files of TunableOp and hipBLASLt: in, out, merged, broken."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recorded_gpus
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from tuna.configs import read_one
from tuna.db.database import open_database
from tuna.errors import BadInput
from tuna.exports.database_files import merge_all
from tuna.exports.registry import exporter_of
from tuna.exports.tuning_file import TuningFile
from tuna.results.core_tables import reported
from tuna_capture.tuning_files import HipblasltExporter, TunableOpExporter

TypeIn = Callable[..., Any]
ROW = ("GemmTunableOp_BFloat16_TN,tn_512_256_4096_ld_4096_4096_512", "Gemm_Rocblas_45", "0.1")
#: As `hipblaslt-bench` writes it.
HEADER = (
    "    transA,transB,grouped_gemm,batch_count,m,n,k,alpha,lda,stride_a,beta,ldb,stride_b,ldc,"
    "stride_c,ldd,stride_d,a_type,b_type,c_type,d_type,compute_type,scaleA,scaleB,scaleC,scaleD,"
    "amaxD,activation_type,bias_vector,bias_type,aux_type,rotating_buffer,hipblaslt-Gflops,"
    "hipblaslt-GB/s,us,solution_index,gcnArchName,CUs"
)
VALUES = (
    "    N,N,0,1,1024,512,1024,1,1024,1048576,0,1024,524288,1024,524288,1024,524288,f16_r,f16_r,"
    "f16_r,f16_r,f32_r,0,0,0,0,0,none,0,f32_r,f32_r,512,66613.8,363.509,16.1189,56537,"
    "gfx942:sramecc+:xnack-,304"
)
HIPBLASLT = f"Git Version: a6254b89\n{HEADER}\n{VALUES}\n"


def stored() -> list[Any]:
    query = sa.select(reported).order_by(reported.c.id)
    with open_database().connect() as connection:
        return list(connection.execute(query))


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def best_of(path: Path) -> dict[str, tuple[float, str]]:
    with open(path, newline="") as stream:
        rows = [row for row in csv.reader(stream) if row[0] != "Validator"]
    found = {f"{row[0]},{row[1]}": (float(row[3]), row[2]) for row in rows}
    assert len(found) == len(rows), "a key twice"
    return found


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_that_windows_wrote_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "tunableop_results0.csv"
    path.write_bytes(f"Validator,PT_VERSION,2.9.0\r\n{','.join(ROW)}\r\n".encode(encoding))
    exporter = exporter_of(path)
    assert isinstance(exporter, TunableOpExporter)
    assert [row.implementation for row in exporter.read(path).rows] == [ROW[1]]


def test_results_of_eight_gpus_become_the_best_of_each_layer(
    type_in: TypeIn, tmp_path: Path
) -> None:
    wanted = recorded_gpus.record(tmp_path)
    files = sorted(tmp_path.glob("tunableop_results*.csv"))
    assert (len(files), len(wanted)) == (8, 2000)
    ended = type_in("tuna", "merge", "--form", "tunableop", *files)
    assert ended.code == 0, ended.err
    merged = tmp_path / "merged" / files[0].name
    found = best_of(merged)
    assert found.keys() == wanted.keys()
    assert all(found[key][0] == time for key, (time, _) in wanted.items())
    assert all(found[key][1] in solutions for key, (_, solutions) in wanted.items())
    again = type_in("tuna", "import-db", merged)
    assert again.out.startswith("2000 reported times of 2000 layers (2000 of them new)"), again
    assert all(row.config_key == read_one(row.subject).key for row in stored()[:20])
    out = type_in("tuna", "export", "--form", "tunableop", "--allow-reported").out
    assert best_of(Path(out.split()[-1])) == found


def test_pytorch_reads_what_was_merged(tmp_path: Path) -> None:
    """By its own parser, which builds for GPUs have, and which needs none to read a file."""
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if not hasattr(torch._C, "_cuda_tunableop_read_file"):
        pytest.skip("this PyTorch is built without torch.cuda.tunable's parser")
    from torch.cuda import tunable

    wanted = recorded_gpus.record(tmp_path, dict(tunable.get_validators()))
    merged = tmp_path / "best.tunableop.csv"
    merge_all(sorted(tmp_path.glob("tunableop_results*.csv")), merged)
    tunable.set_filename(str(merged))  # the default names the device, which takes a driver
    assert tunable.read_file()
    found = {f"{row[0]},{row[1]}": (row[3], row[2]) for row in tunable.get_results()}
    assert found.keys() == wanted.keys()
    for key, (time_ms, solutions) in wanted.items():
        assert found[key][0] == pytest.approx(time_ms)
        assert found[key][1] in solutions


def other_text(**validators: str) -> str:
    return recorded_gpus.text([ROW], recorded_gpus.VALIDATORS | validators)


def test_files_of_other_releases_are_not_merged_and_all_that_differs_is_named(
    type_in: TypeIn, tmp_path: Path
) -> None:
    first = put(tmp_path / "a.csv", recorded_gpus.text([ROW]))
    other = put(tmp_path / "b.csv", other_text(PT_VERSION="2.9.0"))
    third = put(tmp_path / "c.csv", other_text(GCN_ARCH_NAME="gfx90a", X="1"))
    ended = type_in("tuna", "merge", first, other, third, "-d", "out")
    assert ended.code == 2
    for words in ("b.csv: PT_VERSION is 2.9.0, not 2.10.0", "c.csv: GCN_ARCH_NAME is gfx90a",
                  "c.csv: X is 1, not missing"):  # fmt: skip
        assert words in " ".join(ended.err.split())
    assert not (tmp_path / "out").exists()
    assert type_in("tuna", "merge", "--form", "find", first, first).code == 2
    mixed = put(tmp_path / "d.csv", first.read_text() + other.read_text())
    assert "the file mixes releases" in " ".join(type_in("tuna", "import-db", mixed).err.split())
    assert not stored()


def test_bad_lines_are_counted_and_named_and_the_rest_is_taken(
    type_in: TypeIn, tmp_path: Path
) -> None:
    key = "GemmTunableOp_float_NN,nn_8_4_2"
    bad = [
        (key, "Default"), (key, "Default", "0"), (key, "Default", "nan"), (key, "Default", "1_0"),
        (key, "", "0.1"), ("noise", "", ""), (key, "Default", "-1"), ("Validator", "X"),
    ]  # fmt: skip
    extra = (*ROW, "BLAS_PARAMS: - { function: matmul, M: 512 }")
    path = put(tmp_path / "r.csv", recorded_gpus.text([*bad, extra]))
    ended = type_in("tuna", "import-db", path)
    assert ended.code == 0, ended
    assert ended.out.startswith("1 reported time of 1 layer (1 of them new)")
    assert "not imported: 4 (line 7: its time is not between" in ended.err
    assert "not imported: 2 (line 6: it has no solution and time)" in ended.err
    assert "not imported: 1 (line 11: it is not a row of TunableOp)" in ended.err
    (row,) = stored()
    assert (row.time_ms, row.implementation, row.device) == (0.1, ROW[1], "gfx942:sramecc+:xnack-")
    only_bad = put(tmp_path / "bad.csv", recorded_gpus.text(bad[:2]))
    assert type_in("tuna", "import-db", only_bad).code == 2
    assert type_in("tuna", "import-db", path, "--session-id", 1).code == 2
    assert type_in("tuna", "import-db", path, "--arch", "gfx90a").code == 2
    assert len(stored()) == 1


def test_an_index_of_another_release_or_device_is_not_written_and_counted(
    type_in: TypeIn, tmp_path: Path
) -> None:
    slower = VALUES.replace("16.1189,56537", "17.5,3")
    padded = VALUES.replace("1024,1048576", "1056,1081344").replace("56537", "7")
    texts = {
        "a.txt": HIPBLASLT + f"{HEADER}\n{slower}\n{HEADER}\n{padded}\n",
        "b.txt": HIPBLASLT.replace("a6254b89", "0ld"),
        "c.txt": HIPBLASLT.replace("gfx942:", "gfx950:"),
    }
    for name in ("b.txt", "c.txt", "a.txt"):
        assert type_in("tuna", "import-db", put(tmp_path / name, texts[name])).code == 0
    words = ("export", "--form", "hipblaslt", "--allow-reported", "-d", tmp_path / "out")
    ended = type_in("tuna", *words)
    path = tmp_path / "out" / "gfx942.hipblaslt.txt"
    assert ended.out == f"1 entry of 1 layer\n{path}\n"
    err = " ".join(ended.err.split())
    assert "not exported: 2 (of another device or release than CUs 304, Git Version a6254b89" in err
    assert "not exported: 1 (slower than another of its layer)" in err
    assert "not exported: 1 (hipBLASLt takes its layer for one that is written)" in err
    lines = path.read_text().splitlines()
    assert lines[0] == "Git Version: a6254b89"
    assert lines[1] == HEADER
    assert lines[2] == VALUES.replace("512,66613.8,363.509,16.1189", ",,,16.1189")
    assert type_in("tuna", *words, "--option", "release=0ld").code == 0
    assert path.read_text().startswith("Git Version: 0ld\n")
    assert type_in("tuna", *words, "--arch", "gfx950").out.endswith("gfx950.hipblaslt.txt\n")
    assert type_in("tuna", *words, "--arch", "gfx90a").code == 3


def test_rows_of_releases_without_headers_and_with_names_are_read(tmp_path: Path) -> None:
    values = VALUES.strip().split(",")
    old = ",".join(values[:30] + values[31:])
    path = put(tmp_path / "old.txt", f"Git Version: a\n{old}\n{VALUES}\n")
    one, two = HipblasltExporter().read(path).rows
    assert (one.implementation, one.time_ms, one.device) == (
        *("56537", 0.0161189, "gfx942:sramecc+:xnack-"),
    )
    assert two.subject == f"{one.subject} --aux_type f32_r"
    assert HipblasltExporter().layer(one) == read_one(one.subject).key
    named = f"{HEADER},kernel_name,new_column\n{VALUES},Cijk_A,1\n"
    (row,) = HipblasltExporter().read(put(tmp_path / "named.txt", named)).rows
    assert row.implementation == "56537 kernel_name Cijk_A"
    assert row.subject.endswith("--new_column 1")
    assert HipblasltExporter().layer(row) is None, "it may have timed another computation"
    out = tmp_path / "out.txt"
    HipblasltExporter().write_rows(out, [row], row.versions or {})
    assert HipblasltExporter().read(out).rows == [row]


@pytest.mark.parametrize(
    ("file", "text"),
    [(TunableOpExporter(), recorded_gpus.text([ROW])), (HipblasltExporter(), HIPBLASLT)],
    ids=lambda value: getattr(value, "form", ""),
)
@given(data=st.data())
def test_no_broken_file_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, file: TuningFile, text: str, data: st.DataObject
) -> None:
    """Hundreds of lines each time: pieces of good lines, with noise between them."""
    pieces = [*text.replace("\n", ",").split(","), "\n", "\n", ",", ",", "\x00", "\u2028", "nan"]
    noise = st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=3)), max_size=400)
    broken = text + ",".join(data.draw(noise)) + "\n" + text
    path = tmp_path_factory.mktemp("broken") / "file"
    path.write_text(broken, encoding="utf-8", errors="replace", newline="")
    assert exporter_of(path) is not None
    try:
        found = file.read(path)
    except BadInput:
        return  # two releases
    lines = sum(map(len, found.bad.values())) + len(found.rows)
    assert 0 < lines <= broken.count("\n") + 1
    for row in found.rows:
        file.layer(row)
    versions = found.rows[0].versions or {}
    same = [row for row in found.rows if row.versions == versions]
    file.write_rows(path, same, versions)
    assert [row.digest for row in file.read(path).rows] == [row.digest for row in same]
