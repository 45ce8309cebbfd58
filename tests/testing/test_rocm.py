"""The fake ROCm installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fin_calls import job, record
from fin_double import rocm


def test_the_tree_works_without_any_environment(tmp_path: Path) -> None:
    applies = record(tmp_path / "recordings", "gfx90a", 104, job()["config"], ["ConvAsm3x3U"])
    variables = rocm.install(
        *(tmp_path / "ro cm's", "gfx90a", 104),
        options={"gpus": 2},
        recordings=Path(applies["TUNA_FIN_RECORDINGS"]),
    )
    assert variables.keys() == {"TUNA_ROCM_PATH", "TUNA_FIN", "TUNA_SIMULATED"}
    root = Path(variables["TUNA_ROCM_PATH"])
    (tmp_path / "in").write_text(json.dumps([job("applicability", arch="gfx90a", num_cu=104)]))
    command = [variables["TUNA_FIN"], "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    subprocess.run(command, env={}, check=True, capture_output=True)
    assert json.loads((tmp_path / "out").read_text())[1]["applicable_solvers"] == ["ConvAsm3x3U"]
    assert (root / ".info" / "version").read_text() == "6.2.0-66\n"
    header = (root / "include" / "miopen" / "version.h").read_text()
    for line in ("MAJOR 3", "MINOR 3", "PATCH 0", "TWEAK 2d1fd997"):
        assert f"#define MIOPEN_VERSION_{line}\n" in header


@pytest.mark.parametrize(
    ("arch", "target"), [("gfx908", ":sramecc+:xnack-"), ("gfx1030", ""), ("gfx900", ":xnack-")]
)
@pytest.mark.parametrize("gpus", [0, 2])
def test_rocminfo_lists_the_devices(tmp_path: Path, arch: str, target: str, gpus: int) -> None:
    root = rocm.install(tmp_path, arch, 36, gpus=gpus)["TUNA_ROCM_PATH"]
    text = subprocess.run(
        [f"{root}/bin/rocminfo"], env={}, check=True, capture_output=True, text=True
    ).stdout
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines.count(f"  Name:                    {arch}") == gpus
    assert lines.count("  Compute Unit:            36") == gpus
    assert lines.count(f"      Name:                    amdgcn-amd-amdhsa--{arch}{target}") == gpus
    assert lines.count("  Device Type:             CPU") == 1
    assert sum("Marketing Name" in line for line in lines) == gpus + 1


def test_the_command_prints_what_a_shell_can_eval(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fin_double.rocm",
        str(tmp_path / "a b"),
        "--options",
        '{"sleep_s": 0}',
    ]
    script = f'eval "$({" ".join(map(repr, command))})"; "$TUNA_FIN" -h; echo "$TUNA_ROCM_PATH"'
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(rocm.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith(f"{tmp_path / 'a b'}\n")
    assert "test double" in done.stderr


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such options"):
        rocm.install(tmp_path, options={"crash": True})
