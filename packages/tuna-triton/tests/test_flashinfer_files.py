"""Winners of FlashInfer's autotuner: reported, written for all ranks, and the defects that are
found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_triton_exports import checked

from tuna.exports.registry import exporter_of
from tuna_triton.flashinfer_files import FlashInferFile, FlashInferStore
from tuna_triton.flashinfer_keys import entry_name, environment_hash, parse_key, text_of_fields

TypeIn = Callable[..., Any]
VERSIONS = {
    "flashinfer_version": "0.7.4",
    "cuda_version": "13.0",
    "cublas_version": "13.2.1",
    "cudnn_version": "91700",
    "cudnn_frontend_version": "1.18.0",
    "cutlass_dsl_version": "4.4.0",
    "gpu": "NVIDIA H100 80GB HBM3",
}
POLICY = ["cuda_graph_profile_replays", 1, "l2_cache_policy", "hot"]
GEMM = (
    "('bf16_gemm', 'CutlassBf16GemmRunner', ((64, 2048), (2048, 1024), (1,)),"
    " (torch.bfloat16, False))"
)
FP8 = "('fp8_gemm', 'CublasFp8GemmRunner', ((16, 4096),), (torch.float8_e4m3fn, 'a, (b)', None))"
RIVAL = GEMM.replace("Cutlass", "Cublaslt")
#: Names and the SHA-256 of files that FlashInfer 0.7.4 itself wrote for GEMM, and 0.7.2.post1 too
#: (`ManagedAutotuneCache.publish`); test_store_consumers compares with the wheel.
RECORDED = {
    "v2/b1197c25597f731a/manifest.json": (
        "ae57636619ae3d9bddecd6d7e7894e164ea3af949e2a50a793be17f75414ad0b"
    ),
    "v2/b1197c25597f731a/entries/26654b1ce5c77860b171ddf4.json": (
        "ab7443a0419e4c38b25e30e96406b4aee7a6ba22ef24c89ac02b599a21215f96"
    ),
}


def winners(time_ms: float = 0.02, tactic: Any = 7, **more: Any) -> dict[str, Any]:
    """A file as `save_configs` writes it."""
    return {
        "_metadata": VERSIONS,
        GEMM: ["CutlassBf16GemmRunner", tactic, POLICY, {"time_ms": time_ms}],
        FP8: ["CublasFp8GemmRunner", [128, [2, 1]], POLICY, {"time_ms": 0.5}],
        "_generation": "0" * 64,
        **more,
    }


def put(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))
    return path


def exported(type_in: TypeIn, folder: Path, form: str) -> Path:
    words = ("--form", form, "--allow-reported", "-d", folder)
    ended = type_in("tuna", "export", *words)
    assert ended.code == 0, ended.err
    return Path(ended.out.split()[-1])


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def ranks(type_in: TypeIn, tmp_path: Path) -> Path:
    """Reports of two ranks, which chose differently."""
    for rank, facts in enumerate(((0.02, 7), (0.01, 9))):
        file = put(tmp_path / f"autotune_configs_dp0_rank{rank}.json", winners(*facts))
        assert type_in("tuna", "import-db", file).code == 0
    return tmp_path


def test_ranks_that_chose_differently_get_one_store_with_the_faster(
    type_in: TypeIn, ranks: Path
) -> None:
    store = exported(type_in, ranks / "a", "flashinfer")
    folder = environment_hash({**VERSIONS, "cache_schema": "v2"})
    entry = json.loads((store / "v2" / folder / "entries" / entry_name(GEMM)).read_text())
    assert (entry["key"], entry["runner"], entry["tactic"]) == (GEMM, "CutlassBf16GemmRunner", 9)
    assert entry["profiling_policy"] == POLICY
    assert isinstance(exporter_of(store), FlashInferStore)
    assert len(list(FlashInferStore().entries(store))) == 2
    assert checked(store).faults == []


def test_equal_reports_give_equal_bytes_in_whatever_order_they_come(
    type_in: TypeIn, ranks: Path
) -> None:
    first = {
        form: exported(type_in, ranks / "a", form) for form in ("flashinfer", "flashinfer-json")
    }
    for rank in (1, 0):
        type_in("tuna", "import-db", ranks / f"autotune_configs_dp0_rank{rank}.json")
    store = exported(type_in, ranks / "b", "flashinfer")
    assert contents(store) == contents(first["flashinfer"])
    file = exported(type_in, ranks / "b", "flashinfer-json")
    assert file.read_bytes() == first["flashinfer-json"].read_bytes()
    assert checked(file.parent).faults == []


def test_files_of_two_ranks_are_merged_by_time(type_in: TypeIn, ranks: Path) -> None:
    files = sorted(ranks.glob("autotune_configs_*.json"))
    assert type_in("tuna", "merge", *files, "-d", ranks / "merged").code == 0
    merged = json.loads((ranks / "merged" / files[0].name).read_text())
    assert merged[GEMM] == ["CutlassBf16GemmRunner", 9, POLICY, {"time_ms": 0.01}]
    assert merged["_metadata"] == VERSIONS


def test_a_rank_of_another_release_is_not_merged(type_in: TypeIn, ranks: Path) -> None:
    other = {**winners(), "_metadata": {**VERSIONS, "cudnn_version": "91800"}}
    first = ranks / "autotune_configs_dp0_rank0.json"
    ended = type_in("tuna", "merge", first, put(ranks / "other.json", other))
    assert ended.code == 2
    assert "cudnn_version is 91800, not 91700" in " ".join(ended.err.split())


def test_of_two_runners_for_an_operation_the_faster_is_written(
    type_in: TypeIn, tmp_path: Path
) -> None:
    rival = {RIVAL: ["CublasltBf16GemmRunner", 3, POLICY, {"time_ms": 0.001}]}
    type_in("tuna", "import-db", put(tmp_path / "autotune_configs.json", winners(**rival)))
    store = exported(type_in, tmp_path / "a", "flashinfer")
    runners = {entry.solver for entry in FlashInferStore().entries(store)}
    assert runners == {"CublasltBf16GemmRunner", "CublasFp8GemmRunner"}


def test_entries_without_a_time_are_counted(tmp_path: Path) -> None:
    more = {RIVAL: ["CublasltBf16GemmRunner", 3, POLICY], "other": [1], "_records": {"n": {}}}
    found = FlashInferFile().read(put(tmp_path / "a.json", winners(**more)))
    assert len(found.rows) == 2
    assert {why: len(at) for why, at in found.bad.items()} == {
        "it has no time": 1,
        "it is not an entry of FlashInfer's": 1,
        "records of an operation's own tuning": 1,
    }


@pytest.mark.parametrize("key", [GEMM, FP8])
def test_the_fields_of_a_key_lead_back_to_it(key: str) -> None:
    parts = parse_key(key)
    assert parts is not None
    assert parts.text == key
    assert text_of_fields(parts.fields()) == key


@pytest.mark.parametrize("text", ["", "('a', 'B', (), )", "('a', 'B', ((1,), (x,)), ())", "()"])
def test_other_texts_are_no_keys(text: str) -> None:
    assert parse_key(text) is None


def test_a_store_has_the_names_and_text_that_flashinfer_writes(
    type_in: TypeIn, ranks: Path
) -> None:
    found = contents(exported(type_in, ranks / "a", "flashinfer"))
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    assert digests.items() >= RECORDED.items()


ENTRY = {
    "key": GEMM,
    "runner": "CutlassBf16GemmRunner",
    "tactic": 7,
    "profiling_policy": POLICY,
    "key_fields": parse_key(GEMM).fields(),  # type: ignore[union-attr]
}
MANIFEST = {**VERSIONS, "cache_schema": "v2"}


def without(content: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != name}


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ([], "damaged"),
        (without(ENTRY, "tactic"), "damaged"),
        (ENTRY | {"key": FP8, "runner": "CublasFp8GemmRunner"}, "place fields"),
        (ENTRY | {"runner": "CublasltBf16GemmRunner"}, "runner"),
        (ENTRY | {"tactic": None}, "tactic"),
        (without(ENTRY, "profiling_policy"), "policy"),
        (ENTRY | {"profiling_policy": "hot"}, "policy"),
        (without(ENTRY, "key_fields"), "fields"),
        (ENTRY | {"key_fields": parse_key(FP8).fields()}, "fields"),  # type: ignore[union-attr]
        (ENTRY | {"key_fields": {"__tuple__": 1}}, "fields"),
    ],
)
def test_each_planted_defect_of_an_entry_is_named(tmp_path: Path, entry: object, rule: str) -> None:
    folder = tmp_path / "v2" / environment_hash(MANIFEST)
    put(folder / "manifest.json", MANIFEST)
    path = put(folder / "entries" / entry_name(GEMM), ENTRY)
    assert checked(tmp_path).faults == []
    put(path, entry)
    found = {(one.file, one.rule) for one in checked(tmp_path).faults}
    assert found == {(path, one) for one in rule.split()}


@pytest.mark.parametrize(
    ("manifest", "named", "rule"),
    [
        (MANIFEST, "0" * 16, "folder"),
        (MANIFEST | {"cache_schema": "v3"}, "", "schema"),
        (MANIFEST | {"cudnn_version": "unknown"}, "", "versions"),
        (without(MANIFEST, "cutlass_dsl_version"), "", "versions"),
        (MANIFEST | {"gpu": None}, "", "versions"),
        ([], "0" * 16, "damaged"),
    ],
)
def test_each_planted_defect_of_an_environment_is_named(
    tmp_path: Path, manifest: Any, named: str, rule: str
) -> None:
    folder = tmp_path / "v2" / (named or environment_hash(manifest))
    path = put(folder / "manifest.json", manifest)
    found = {(one.file, one.rule) for one in checked(tmp_path).faults}
    assert found == {(path, rule)}


def test_two_runners_for_one_operation_in_a_store_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "v2" / environment_hash(MANIFEST)
    put(folder / "manifest.json", MANIFEST)
    for key in (GEMM, RIVAL):
        parts = parse_key(key)
        assert parts is not None
        entry = ENTRY | {"key": key, "runner": parts.runner, "key_fields": parts.fields()}
        put(folder / "entries" / entry_name(key), entry)
    (fault,) = checked(tmp_path).faults
    assert (fault.file, fault.rule) == (folder / "entries", "rivals")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (without(winners(), "_metadata"), "damaged"),
        (winners(_metadata=without(VERSIONS, "gpu")), "versions"),
        (winners(_metadata=VERSIONS | {"cublas_version": "None"}), "versions"),
        (winners(other=["Runner", 1]), "key"),
        (winners(**{RIVAL: {"runner": "CublasltBf16GemmRunner"}}), "damaged"),
        (winners(**{RIVAL: ["CutlassBf16GemmRunner", 1]}), "runner rivals"),
        (winners(**{GEMM: ["CutlassBf16GemmRunner", None, POLICY]}), "tactic"),
        (winners(**{FP8.replace("Cublas", "Cudnn"): ["CudnnFp8GemmRunner", 3]}), "tactic rivals"),
        (winners(**{GEMM: ["CutlassBf16GemmRunner", 7, ["hot"]]}), "policy"),
        (winners(_generation=3), "generation"),
    ],
)
def test_each_planted_defect_of_a_file_is_named(tmp_path: Path, content: object, rule: str) -> None:
    path = put(tmp_path / "autotune_configs.json", winners())
    assert checked(tmp_path).faults == []
    put(path, content)
    found = {(one.file, one.rule) for one in checked(tmp_path).faults}
    assert found == {(path, one) for one in rule.split()}
