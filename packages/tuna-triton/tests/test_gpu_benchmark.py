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

from benchmarks import gpu_smoke
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
    assert all(line["stand_in"] == 1 for line in lines)
    wanted = ["exhaustive", "search", "again", "versus"] if stage[1] == "shape" else [stage[1]]
    assert [line["stage"] for line in lines] == wanted
