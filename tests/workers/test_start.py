"""How workers and children are started: from any working directory, on queues that somebody
fills."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from celery import Celery

from tuna.common.lifetime import WITH_PARENT
from tuna.common.python import module_command
from tuna.errors import ServiceError
from tuna.sandbox.processes import Child, child_env
from tuna.settings import Settings, get_settings
from tuna.workers import launch
from tuna.workers import worker as workers
from tuna.workers.launch import APP, WorkerSpec, worker_command


@pytest.fixture
def beside_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory like the one in which `git clone ... tuna` was typed, with a file of a
    common name."""
    for name in ("tuna", "celery"):
        (tmp_path / name).mkdir()
    (tmp_path / "redis.py").write_text(
        "raise SystemExit('the file of the working directory was imported')"
    )
    (tmp_path / "tuna" / "__init__.py").write_text("raise SystemExit('the folder was imported')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.service
def test_a_worker_starts_beside_a_folder_tuna_and_a_file_redis(
    beside_a_clone: Path, tuna_home: Path
) -> None:
    command = worker_command(WorkerSpec("compile"))
    arguments = command.index("worker")
    done = subprocess.run(
        [*command[:arguments], "report"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=beside_a_clone,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "task_acks_late: True" in done.stdout, "the app is Tuna's"


def test_a_child_starts_beside_a_folder_tuna_and_a_file_redis(beside_a_clone: Path) -> None:
    handlers = Path(__file__).parents[1] / "sandbox"
    child = Child(
        "sandbox_handlers", env=child_env({"PYTHONPATH": f"{handlers}:{Path(__file__).parents[2]}"})
    )
    try:
        assert child.call({"op": "echo", "value": 1}, 120)["value"] == 1
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


@pytest.mark.service
def test_a_worker_whose_starter_has_ended_exits_before_it_does_anything(tuna_home: Path) -> None:
    """The starter was killed while the worker imported Celery, or before the kernel was asked to
    tell of it."""
    starter = subprocess.Popen([sys.executable, "-c", ""])
    assert starter.wait() == 0
    done = subprocess.run(
        worker_command(WorkerSpec("compile")),
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, WITH_PARENT: str(starter.pid)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    assert not (tuna_home / "run").exists(), "it started no Redis"


def test_a_process_whose_parent_has_ended_exits() -> None:
    line = (
        "import os; from tuna.common.lifetime import end_with_parent;"
        " end_with_parent(os.getpid()); print('lives')"
    )
    done = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 9)", "The compile worker was killed (SIGKILL)."),
        ("os.kill(os.getpid(), 11)", "The compile worker was killed (SIGSEGV)."),
        (
            "sys.exit('tuna: It is full.')",
            "The compile worker ended with exit code 1: tuna: It is full.",
        ),
        (
            "sys.exit('tuna: No.\\n  do it')",
            "The compile worker ended with exit code 1: tuna: No. do it",
        ),
    ],
)
def test_the_end_of_a_worker_is_told_with_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    end: str,
    told: str,
) -> None:
    line = f"import os, sys; print('- ** ---------- .> app: tuna', flush=True); {end}"
    monkeypatch.setattr(launch, "worker_command", lambda _: [sys.executable, "-c", line])
    workers = launch.LocalWorkers(tmp_path)
    workers.start(WorkerSpec("compile"))

    def ended() -> bool:
        try:
            workers.check()
        except ServiceError as error:
            assert str(error) == told
            return True
        return False

    eventually(ended, 60)
    workers.stop(idle=True)


@pytest.mark.parametrize("queues", [["tuna"], ["complie"], ["compile", "evaluate"]])
def test_a_worker_on_a_queue_that_nobody_fills_is_refused(
    queues: Sequence[str],
    tuna_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings: Settings = get_settings()
    monkeypatch.setattr(workers.celery_internals, "consumed_queues", lambda _: list(queues))
    monkeypatch.setattr(workers.celery_internals, "replace_queue", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        workers.CeleryWorker(Celery(), settings)._set_queues()
    assert ended.value.code == 2
    assert f"not from {queues[-1]!r}" in capsys.readouterr().err
