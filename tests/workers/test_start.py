"""How workers and children are started: from any working directory, on queues that somebody fills."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tuna.sandbox.processes import Child, child_env
from tuna.sandbox.python import module_command
from tuna.settings import Settings, get_settings
from tuna.workers import worker as workers
from tuna.workers.launch import APP, WorkerSpec, worker_command


@pytest.fixture
def beside_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory like the one in which `git clone ... tuna` was typed, with a file of a common name."""
    for name in ("tuna", "celery"):
        (tmp_path / name).mkdir()
    (tmp_path / "redis.py").write_text("raise SystemExit('the file of the working directory was imported')")
    (tmp_path / "tuna" / "__init__.py").write_text("raise SystemExit('the folder was imported')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_worker_starts_beside_a_folder_tuna_and_a_file_redis(beside_a_clone: Path, tuna_home: Path) -> None:
    command = worker_command(WorkerSpec("compile"))
    arguments = command.index("worker")
    done = subprocess.run(
        [*command[:arguments], "report"], capture_output=True, text=True, timeout=60, cwd=beside_a_clone, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "task_acks_late: True" in done.stdout, "the app is Tuna's"


def test_a_child_starts_beside_a_folder_tuna_and_a_file_redis(beside_a_clone: Path) -> None:
    handlers = Path(__file__).parents[1] / "sandbox"
    child = Child("sandbox_handlers", env=child_env({"PYTHONPATH": f"{handlers}:{Path(__file__).parents[2]}"}))
    try:
        assert child.call({"op": "echo", "value": 1}, 30)["value"] == 1
    finally:
        child.close()


def test_a_module_gets_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("import sys; print(sys.argv[1:], __name__)")
    command = module_command("shown", "a b", "--c")
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", check=True)
    assert done.stdout == "['a b', '--c'] __main__\n"
    assert command[0] == sys.executable
    assert APP in worker_command(WorkerSpec("eval"))


@pytest.mark.parametrize("queues", [["tuna"], ["complie"], ["compile", "evaluate"]])
def test_a_worker_on_a_queue_that_nobody_fills_is_refused(
    queues: Sequence[str], tuna_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: Settings = get_settings()
    app: Any = object()
    monkeypatch.setattr(workers.celery_internals, "consumed_queues", lambda _: list(queues))
    monkeypatch.setattr(workers.celery_internals, "replace_queue", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        workers.Worker(app, settings)._set_queues()
    assert ended.value.code == 2
    assert f"not from {queues[-1]!r}" in capsys.readouterr().err
