"""What fin is asked and what becomes of its answers, against exchanges recorded from real fins."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shared_data import shared_data

from tuna.artifacts.store import Artifacts
from tuna.configs import ConvConfig, from_json, parse_line, problem
from tuna.configs.conv import COMMANDS
from tuna.libraries.miopen import fin_protocol, kernel_objects
from tuna.libraries.miopen.fin_protocol import BadAnswer
from tuna.libraries.miopen.kernel_objects import BadKernel
from tuna.vocabulary import Cause, canonical_name

_TYPES = {command: data_type.value for data_type, command in COMMANDS.items()}


def recorded(pattern: str) -> list[Path]:
    """The recordings whose names match."""
    return sorted(shared_data("fin").glob(pattern))


def config_of(found: dict[str, Any]) -> ConvConfig:
    """The config in a recorded request."""
    fields = {
        name: value
        for name, value in found.items()
        if name not in ("cmd", "wei_layout", "id", "valid", "driver")
    }
    config = from_json(
        {
            "kind": "convolution",
            "data_type": _TYPES[found["cmd"]],
            "fil_layout": found["wei_layout"],
            **fields,
        }
    )
    assert isinstance(config, ConvConfig)
    return config


def exchanges() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Request and answer of every recorded compile job of a real fin."""
    for path in recorded("real_find_compile_*.in.json"):
        jobs = json.loads(path.read_text())
        found = json.loads(path.with_name(path.name.replace(".in.", ".out.")).read_text())[1:]
        yield from zip(jobs, found, strict=True)


def test_a_config_is_put_as_in_the_recorded_requests() -> None:
    count = 0
    for job, _ in exchanges():
        assert fin_protocol.config_fields(config_of(job["config"])) == job["config"]
        count += 1
    assert count >= 6


def test_a_whole_request_is_what_mituna_sends() -> None:
    (job,) = json.loads(shared_data("fin", "fin_input_find_compile-1.json").read_text())
    ours = fin_protocol.job(
        "miopen_find_compile", config_of(job["config"]), "gfx908", 120, job["solvers"]
    )
    for part in ("steps", "arch", "num_cu", "direction", "dynamic_only", "solvers"):
        assert ours[part] == job[part], part
    assert {name: job["config"][name] for name in ours["config"]} == ours["config"]


def test_an_eval_request_brings_what_was_compiled() -> None:
    (job,) = json.loads(shared_data("fin", "fin_input_find_eval.json").read_text())
    ours = fin_protocol.job(
        "miopen_find_eval", config_of(job["config"]), "gfx906", 60, job["solvers"], ["made"]
    )
    assert ours["steps"] == ["alloc_buf", "fill_buf", "miopen_find_eval"]
    assert ours["miopen_find_compile_result"] == ["made"]
    assert ours["arch"] == job["arch"]


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("gfx900", "gfx900:xnack-"),
        ("gfx908", "gfx908:sram-ecc+:xnack-"),
        ("gfx90a", "gfx90a:sram-ecc+:xnack-"),
        ("gfx1030", "gfx1030"),
        ("gfx1201", "gfx1201"),
        ("gfx950", "gfx950:sram-ecc+:xnack-"),
    ],
)
def test_target_ids(arch: str, target: str) -> None:
    assert fin_protocol.target_id(arch) == target


def test_our_key_of_a_problem_is_fins() -> None:
    for job, answer in exchanges():
        fin_protocol.check_problem(answer, config_of(job["config"]))
        assert answer["db_key"] == problem.text_of(config_of(job["config"]))


def test_an_answer_about_another_problem_is_refused() -> None:
    job, answer = next(exchanges())
    with pytest.raises(BadAnswer) as failure:
        fin_protocol.check_problem(
            {**answer, "db_key": "1-" + answer["db_key"]}, config_of(job["config"])
        )
    assert failure.value.cause is Cause.INFRA


def test_the_solvers_of_a_real_fin() -> None:
    answer = json.loads(shared_data("fin", "real_get_solvers.out.json").read_text())[1]
    found = fin_protocol.solvers(answer)
    assert len(found) == 114
    assert [solver.kinds for solver in found].count(("convolution",)) == 104
    assert sum(solver.tunable for solver in found) == 54
    assert {solver.name: solver.number for solver in found}["ConvAsm3x3U"] == 1


def test_the_algorithm_of_every_solver_is_told_from_its_name() -> None:
    seen: dict[str, str] = {}
    for _, answer in exchanges():
        for entry in answer["miopen_find_compile_result"]:
            seen[entry["solver_name"]] = entry["algorithm"].partition("Algo")[2]
    assert len(seen) == 104
    assert {name: fin_protocol.algorithm_family(name) for name in seen} == seen


def test_names_with_commas_are_those_with_hyphens() -> None:
    assert canonical_name("ConvWinograd3x3MultipassWrW<3, 4>") == "ConvWinograd3x3MultipassWrW<3-4>"


def every_kernel_object(found: Any) -> Iterator[dict[str, Any]]:
    """Every kernel object anywhere in a document."""
    if isinstance(found, dict):
        if "comp_options" in found:
            yield found
        for value in found.values():
            yield from every_kernel_object(value)
    elif isinstance(found, list):
        for value in found:
            yield from every_kernel_object(value)


def test_real_blobs_are_unpacked_and_their_checks_hold() -> None:
    count = 0
    for path in recorded("fin_*.json"):
        for found in every_kernel_object(json.loads(path.read_text())):
            if len(found["blob"]) < 1000 or "trimmed" in path.name:
                continue
            code = kernel_objects.decode(found)
            assert len(code) == found["uncompressed_size"]
            again = kernel_objects.encode(found["kernel_file"], found["comp_options"], code)
            assert kernel_objects.decode(again) == code
            count += 1
    assert count


@pytest.fixture
def real_kernel() -> dict[str, Any]:
    """A real kernel object with its blob."""
    document = json.loads(shared_data("fin", "fin_input_find_eval.json").read_text())
    return next(every_kernel_object(document))


def test_the_url_alphabet_and_dots_for_padding_are_read(real_kernel: dict[str, Any]) -> None:
    blob = real_kernel["blob"].replace("+", "-").replace("/", "_").replace("=", ".")
    assert kernel_objects.decode({**real_kernel, "blob": blob}) == kernel_objects.decode(
        real_kernel
    )


def test_a_blob_cut_in_the_middle_is_refused(real_kernel: dict[str, Any]) -> None:
    for length in range(0, len(real_kernel["blob"]) - 8, 997):
        with pytest.raises(BadKernel):
            kernel_objects.decode({**real_kernel, "blob": real_kernel["blob"][:length]})


def test_what_fin_repeats_is_stored_once(real_kernel: dict[str, Any], tmp_path: Path) -> None:
    store = Artifacts(tmp_path.as_uri(), tmp_path / "cache")
    other = {**real_kernel, "comp_options": "-O0"}
    kept = kernel_objects.store([real_kernel] * 60 + [other], store)
    assert [code.args for code in kept] == [real_kernel["comp_options"], "-O0"]
    assert len({code.artifact for code in kept}) == 1


STEP = "miopen_find_eval"
GOOD: dict[str, Any] = {
    "solver_name": "A",
    "algorithm": "miopenConvolutionFwdAlgoDirect",
    "evaluated": True,
    "reason": "Success",
    "params": "1,2",
    "time": 0.5,
    "workspace": 8,
}


def eval_answer(entry: dict[str, Any]) -> dict[str, Any]:
    return {"miopen_find_eval_result": [entry]}


def test_a_good_measurement() -> None:
    found = fin_protocol.measured(eval_answer(GOOD), STEP, "A")
    assert (found.time_ms, found.params, found.workspace) == (0.5, "1,2", 8)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"evaluated": False}, Cause.RUN_ERROR),
        ({"reason": "Invoker returned time = 0", "time": 0.0}, Cause.RUN_ERROR),
        ({"reason": "Invoker not implemented", "evaluated": False}, Cause.RUN_ERROR),
        ({"reason": "Not Applicable", "evaluated": False}, Cause.NOT_APPLICABLE),
        ({"reason": None}, Cause.RUN_ERROR),
        ({"reson": "negative", "time": -1.0}, Cause.RUN_ERROR),
        ({"solver_name": "Nobody"}, Cause.RUN_ERROR),
    ],
)
def test_what_is_no_measurement_has_a_cause(change: dict[str, Any], cause: Cause) -> None:
    with pytest.raises(BadAnswer) as failure:
        fin_protocol.measured(eval_answer({**GOOD, **change}), STEP, "A")
    assert failure.value.cause is cause
    assert str(failure.value)


def test_a_missing_reason_or_result_is_a_failure() -> None:
    entry = copy.deepcopy(GOOD)
    del entry["reason"]
    for answer in (
        eval_answer(entry),
        {},
        {"miopen_find_eval_result": None},
        {"miopen_find_eval_result": ["A"]},
    ):
        with pytest.raises(BadAnswer):
            fin_protocol.measured(answer, STEP, "A")


def test_the_old_and_the_new_real_eval_answers_are_read() -> None:
    for name, step, solver in (
        ("fin_output_find_eval.json", "miopen_find_eval", "ConvAsm1x1UV2"),
        ("fin_output_perf_eval.trimmed.json", "miopen_perf_eval", "ConvHipImplicitGemmV4R1Fwd"),
    ):
        answer = json.loads(shared_data("fin", name).read_text())[1]
        found = fin_protocol.measured(answer, step, solver)
        assert found.time_ms > 1
        assert "," in found.params


def test_batch_norm_is_put_with_the_names_that_fin_reads() -> None:
    (config,) = parse_line(
        "MIOpenDriver bnormfp16 -n 32 -c 64 -H 54 -W 54 -m 1 --forw 1 -b 0 -s 1 -r 1"
    )
    fields = fin_protocol.config_fields(config)  # type: ignore[arg-type]
    expected = {
        "cmd": "bnormfp16",
        "batchsize": 32,
        "in_channels": 64,
        "in_h": 54,
        "in_w": 54,
        "in_d": 1,
        "mode": 1,
    }
    expected |= {
        "save": 1,
        "run": 1,
        "forw": 1,
        "back": 0,
        "direction": "F",
        "in_layout": "NCHW",
        "out_layout": "NCHW",
    }
    assert {name: fields[name] for name in expected} == expected
    (job,) = fin_protocol.applicability([config], "gfx908", 120)  # type: ignore[list-item]
    assert job["direction"] == 1
