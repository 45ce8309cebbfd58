"""The fin double: command line, steps, kernels, crashes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fin_calls import (
    ABORTED,
    CONFIG,
    DOUBLE,
    KEY,
    LAYOUTS_3D,
    SIZES_3D,
    Fin,
    code_of,
    job,
    succeeded,
)
from fin_double.fin_problem import Device, Problem
from fin_double.fin_solvers import BY_NAME, CONVOLUTION, applicable

#: For those who change the double; what it is recorded to answer is in test_fin_replay.py
pytestmark = pytest.mark.drill(only=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-E", str(DOUBLE), *arguments],
        capture_output=True,
        text=True,
        env={},
    )


@pytest.mark.parametrize(
    "arguments", [["-h"], ["a", "--help"], ["-help"], [], ["-i", "x"], ["-i", "x", "-o", "y", "z"]]
)
def test_wrong_arguments_and_help_exit_with_0(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert "test double" in done.stderr.splitlines()[0]
    assert ("Invalid arguments" in done.stderr) == (not {"-h", "--help", "-help"} & set(arguments))


def test_a_missing_input_exits_with_255(tmp_path: Path) -> None:
    done = run("-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert done.returncode == 255
    assert f"File: {tmp_path / 'none'} does not exist" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_shell_sees_134_and_the_output_is_empty(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("no json")
    command = f"{sys.executable} -S -E {DOUBLE} -i {tmp_path}/in -o {tmp_path}/out; echo $?"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    assert done.stdout == "134\n"
    assert (tmp_path / "out").read_bytes() == b""
    assert run("-i", f"{tmp_path}/in", "-o", f"{tmp_path}/none/out").returncode == ABORTED


def test_fin_tells_its_environment(fin: Fin) -> None:
    fin.answers({"steps": []}, env={"SECRET": "x=ü"})
    assert "SECRET=x=ü" in json.loads(fin.target.read_text())[0]["process_env"]


def test_missing_fields_of_the_job_are_echoed_as_null_and_unknown_steps_ignored(fin: Fin) -> None:
    nulls = {"arch": None, "config_tuna_id": None, "direction": None}
    question = {"steps": ["find_compile", "get_applicability"], "label": "x"}
    assert fin.answer(question) == {**nulls, "input": {**nulls, **question}}


@pytest.mark.parametrize(
    "broken",
    [
        *({"arch": arch} for arch in ("gfx941", "gfx950", "gfx1100", None)),
        *({"num_cu": count} for count in (104, "120", None)),
        *({"config": {**CONFIG, "cmd": command}} for command in ("gemm", "convfp8", None)),
        *(
            {"config": {key: value for key, value in CONFIG.items() if key != name}}
            for name in ("direction", "in_h")
        ),
        *({"config": {**CONFIG, "in_layout": layout}} for layout in ("NCDHW", "NCHWc2", 1)),
        *(
            {"config": {**CONFIG, **wrong}}
            for wrong in ({"spatial_dim": 1}, {"group_count": 3}, {"fil_h": 40})
        ),
        {"config": {**CONFIG, "cmd": "bnorm", "mode": 0, "save": 1, "run": 1, "in_layout": "NHWC"}},
        {"config": {**CONFIG, "cmd": "bnorm"}},
    ],
)
def test_what_fin_does_not_take_aborts_all_jobs(fin: Fin, broken: dict[str, Any]) -> None:
    code, _ = fin.code(job("applicability"), {**job("applicability"), **broken})
    assert code == ABORTED
    assert fin.target.read_bytes() == b""


def test_any_other_direction_is_backward_weights(fin: Fin) -> None:
    keys = [
        fin.answer(job("miopen_find_compile", config={"direction": word}, solvers=[]))["db_key"]
        for word in ("W", "f")
    ]
    assert (
        keys == [KEY.replace("64-28-20-3x3-32", "32-28-20-3x3-64").replace("FP32-F", "FP32-W")] * 2
    )


def test_keys_of_three_dimensions_and_of_other_layouts(fin: Fin) -> None:
    answer = fin.answer(job("miopen_find_compile", config={**SIZES_3D, **LAYOUTS_3D}))
    assert answer["db_key"] == "64-8-28-20-3x3x3-32-8-28-20-16-1x1x1-1x1x1-1x1x1-0-NCDHW-FP32-F"
    sizes = "64x8x28x20x3x3x3x32x8x28x20x16"
    assert answer["network_config"] == f"{sizes}xNCDHWxFP32x1x1x1x1x1x1x1x1x1x1xFxDefault"
    assert (
        fin.code(job("applicability", config={**SIZES_3D, **LAYOUTS_3D}), abort_3d=True)[0]
        == ABORTED
    )
    mixed = {"in_layout": "NHWC", "wei_layout": "NCHW", "out_layout": "NCHW", "direction": "B"}
    assert fin.answer(job("miopen_find_compile", config=mixed))["db_key"].endswith(
        "-NCHW-NCHW-NHWC-FP32-B"
    )


def test_three_to_eight_solvers_apply_that_fit_the_direction() -> None:
    devices = [Device("gfx906", 60, ""), Device("gfx908", 120, ""), Device("gfx942", 304, "")]
    shapes = itertools.product(
        ("conv", "convfp16", "convbfp16"),
        "FBW",
        ("NCHW", "NHWC"),
        (1, 3, 5),
        (1, 2, 3),
        (1, 2),
        (1, 4),
        (0, 1),
    )
    order = [solver.name for solver in CONVOLUTION]
    seen: set[str] = set()
    for device, (
        command,
        direction,
        layout,
        size,
        stride,
        dilation,
        groups,
        pad,
    ) in itertools.product(devices, shapes):
        sizes = {
            "fil_h": size,
            "fil_w": size,
            "conv_stride_h": stride,
            "conv_stride_w": stride,
            "group_count": groups,
        }
        sizes |= {"dilation_h": dilation, "dilation_w": dilation, "pad_h": pad, "pad_w": pad}
        layouts = {f"{tensor}_layout": layout for tensor in ("in", "wei", "out")}
        config = {**CONFIG, **sizes, **layouts, "cmd": command, "direction": direction}
        names = applicable(Problem(config), device)
        assert 3 <= len(names) <= 8, (config, names)
        assert names == sorted(names, key=order.index)
        assert all(direction in BY_NAME[name].directions for name in names)
        assert sum(name.startswith("Gemm") for name in names) == 1
        seen.update(names)
    assert len(seen) > 25


@pytest.mark.parametrize(
    ("mode", "direction", "expected"),
    [
        (0, 1, ["BnFwdTrainingPerActivation"]),
        (1, 1, ["BnFwdTrainingSpatialSingle", "BnFwdTrainingSpatialMultiple"]),
        (1, 2, ["BnBwdTrainingSpatialSingle", "BnBwdTrainingSpatialMultiple"]),
    ],
)
def test_batch_norm_has_solvers_but_does_not_compile(
    fin: Fin, mode: int, direction: int, expected: list[str]
) -> None:
    config = {"cmd": "bnorm", "mode": mode, "save": 0, "run": 0, "forw": 1}
    question = {**job("applicability", config=config), "direction": direction}
    assert fin.answer(question)["applicable_solvers"] == expected
    assert fin.code({**question, "steps": ["miopen_find_compile"]})[0] == ABORTED


@pytest.mark.parametrize(
    ("direction", "word"), [("F", "Fwd"), ("B", "BwdData"), ("W", "BwdWeights")]
)
def test_find_compile_answers_for_every_solver(fin: Fin, direction: str, word: str) -> None:
    config = {"direction": direction}
    applies = fin.answer(job("applicability", config=config))["applicable_solvers"]
    entries = fin.compiled("find", job(config=config))
    assert [entry["solver_name"] for entry in entries] == [solver.name for solver in CONVOLUTION]
    assert [entry["solver_name"] for entry in succeeded(entries)] == applies
    for entry in entries:
        assert entry["algorithm"].startswith(f"miopenConvolution{word}Algo")
        assert entry["find_compiled"] == (entry["reason"] == "Success")
        assert entry["reason"] in ("Success", "Not Applicable")
        assert ("kernel_objects" in entry) == entry["find_compiled"]
    kernels = [kernel for entry in succeeded(entries) for kernel in entry["kernel_objects"]]
    assert all(kernel["blob"].startswith("QlpoOTFBWSZTW") for kernel in kernels)
    codes = [code_of(kernel) for kernel in kernels]
    assert all(code.startswith(b"\x7fELF") and 4096 <= len(code) <= 40_960 for code in codes)
    assert all(len(kernel["blob"]) < kernel["uncompressed_size"] for kernel in kernels)
    gemm = [entry for entry in succeeded(entries) if entry["algorithm"].endswith("AlgoGEMM")]
    assert [entry["kernel_objects"] for entry in gemm] == [[]]


def test_dynamic_only_and_names_that_do_not_exist(fin: Fin) -> None:
    names = ["ConvAsm3x3U", "ConvBinWinogradRxSf3x2", "ConvAsm1x1U", "Nobody"]
    entries = fin.compiled("find", job(solvers=names, dynamic_only=True))
    assert [entry["solver_name"] for entry in entries] == names
    assert [entry["reason"] for entry in entries] == [
        "Not Dynamic",
        "Success",
        "Not Applicable",
        "Empty Solver",
    ]


def test_perf_compile_sends_a_kernel_for_every_perf_config(fin: Fin) -> None:
    entries = {entry["solver_name"]: entry for entry in succeeded(fin.compiled("perf", job()))}
    assert entries.keys() == {
        entry["solver_name"] for entry in succeeded(fin.compiled("find", job()))
    }
    repeated = entries.pop("ConvBinWinogradRxSf3x2")["kernel_objects"]
    assert len(repeated) == 60
    assert all(kernel == repeated[0] for kernel in repeated)
    for name, entry in entries.items():
        assert entry.keys() == {
            "solver_name",
            "algorithm",
            "perf_compiled",
            "reason",
            "tunable",
            "kernel_objects",
        }
        distinct = Counter(
            (kernel["kernel_file"], kernel["comp_options"]) for kernel in entry["kernel_objects"]
        )
        if BY_NAME[name].tunable:
            assert 4 <= len(distinct) <= 9  # the last one is a transpose
        else:
            assert len(distinct) == (0 if name.startswith("Gemm") else 1)


def perf_db(folder: Path, row: str) -> dict[str, str]:
    (folder / "gfx90878.db.txt").write_text(f"2x1x1=ConvAsm3x3U:1,1\n{row}\n")
    return {"MIOPEN_SYSTEM_DB_PATH": str(folder)}


@pytest.mark.parametrize("direction", ["F", "B"])
@pytest.mark.parametrize("solver", ["ConvAsm3x3U", "ConvBinWinogradRxSf3x2", "GTC"])
def test_tuned_params_lead_from_perf_compile_to_find_eval(
    fin: Fin, direction: str, solver: str
) -> None:
    if solver == "GTC":
        solver = f"ConvAsmImplicitGemmGTCDynamic{ {'F': 'Fwd', 'B': 'Bwd'}[direction] }XdlopsNHWC"
    question = job(config={"direction": direction}, solvers=[solver])
    all_kernels = fin.compiled("perf", question)
    (default,) = fin.compiled("find", question)
    (measured,) = fin.evaluated("find", question, [default])
    (tuned,) = fin.evaluated("perf", question, all_kernels)
    assert tuned["time"] <= measured["time"]
    # Like fin's, workspace and kernels are those from before tuning.
    assert tuned["workspace"] == default["workspace"]
    assert tuned["kernel_objects"] == default["kernel_objects"] == measured["kernel_objects"]
    channels = "64x28x20x1x3x3x1x32" if direction == "F" else "32x28x20x1x3x3x1x64"
    key = f"2x{channels}x16x1x1x0x1x1x0x1x1x0x0x1xNCHWxFP32x{direction}"
    row = f"{key}=Other:1;{solver}:{tuned['params']}"
    env = perf_db(fin.folder, row)
    (best,) = fin.compiled("find", question, env=env)
    assert best["params"] == tuned["params"]
    assert all(kernel in all_kernels[0]["kernel_objects"] for kernel in best["kernel_objects"])
    (again,) = fin.evaluated("find", question, [best], env=env)
    assert (again["params"], again["time"]) == (tuned["params"], tuned["time"])
    assert again["kernel_objects"] == best["kernel_objects"]


def test_invalid_params_in_the_perf_db_are_passed_over(fin: Fin) -> None:
    row = "2x64x28x20x1x3x3x1x32x16x1x1x0x1x1x0x1x1x0x0x1xNCHWxFP32xF=ConvAsm3x3U:9,9"
    question = job(solvers=["ConvAsm3x3U"])
    assert fin.compiled("find", question, env=perf_db(fin.folder, row)) == fin.compiled(
        "find", question
    )


def test_evaluation_fills_every_field(fin: Fin) -> None:
    config = {"cmd": "convfp16", "direction": "W"}
    entries = succeeded(fin.compiled("find", job(config=config)))
    results = fin.evaluated("find", job(config=config), entries)
    assert [result["solver_name"] for result in results] == [
        entry["solver_name"] for entry in entries
    ]
    for result, entry in zip(results, entries, strict=True):
        assert result["evaluated"] is True
        assert (result["layout"], result["data_type"], result["direction"], result["bias"]) == (
            "NCHW",
            0,
            2,
            0,
        )
        assert isinstance(result["time"], float)
        assert result["time"] > 0
        assert all(
            result[key] == entry[key]
            for key in ("params", "workspace", "tunable", "kernel_objects")
        )


def test_only_the_first_tunable_solver_of_a_call_is_tuned(fin: Fin) -> None:
    entries = succeeded(fin.compiled("perf", job()))
    results = fin.evaluated("perf", job(), entries)
    tunable = [result for result in results if BY_NAME[result["solver_name"]].tunable]
    assert [result["reason"] for result in tunable] == [
        "Success",
        *["Invoker not implemented"] * (len(tunable) - 1),
    ]
    assert [result["evaluated"] for result in tunable] == [True, *[False] * (len(tunable) - 1)]
    assert all(result["reason"] == "Success" for result in results if result not in tunable)


def test_the_backend_decides_which_steps_there_are(fin: Fin) -> None:
    entries = succeeded(fin.compiled("find", job(), backend="HIPNOGPU"))
    evaluation = job("alloc_buf", "miopen_find_eval", miopen_find_compile_result=entries)
    assert fin.answer(evaluation, backend="HIP")["miopen_find_eval_result"]
    assert fin.code(evaluation, backend="HIPNOGPU")[0] == ABORTED
    assert fin.code(job("alloc_buf"), backend="HIPNOGPU")[0] == ABORTED
    assert fin.code(job("miopen_perf_compile"), backend="HIP")[0] == ABORTED
    for backend in ("HIP", "HIPNOGPU"):
        assert fin.answer(job("applicability"), backend=backend)["applicable_solvers"]


def test_evaluation_needs_buffers_and_a_device(fin: Fin) -> None:
    evaluation = job("alloc_buf", "miopen_find_eval", miopen_find_compile_result=[])
    assert fin.code({**evaluation, "steps": ["miopen_find_eval"]})[0] == ABORTED
    assert fin.code(evaluation, gpus=0)[0] == ABORTED
    assert fin.code(evaluation, gpus=2, env={"HIP_VISIBLE_DEVICES": "2"})[0] == ABORTED
    assert fin.code(evaluation, gpus=2, env={"HIP_VISIBLE_DEVICES": "1"})[0] == 0


def test_equal_calls_give_equal_bytes(fin: Fin) -> None:
    jobs = [
        job("applicability", "miopen_find_compile"),
        job("miopen_perf_compile", solvers=["ConvAsm3x3U"]),
    ]
    texts = []
    for seed in ("1", "2"):
        fin.answers(*jobs, env={"PYTHONHASHSEED": seed})
        texts.append(fin.target.read_text().replace(f"PYTHONHASHSEED={seed}", ""))
    assert texts[0] == texts[1]


def test_fin_wipes_the_cache_and_leaves_everything_else(fin: Fin) -> None:
    (fin.cache / "old").mkdir(parents=True)
    (fin.cache / "old" / "kernel").touch()
    fin.answer(job("applicability"))
    assert (fin.cache / "old" / "kernel").exists()
    fin.compiled("find", job(solvers=["ConvAsm3x3U"]))
    assert not (fin.cache / "old").exists()
    assert (fin.folder / "in.json").exists()
