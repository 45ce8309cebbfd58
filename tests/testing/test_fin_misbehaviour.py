"""Fault injection of the fin double."""

from __future__ import annotations

import base64
import json
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fin_calls import ABORTED, KEY, Fin, code_of, job, succeeded
from fin_double.fin_cache import LOCK
from fin_double.fin_kernels import is_whole
from fin_double.fin_options import LIES, checked

#: For those who change the double; what it is recorded to answer is in test_fin_replay.py
pytestmark = pytest.mark.drill(only=True)

SOLVER = "ConvAsm3x3U"
Wait = Callable[[Callable[[], object], float], None]


def evaluate(fin: Fin, lie: str) -> dict[str, Any]:
    question = job(solvers=[SOLVER])
    entries = fin.compiled("find", question)
    (result,) = fin.evaluated("find", question, entries, lies={SOLVER: lie})
    assert isinstance(result, dict)
    return result


def test_unknown_options_are_refused() -> None:
    for wrong in ({"crash": []}, {"lies": {SOLVER: "big"}}, {"backend": "OpenCL"}):
        with pytest.raises(ValueError, match="no such options"):
            checked(wrong)


def test_a_solver_that_crashes_takes_the_whole_call_along(fin: Fin) -> None:
    code, _ = fin.code(job("miopen_find_compile"), crash_solvers=[SOLVER])
    assert code == ABORTED
    assert fin.target.read_bytes() == b""
    others = job(solvers=["GemmFwdRest"])
    entries = fin.compiled("find", others, crash_solvers=[SOLVER])
    assert succeeded(entries)
    assert fin.code(job("applicability"), crash_solvers=[SOLVER])[0] == 0


def test_a_crash_can_have_another_signal(fin: Fin) -> None:
    code, _ = fin.code(job("miopen_find_compile"), crash_solvers=[SOLVER], crash_signal=13)
    assert code == -signal.SIGPIPE


def test_a_solver_that_crashes_when_evaluated(fin: Fin) -> None:
    entries = succeeded(fin.compiled("find", job(), crash_eval=[SOLVER]))
    question = job("alloc_buf", "miopen_find_eval", miopen_find_compile_result=entries)
    assert fin.code(question, crash_eval=[SOLVER])[0] == ABORTED
    assert fin.code(question, crash_eval=["ConvAsm1x1U"])[0] == 0


def test_a_config_that_crashes_takes_its_neighbours_along(fin: Fin) -> None:
    jobs = [job("applicability"), job("applicability", config={"in_h": 30})]
    assert fin.code(*jobs, crash_configs=["64-30-20"])[0] == ABORTED
    assert fin.code(jobs[0], crash_configs=["64-30-20"])[0] == 0


@pytest.mark.parametrize("option", ["hang_solvers", "hang_eval"])
def test_a_solver_that_hangs(fin: Fin, option: str) -> None:
    entries = fin.compiled("find", job(solvers=[SOLVER]))
    evaluation = job("alloc_buf", "miopen_find_eval", miopen_find_compile_result=entries)
    question = (
        job("miopen_find_compile", solvers=[SOLVER]) if option == "hang_solvers" else evaluation
    )
    process = fin.start(question, **{option: [SOLVER]})
    assert process.stderr
    while "Processing Solver" not in process.stderr.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert fin.target.read_bytes() == b""


def test_fin_can_take_its_time(fin: Fin) -> None:
    lines = [*fin.answers(job("miopen_find_compile", solvers=[SOLVER]), sleep_s=0.01)]
    assert succeeded(lines[0]["miopen_find_compile_result"])


def test_output_that_is_cut_or_empty_with_exit_code_0(fin: Fin) -> None:
    assert fin.code(job("applicability"), truncate_output=True)[0] == 0
    with pytest.raises(json.JSONDecodeError):
        json.loads(fin.target.read_text())
    assert fin.target.read_text().startswith("[")
    assert fin.code(job("applicability"), empty_output=True)[0] == 0
    assert fin.target.read_bytes() == b""


def test_fin_logs_its_calls(fin: Fin) -> None:
    log = fin.folder / "log"
    process = fin.start(
        {"steps": ["get_solvers"]}, job("applicability", "miopen_find_compile"), log_file=str(log)
    )
    process.communicate()
    lines = [f"get_solvers -|applicability {KEY}|miopen_find_compile {KEY}".split("|")]
    assert log.read_text().splitlines() == [f"{process.pid} {line}" for line in lines[0]]


@pytest.mark.parametrize(
    ("lie", "time"), [("zero_time", 0.0), ("negative_time", -1.0), ("nan_time", None)]
)
def test_lies_about_time(fin: Fin, lie: str, time: float | None) -> None:
    result = evaluate(fin, lie)
    assert result["time"] == time
    assert result["evaluated"] is True
    assert result["reason"] == ("Invoker returned time = 0" if lie == "zero_time" else "Success")
    assert ("reson" in result) == (lie == "negative_time")


def test_lies_about_the_reason(fin: Fin) -> None:
    assert evaluate(fin, "no_reason").keys() == {"solver_name", "algorithm", "evaluated"}
    assert evaluate(fin, "no_reason")["evaluated"] is False
    misspelt = evaluate(fin, "reson")
    assert (misspelt["reson"], "reason" in misspelt) == ("Success", False)
    assert evaluate(fin, "unknown_solver")["solver_name"] == "NoSuchConvAsm3x3U"


@pytest.mark.parametrize("form", ["find", "perf"])
@pytest.mark.parametrize("lie", ["bad_md5", "bad_size", "ruined_blob"])
def test_a_kernel_that_cannot_be_loaded_has_no_reason(fin: Fin, lie: str, form: str) -> None:
    question = job(solvers=[SOLVER])
    entries = fin.compiled(form, question, lies={SOLVER: lie})
    kernel = entries[0]["kernel_objects"][0]
    with pytest.raises((AssertionError, ValueError)):
        code_of(kernel)
    assert not is_whole(kernel)
    (result,) = fin.evaluated(form, question, entries)
    assert result == {
        "solver_name": SOLVER,
        "algorithm": entries[0]["algorithm"],
        "evaluated": False,
    }


def test_a_ruined_blob_ends_at_the_first_nul_and_has_the_other_alphabet(fin: Fin) -> None:
    question = job(solvers=["ConvBinWinogradRxSf2x3g1", "ConvDirectNaiveConvFwd", "ConvAsm3x3U"])
    whole = [
        kernel for entry in fin.compiled("find", question) for kernel in entry["kernel_objects"]
    ]
    lies = dict.fromkeys(question["solvers"], "ruined_blob")
    ruins = [
        kernel
        for entry in fin.compiled("find", question, lies=lies)
        for kernel in entry["kernel_objects"]
    ]
    for good, bad in zip(whole, ruins, strict=True):
        assert len(bad["blob"]) < len(good["blob"])
        assert not {"=", "+", "/"} & set(bad["blob"])
        cut, _, rest = base64.b64decode(good["blob"]).partition(b"\0")
        assert rest
        assert base64.urlsafe_b64decode(bad["blob"].replace(".", "=")) == cut
        assert (good["md5_sum"], good["comp_options"]) == (bad["md5_sum"], bad["comp_options"])


def test_every_lie_is_told_in_perf_evaluation_too(fin: Fin) -> None:
    question = job(solvers=[SOLVER])
    entries = fin.compiled("perf", question)
    honest = fin.evaluated("perf", question, entries)
    for lie in LIES:
        assert fin.evaluated("perf", question, entries, lies={SOLVER: lie}) != honest


def test_two_processes_cannot_share_a_cache(fin: Fin, eventually: Wait) -> None:
    first = fin.start(job("miopen_find_compile", solvers=[SOLVER]), hang_solvers=[SOLVER])
    eventually(lambda: (fin.cache / "fin-double.ukdb").exists(), 20)
    second = Fin(fin.folder / "second")
    second.folder.mkdir()
    shared = {"MIOPEN_CUSTOM_CACHE_DIR": str(fin.cache)}
    code, errors = second.code(job("miopen_find_compile"), env=shared)
    assert code == ABORTED
    assert f"used by another fin, process {first.pid}" in errors
    first.kill()
    first.communicate()
    # The lock of a killed process is released.
    assert (fin.cache / LOCK).exists()
    assert second.code(job("miopen_find_compile"), env=shared)[0] == 0


@pytest.mark.parametrize("how", ["removed", "emptied"])
@pytest.mark.parametrize("solvers", [[SOLVER], [SOLVER, "GemmFwdRest"]])
def test_a_cache_that_vanishes_aborts_fin(
    fin: Fin, eventually: Wait, how: str, solvers: list[str]
) -> None:
    process = fin.start(job("miopen_find_compile", solvers=solvers), sleep_s=1.0)
    eventually(lambda: (fin.cache / "fin-double.ukdb").exists(), 20)
    eventually(lambda: _take_away(fin, how), 20)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == ABORTED
    assert "removed or emptied" in errors


def _take_away(fin: Fin, how: str) -> bool:
    try:
        shutil.rmtree(fin.cache) if how == "removed" else (fin.cache / "fin-double.ukdb").unlink()
    except OSError:
        return False
    return True
