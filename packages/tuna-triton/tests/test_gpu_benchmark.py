"""The benchmark for machines with a GPU, beside the stand-in of its driver."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import cuda_double
import pytest
from cuda_double.stand_in import install, variables

from benchmarks import gpu_run, gpu_smoke
from benchmarks.gpu_run import GRACE_S, Part
from benchmarks.gpu_smoke import fewest, launched, limits_of

ROOT = Path(__file__).resolve().parents[3]
STAGES = [
    ["--stage", "smoke", "--candidates", "2"],
    ["--stage", "faults"],
    ["--stage", "cold", "--candidates", "2"],
    ["--stage", "shape", "--tokens", "1,64", "--candidates", "2"],
]


@pytest.mark.parametrize("needed", [[], ["c"], ["a", "g"], [*"abcdefg"]])
def test_the_fewest_things_that_are_needed_are_found(needed: Sequence[str]) -> None:
    tries = []

    def works(things: list[str]) -> bool:
        tries.append(things)
        return set(needed) <= set(things)

    assert fewest(works, "abcdefg", time.monotonic() + 60) == list(needed)
    assert len(tries) < 25
    assert fewest(works, "xyz", time.monotonic() + 60) == (None if needed else [])


@pytest.mark.service
@pytest.mark.drill(only=True)
@pytest.mark.parametrize("needs", ["socket", "a file"])
def test_what_a_driver_lacks_in_the_box_is_named(
    needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(install(tmp_path / "driver")).items():
        monkeypatch.setenv(name, value)
    path, work = Path("/var/tmp", f"tuna-{tmp_path.name}"), tmp_path / "work"
    work.mkdir()
    (work / "candidate").write_bytes(cuda_double.product(16, 16, 16).to_bytes())
    (tmp_path / "driver" / "needs").write_text("socket" if needs == "socket" else str(path))
    request = {
        **{"artifact": str(work / "candidate"), "by": "driver", "limits": limits_of(work)},
        "config": {"kind": "gemm", "m": 16, "n": 16, "k": 16, "data_type": "FP16"},
    }
    path.touch()
    try:
        assert "cuInit: CUDA_ERROR_OPERATING_SYSTEM" in launched(request, work)["failed"]
        notes = gpu_smoke.why_boxed_fails(request, work)
    finally:
        path.unlink()
    if needs == "socket":
        assert notes[-1] == "seccomp: it works if these calls are allowed: ['socket']"
    else:
        assert notes[-1] == f"Landlock: it works if these are open: ['{path}']"


@pytest.mark.service
@pytest.mark.drill(only=True)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES, ids=[stage[1] for stage in STAGES])
def test_each_stage_runs_beside_the_stand_in(stage: Sequence[str], tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs the extra `triton`")
    files = ["--out", str(tmp_path / "out"), "--home", str(tmp_path / "home")]
    command = [sys.executable, "-m", "benchmarks.gpu", *stage, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert all(line["figures"]["stand_in"] == 1 for line in lines)
    wanted = ["exhaustive", "search", "again", "versus"] if stage[1] == "shape" else [stage[1]]
    assert [line["stage"] for line in lines] == wanted


@pytest.mark.service
@pytest.mark.drill(only=True)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", gpu_run.RUNS)
def test_a_whole_run_goes_through_all_its_stages_beside_doubles(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs the extra `triton`")
    monkeypatch.setenv("PYTHONPATH", str(Path(cuda_double.__file__).with_name("rivals")))
    words = ["--run", str(number), "--out", str(tmp_path), "--candidates", "2"]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / f"run-{number}.json").read_text())
    assert document["seconds"] < document["limit_s"]
    assert list(document["stages"]) == [part.name for part in gpu_run.RUNS[number]]
    last = "helion" if number == 1 else "autotune"
    assert document["stages"][last]["figures"]["winner_share"] > 0
    kept = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert last in [line["run"] for line in kept if "run" in line]


#: A stage of a run: does what its first word says, and would add a line with its figures.
_STAGE = """
import json, os, signal, subprocess, sys, time
what, out = sys.argv[1], sys.argv[sys.argv.index("--out") + 1]
print("begun", what)
if what == "raises":
    raise SystemExit("a planted fault")
if what == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "hangs":
    helper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", helper], start_new_session=True)
    time.sleep(600)
figures = {"right": 0.0 if what == "slips" else 1.0}
line = {"stage": what, "figures": figures, "budget": {"right": 1.0}, "limits": {}}
with open(out, "a") as file:
    file.write(json.dumps({**line, "left_out": ["half of it"] if what == "partial" else []}))
"""


def _run(folder: Path, *parts: Part, seconds: float = 600) -> dict[str, object]:
    """A run of such stages, in a process of its own as a run is, for it adopts orphans."""
    (folder / "stage.py").write_text(_STAGE)
    words = [[part.name, list(part.words), part.most_s, part.least_s] for part in parts]
    program = (
        "import json, sys; from pathlib import Path; from benchmarks.gpu_run import Part, run;"
        "parts = [Part(*one) for one in json.loads(sys.argv[1])]; folder = Path(sys.argv[2]);"
        "run(7, parts, seconds=float(sys.argv[3]), folder=folder, stand_in=True,"
        " command=[sys.executable, str(folder / 'stage.py')])"
    )
    command = [sys.executable, "-c", program, json.dumps(words), str(folder), str(seconds)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    document: dict[str, object] = json.loads((folder / "run-7.json").read_text())
    return document


@pytest.mark.service
def test_a_fault_of_a_stage_costs_that_stage_alone(tmp_path: Path) -> None:
    names = ("works", "raises", "dies", "slips", "partial", "last")
    document = _run(tmp_path, *(Part(name, [name], 60, 1) for name in names))
    stages = document["stages"]
    assert isinstance(stages, dict)
    right = [name for name in names if stages[name]["ok"]]
    assert right == ["works", "partial", "last"]
    assert "a planted fault" in stages["raises"]["failed"]
    assert "ended with code -9" in stages["dies"]["failed"]
    assert stages["slips"]["missed"] == ["right"]
    assert document["left_out"] == ["partial: half of it"]
    assert not document["ok"]


@pytest.mark.service
def test_a_stage_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    part = Part("hangs", ["hangs"], 2 - GRACE_S, 0)  # ended after two seconds
    document = _run(tmp_path, part, Part("last", ["last"], 60, 1))
    stages = document["stages"]
    assert isinstance(stages, dict)
    assert stages["hangs"]["failed"].startswith("killed after")
    assert stages["last"]["ok"]


@pytest.mark.service
def test_what_does_not_fit_into_a_run_is_left_out_by_name(tmp_path: Path) -> None:
    document = _run(tmp_path, Part("long", ["long"], 60, 1e4), Part("short", ["short"], None, 1))
    (left_out,) = document["left_out"]  # type: ignore[misc]
    assert left_out.startswith("long: ")
    assert list(document["stages"]) == ["short"]  # type: ignore[call-overload]


@pytest.mark.parametrize("number", gpu_run.RUNS)
def test_the_stages_of_a_run_fit_into_its_time(number: int) -> None:
    parts = gpu_run.RUNS[number]
    assert gpu_run.RUN_S <= 420
    for place, part in enumerate(parts):  # each, though all before it take as long as they may
        before = sum((one.most_s or one.least_s) + GRACE_S for one in parts[:place])
        assert before + part.least_s + GRACE_S < gpu_run.RUN_S
