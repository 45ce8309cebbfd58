"""Replay of recorded calls: the fin double answers like a real fin, as far as possible without
compiling.

Not replayed, because fin of October 2024 does not run them or has changed the format:
`fin_input.json` and `fin_output.json` (2020: no direction, no layouts, pairs for solvers, texts for
times), `fin_input_find_compile2`, `fin_input_find_kernel`, `fin_input_perf_compile`,
`fin_*_perf_eval.trimmed`, `fin_output_perf_compile.trimmed`, `tests_fin_input_*` (no direction in
the config, `solver_id` for `solver_name`, batch norm in NHWC), and those with the step
`perf_db_test`, which the double does not have.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fin_double import __path__ as double_path
from fin_double.fin_problem import Problem
from shared_data import shared_data

from tuna.configs import problem_key
from tuna.configs.conv import COMMANDS, ConvConfig

RECORDED = [
    *(
        "real_find_compile_gfx906_solvers",
        "real_find_compile_gfx90a_solvers",
        "real_find_compile_gfx942_bf16_g4",
    ),
    *(
        "real_find_compile_gfx942_bwd",
        "real_find_compile_gfx942_fp16_nhwc",
        "real_find_compile_gfx942_fwd",
    ),
]
#: Recorded with an older fin of the same format, whose network_config lacks the suffix `xDefault`.
SAMPLES = ["fin_output_applicability", "fin_output_find_compile-1", "fin_output_find_compile-2"]
DEAD = [
    *("fin_input", "fin_input_find_compile2", "fin_input_find_kernel", "fin_input_perf_compile"),
    *(
        "fin_input_perf_eval.trimmed",
        "tests_fin_input_find_compile",
        "tests_fin_input_find_compile2",
    ),
]


class Fin:
    """The fin double in a private directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.target = folder, folder / "in.json", folder / "out.json"

    def code(self, *jobs: dict[str, Any], env: dict[str, str] | None = None) -> tuple[int, str]:
        """Run fin; returns exit code and stderr."""
        self.source.write_text(json.dumps(jobs))
        command = [sys.executable, "-S", "-E", double_path[0], "-i", self.source, "-o", self.target]
        environment = {"MIOPEN_CUSTOM_CACHE_DIR": str(self.folder / "cache"), **(env or {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    def answers(
        self, *jobs: dict[str, Any], env: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """fin's answer to each job."""
        code, errors = self.code(*jobs, env=env)
        assert code == 0, errors
        first, *rest = json.loads(self.target.read_text())
        assert list(first) == ["process_env"]
        return rest

    def answer(self, job: dict[str, Any], env: dict[str, str] | None = None) -> dict[str, Any]:
        """fin's answer to one job."""
        (only,) = self.answers(job, env=env)
        return only


@pytest.fixture
def fin(tmp_path: Path) -> Fin:
    return Fin(tmp_path)


def succeeded(entries: list[Any]) -> list[Any]:
    """The entries with the reason Success."""
    return [entry for entry in entries if entry.get("reason") == "Success"]


def code_of(kernel: dict[str, Any]) -> bytes:
    """A kernel object's code, verified against its MD5 and size."""
    code = bz2.decompress(base64.b64decode(kernel["blob"], validate=True))
    assert len(code) == kernel["uncompressed_size"]
    assert hashlib.md5(code, usedforsecurity=False).hexdigest() == kernel["md5_sum"]
    return code


def record(
    folder: Path, arch: str, num_cu: int, config: dict[str, Any], solvers: list[str]
) -> dict[str, str]:
    """Make the double answer `solvers` for a config; returns the environment variable for it."""
    folder.mkdir(exist_ok=True)
    line = json.dumps({"applicable_solvers": solvers, "input": {"config": config}})
    with gzip.open(
        folder / f"real_applicability_{arch.partition(':')[0]}_{num_cu}.jsonl.gz", "wt"
    ) as file:
        file.write(line + "\n")
    return {"TUNA_FIN_RECORDINGS": str(folder)}


def load(name: str) -> Any:
    return json.loads(shared_data("fin", f"{name}.json").read_text())


def shape(value: Any) -> Any:
    """Keys and types of a value; a list is represented by its first element."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value[:1]] if isinstance(value, list) else type(value)


def replay(fin: Fin, recorded: dict[str, Any]) -> dict[str, Any]:
    """The double's answer to a recorded job, with the solvers that applied then."""
    question = {key: value for key, value in recorded["input"].items() if value is not None}
    entries = recorded.get("miopen_find_compile_result", [])
    solvers = recorded.get("applicable_solvers") or [
        entry["solver_name"] for entry in succeeded(entries)
    ]
    env = record(
        fin.folder / "recordings", question["arch"], question["num_cu"], question["config"], solvers
    )
    return fin.answer(question, env=env)


def test_the_double_knows_all_solvers_in_fins_order(fin: Fin) -> None:
    recorded = load("real_get_solvers.out")[1]
    assert len(recorded["all_solvers"]) == 114
    assert fin.answer({"steps": ["get_solvers"]}) == recorded


@pytest.mark.parametrize("name", [*(f"{name}.out" for name in RECORDED), *SAMPLES])
def test_a_recorded_job_gets_the_recorded_answer(fin: Fin, name: str) -> None:
    recorded = load(name)[1]
    ours = replay(fin, recorded)
    assert ours.keys() == recorded.keys()
    if name in SAMPLES and "network_config" in recorded:
        recorded["network_config"] += "xDefault"
    for key in recorded.keys() - {"miopen_find_compile_result"}:
        assert ours[key] == recorded[key]
    theirs = recorded.get("miopen_find_compile_result", [])
    for our, their in zip(ours.get("miopen_find_compile_result", []), theirs, strict=True):
        assert shape(our) == shape(their)
        for key in our.keys() - {"kernel_objects", "params", "workspace"}:
            assert our[key] == their[key]


@pytest.mark.parametrize("name", RECORDED)
def test_the_input_files_give_the_same_as_the_echoed_input(fin: Fin, name: str) -> None:
    (question,) = load(f"{name}.in")
    assert load(f"{name}.out")[1]["input"] == question == fin.answer(question)["input"]


def test_a_recorded_evaluation_with_its_real_kernel(fin: Fin) -> None:
    recorded = load("fin_output_find_eval")[1]
    sent = recorded["input"]["miopen_find_compile_result"]
    assert code_of(sent[0]["kernel_objects"][0]).startswith(b"\x7fELF")
    env = record(
        fin.folder / "recordings", "gfx906", 60, recorded["input"]["config"], ["ConvAsm1x1UV2"]
    )
    ours = fin.answer(recorded["input"], env=env)
    (our,), (their,) = ours["miopen_find_eval_result"], recorded["miopen_find_eval_result"]
    assert ours["db_key"] == recorded["db_key"]
    assert ours.keys() == recorded.keys()
    # Fields that the sample lacks were added later.
    later = {"kernel_objects", "layout", "data_type", "direction", "bias"}
    assert our.keys() - their.keys() == later
    assert shape({key: our[key] for key in their}) == shape(their)
    for key in ("algorithm", "evaluated", "reason", "solver_name", "tunable", "workspace"):
        assert our[key] == their[key]


@pytest.mark.parametrize("device", ["gfx906_60", "gfx90a_104"])
def test_recorded_applicability_is_answered_from_the_recordings(fin: Fin, device: str) -> None:
    path = shared_data("fin", f"real_applicability_{device}.jsonl.gz")
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    answers = fin.answers(
        *(line["input"] for line in lines), env={"TUNA_FIN_RECORDINGS": str(path.parent)}
    )
    assert [answer["applicable_solvers"] for answer in answers] == [
        line["applicable_solvers"] for line in lines
    ]
    assert [answer["input"] for answer in answers] == [line["input"] for line in lines]


def test_its_keys_are_those_of_tuna() -> None:
    with gzip.open(shared_data("fin", "real_applicability_gfx906_60.jsonl.gz"), "rt") as file:
        configs = [json.loads(line)["input"]["config"] for line in file]
    names = {field.name for field in fields(ConvConfig)}
    data_types = {command: data_type for data_type, command in COMMANDS.items()}
    for config in configs:
        known = {key: value for key, value in config.items() if key in names}
        conv = ConvConfig(
            **known, fil_layout=config["wei_layout"], data_type=data_types[config["cmd"]]
        )
        key = problem_key.from_conv(conv)
        ours = Problem(config)
        assert ours.db_key() == key.text()
        perf = {field.name: getattr(key.perf(), field.name) for field in fields(key.perf())}
        words = ("layout", "data_type", "direction")
        assert ours.perf_key().split("x")[-3:] == [perf[word] for word in words]
        numbers = "spatial_dim,in_channels,in_h,in_w,in_d,fil_h,fil_w,fil_d,out_channels,batchsize"
        numbers += ",pad_h,pad_w,pad_d,conv_stride_h,conv_stride_w,conv_stride_d"
        numbers += ",dilation_h,dilation_w,dilation_d,bias,group_count"
        assert ours.perf_key().split("x")[:-3] == [str(perf[name]) for name in numbers.split(",")]


@pytest.mark.parametrize("name", DEAD)
def test_inputs_of_old_formats_abort_fin(fin: Fin, name: str) -> None:
    code, errors = fin.code(*load(name))
    assert code == -signal.SIGABRT
    assert "what()" in errors
    assert fin.target.read_bytes() == b""
