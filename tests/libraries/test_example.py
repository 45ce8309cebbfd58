"""The example library: it times ROCm's rocminfo, where that is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from settings_changes import change_setting

from tuna.configs import GemmConfig
from tuna.libraries.base import Again
from tuna.libraries.example import ExampleLibrary
from tuna.libraries.items import StepResult, WorkItem
from tuna.testing.rehearsal import run_context
from tuna.vocabulary import Cause


def _executed(folder: Path) -> StepResult:
    library = ExampleLibrary()
    item = WorkItem(
        job_id=1, attempt=1, session_id=1, library="example", step="execute", solver="Rocminfo",
        config=GemmConfig(1, 1, 1).to_json(),
    )  # fmt: skip
    (result,) = library.run(library.steps[0], [item], run_context(folder))
    return result


@pytest.fixture(autouse=True)
def rocm_path(tmp_path: Path, tuna_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNA_ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.delenv("TUNA_EXAMPLE_PROGRAM", raising=False)
    change_setting(monkeypatch, "PATH", "/usr/bin:/bin")
    return tmp_path / "rocm"


def test_the_program_of_the_rocm_that_is_set_is_found(rocm_path: Path, tmp_path: Path) -> None:
    program = rocm_path / "bin" / "rocminfo"
    program.parent.mkdir(parents=True)
    program.symlink_to(str(shutil.which("true")))
    assert _executed(tmp_path).ok


def test_a_program_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    result = _executed(tmp_path)
    assert result.cause is Cause.NOT_APPLICABLE
    (step,) = ExampleLibrary.steps
    assert step.retry(result.cause).again is Again.NEVER, "no attempt is repeated"
    assert "TUNA_ROCM_PATH" in result.output_tail
