"""The page for vLLM's users (docs/gpu.md): its commands as they stand there, beside the stand-in of
NVIDIA's driver, with small numbers in the place of large ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_double.stand_in import install, variables

pytest.importorskip("triton", reason="needs the extra `triton`")

ROOT, PACKAGE = Path(__file__).parents[3], Path(__file__).parents[1]
SMALL = {
    "1 2 4 8 16 24 32 48 64 96 128 256 512 1024 1536 2048 3072 4096": "2 48",
    '"experts": 128': '"experts": 4',
    '"intermediate": 768': '"intermediate": 128',
    '"hidden": 2048': '"hidden": 128',
    '"topk": 8': '"topk": 2',
    "-t mymodel -o out": "-t mymodel -o out --candidates 2",
}


def commands() -> list[str]:
    """The blocks of the page's first section that one types, made small."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    section = page.split("## From vLLM's warning to a folder of tiles\n")[1].split("\n## ")[0]
    blocks = [
        "".join(line[4:] for line in one.splitlines(keepends=True))
        for one in re.findall(r"(?<=\n\n)((?: {4}.*\n)+)", section)
    ]
    warning, *typed = blocks
    assert warning.startswith("WARNING")
    for large, small in SMALL.items():
        assert sum(one.count(large) for one in typed) == 1, large
        typed = [one.replace(large, small) for one in typed]
    return typed


def test_what_a_user_of_vllm_types_ends_in_a_folder_that_it_loads(
    home: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "vllm").write_text('#!/bin/sh\necho "$@"; ls "$VLLM_TUNED_CONFIG_FOLDER"\n')
    (programs / "vllm").chmod(0o755)
    # a package of this name, which nobody may import, with our kernel under the name of its own
    package = tmp_path / "packages" / "vllm"
    file = package / "model_executor" / "layers" / "fused_moe" / "fused_moe.py"
    file.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    ours = (PACKAGE / "tuna_triton" / "own_kernels.py").read_text()
    file.write_text(ours.replace("def moe(", "def fused_moe_kernel("))
    stand_in = variables(install(tmp_path / "driver"))
    paths = [stand_in["PYTHONPATH"], str(package.parent)]
    environment = {
        **os.environ,
        **stand_in,
        "PATH": os.pathsep.join(
            [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "PYTHONPATH": os.pathsep.join(paths),
        "TUNA_HOME": str(home),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands())],  # noqa: S607
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    device = "device_name=NVIDIA_Fake_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128,128]"
    name = f"E=4,N=128,{device}.json"
    assert done.stdout.endswith(f"no faults\nserve mymodel\n{name}\nprovenance.json\n")
    facts = json.loads((tmp_path / "out/sm_9084.vllm-moe/provenance.json").read_text())
    keys = facts["files"][name]["keys"]
    measured = {key: origin for key, origin in keys.items() if "solver" in origin}
    assert measured.keys() == {"2", "48"}
    for origin in measured.values():
        assert origin["solver"] == "VllmMoe"
        tuned = origin["tile"] == "tuned"
        times = origin["best"], origin["default"]
        assert not tuned or times[1]["time_ms"] >= 1.03 * times[0]["time_ms"]
        close = times[1]["time_ms"] <= 1.3 * times[0]["time_ms"]
        finals = {one["final_job_id"] for one in times}
        assert not (tuned and close) or (len(finals) == 1 and None not in finals)
