"""Proposals are decided by the seed, in every process; what a trial holds is what TVM's own
database takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shared_data import needed_program
from tvm_bench import Bench
from tvm_layers import conv, gemm

from tuna.libraries.steps import command_line
from tuna.libraries.tvm.schedules import import_intrinsics
from tuna.vocabulary import Cause

pytestmark = [pytest.mark.keeps_processes, pytest.mark.usefixtures("forked_children")]

NCHW = "TvmConvDirectNCHW"


def test_the_same_seed_gives_the_same_candidates_and_code_in_another_process(
    new_bench: Callable[[], Bench], bench: Bench
) -> None:
    one, two = (b.compile(conv(), NCHW) for b in (bench, new_bench()))
    assert [trial.params for trial in one.trials] == [trial.params for trial in two.trials]
    assert [trial.artifact for trial in one.trials] == [trial.artifact for trial in two.trials]
    assert one.workload == two.workload
    assert len({trial.params for trial in one.trials}) == 2


def test_another_seed_gives_other_candidates_as_many_as_were_asked_for(bench: Bench) -> None:
    one = bench.compile(conv(), NCHW, seed=1, candidates=1)
    two = bench.compile(conv(), NCHW, seed=2**62 + 12345, candidates=3)
    assert {trial.params for trial in one.trials}.isdisjoint(trial.params for trial in two.trials)
    assert [trial.index for trial in two.trials] == [0, 1, 2]


def test_a_layer_that_tvm_refuses_is_a_failed_build_and_the_worker_lives_on(bench: Bench) -> None:
    refused = bench.run(
        bench.item(conv(group_count=2), "TvmConvNCHWc").model_copy(
            update={"solver": "NoSuchSolver"}
        )
    )
    assert (refused.ok, refused.cause) == (False, Cause.BUILD_ERROR)
    assert "NoSuchSolver" in refused.output_tail
    assert bench.compile(conv(), NCHW, candidates=1).ok


#: Plain TVM: commit every trial to a database of TVM's, reopen it, and ask for the best.
DATABASE = """
import json, sys
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target
workload, trials = json.loads(sys.argv[1])
target = Target({"kind": "llvm"})
database = ms.database.JSONDatabase(work_dir=sys.argv[2])
kept = database.commit_workload(ms.database.Workload.from_json(workload).mod)
for number, params in enumerate(trials):
    record = ms.database.TuningRecord.from_json(params, kept)
    seconds = [1.0 / (number + 1)]
    parts = (record.trace, kept, seconds, record.target, record.args_info)
    database.commit_tuning_record(ms.database.TuningRecord(*parts))
again = ms.database.JSONDatabase(work_dir=sys.argv[2])
best = again.query_tuning_record(kept.mod, target, "main")
count, same = len(list(again.get_all_tuning_records())), str(best.trace) == str(record.trace)
print(json.dumps([count, float(best.run_secs[0]), same]))
"""


def test_tvm_takes_the_params_and_the_workload_into_its_own_database(
    bench: Bench, tmp_path: Path
) -> None:
    built = bench.compile(conv(), NCHW)
    assert built.workload is not None
    workload = json.loads(bench.context.artifacts.get(built.workload))
    arguments = json.dumps([workload, [json.loads(trial.params or "") for trial in built.trials]])
    command = [sys.executable, "-c", DATABASE, arguments, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [2, 0.5, True]


FAST = """
import sys, tvm
from tuna.libraries.tvm.schedules import import_intrinsics
done = import_intrinsics()
print(done, "tvm.s_tir.tensor_intrin.cuda" in sys.modules, tvm.s_tir.tensor_intrin.x86.__name__)
"""


def test_the_intrinsics_of_other_devices_are_not_imported(tvm_here: None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAST], capture_output=True, text=True, timeout=120, check=True
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the expected answer is x86's")
    assert done.stdout == "True False tvm.s_tir.tensor_intrin.x86\n"


def test_a_second_import_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm.s_tir.tensor_intrin", pytest)
    assert import_intrinsics() is False


PROPOSE = """
import json, sys
from tuna.libraries import building
from tuna.libraries.tvm.schedules import import_intrinsics
if sys.argv[2] == "plain": print(import_intrinsics("no_such_machine"))
else: print(import_intrinsics())
job = json.loads(sys.argv[1])
print(json.dumps(building.propose("tuna.libraries.tvm.kernel_child:TvmBuilder", job)["params"]))
"""


@pytest.mark.drill(only=True)  # 23 s of CPU
def test_the_fast_and_the_plain_import_propose_the_same(tvm_here: None) -> None:
    target = json.dumps({"kind": "llvm", "num-cores": 1})
    job = json.dumps(
        {"config": conv().to_json(), "solver": NCHW, "target": target, "seed": 3, "count": 4}
    )
    answers = []
    for way in ("fast", "plain"):
        command = [sys.executable, "-c", PROPOSE, job, way]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
        answers.append(done.stdout.splitlines())
    assert [answer[0] for answer in answers] == ["True", "False"]
    assert answers[0][1] == answers[1][1]


@pytest.mark.parametrize(("config", "solver"), [(conv(), NCHW), (gemm(), "TvmGemmTile")])
def test_candidates_for_another_architecture_are_its_code(
    new_bench: Callable[[], Bench], config: object, solver: str
) -> None:
    needed_program("aarch64-linux-gnu-g++")
    bench = new_bench()
    bench.target = json.dumps({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 4})
    result = bench.compile(config, solver)  # type: ignore[arg-type]
    assert result.ok, result.output_tail
    assert f"--target '{bench.target}'" in command_line(bench.library, bench.item(config, solver))  # type: ignore[arg-type]
    for trial in result.trials:
        code = bench.context.artifacts.get(trial.artifact or "")
        assert (code[:4], code[18:20]) == (b"\x7fELF", b"\xb7\x00"), "e_machine 183: AArch64"
