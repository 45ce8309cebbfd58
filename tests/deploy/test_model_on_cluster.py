"""docs/operations.md, "A model on a cluster of CPUs": its commands, with workers as SLURM starts
them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from command_lines import Ended
from deploy_files import PAGE, ROOT
from private_servers import redis_server
from settings_changes import change_setting

SECTION = PAGE.read_text().split("\n## A model on a cluster of CPUs\n")[1].split("\n## ")[0]
LINES = re.findall(r"^    (\S.*)$", SECTION, re.MULTILINE)


def test_the_section_uses_the_workers_of_cpus() -> None:
    assert [line.split()[1] for line in LINES if line.startswith("tuna")] == [
        "init-session", "update-solvers", "model", "model", "applicability", "load-jobs", "model",
    ]  # fmt: skip
    assert [line.split()[-1] for line in LINES if line.startswith("sbatch")][1:] == [
        "slurm/compile.sbatch", "slurm/eval-cpu.sbatch",
    ]  # fmt: skip


@pytest.mark.drill(only=True)
@pytest.mark.timeout(900)
def test_a_model_is_tuned_as_the_section_says(
    type_in: Callable[..., Ended], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coordinator and workers have homes and settings of their own, and share Redis and a
    folder."""
    monkeypatch.syspath_prepend(ROOT / "packages" / "tuna-models" / "tests")
    import nets
    import onnx

    onnx.save(nets.residual(), "resnet18.onnx")
    with redis_server() as url:
        broker = url.replace("unix:", "redis+socket:", 1)
        shared = f'redis_url = "{url}"\nbroker_url = "{broker}"\nartifacts_url = "file://{tmp_path}/artifacts"\n'
        (tmp_path / "worker.toml").write_text(shared)
        (tmp_path / "tuna.toml").write_text(shared + f'db_url = "sqlite:///{home}/tuna.sqlite"\n')
        for path in tmp_path.glob("*.toml"):
            path.chmod(0o600)
        change_setting(monkeypatch, "TUNA_CONFIG", str(tmp_path / "tuna.toml"))

        def batch(line: str) -> subprocess.Popen[bytes]:
            script, *words = [word for word in shlex.split(line)[1:] if not word.startswith("-")]
            settings = str(tmp_path / ("tuna.toml" if "enqueue" in script else "worker.toml"))
            variables = {"VENV": str(Path(sys.executable).parents[1]), "TUNA_CONFIG": settings}
            return subprocess.Popen(
                ["/bin/bash", str(ROOT / script), *words], env={**os.environ, **variables}
            )

        def typed(lines: Sequence[str], version: str = "?") -> str:
            for line in lines:
                ended = type_in(*shlex.split(line.replace("b5e6e80f35c4", version)))
                assert ended.code == 0, (line, ended)
                if "model list" in line:
                    version = re.findall(r"\b[0-9a-f]{12}\b", ended.out)[0]
            return version

        submitted = [line for line in LINES if line.startswith("sbatch")]
        first = LINES.index(submitted[0])
        version = typed(LINES[:first])
        with batch(submitted[0]) as coordinator:
            for _ in range(20):  # submitted again as long as jobs are open
                if coordinator.poll() is None:
                    assert [batch(line).wait(300) for line in submitted[1:]] == [0, 0]
            assert coordinator.wait(60) == 0
        typed(LINES[first + len(submitted) :], version)
    assert (tmp_path / "resnet18.so").exists()
