"""Packages of strangers, installed without a network into a folder of their own, and Tuna's
programs that see them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended
from shared_data import needed_program


@pytest.fixture(scope="session")
def install_package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """`install_package(source)`: a folder with `source`, a copy, and `site`, what was installed
    from it."""
    needed_program("cc")

    def install(source: Path) -> Path:
        folder = tmp_path_factory.mktemp(source.name)
        shutil.copytree(source, folder / "source")  # a build leaves files beside its source
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-index",
        ]
        options = ["--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
        command = [*pip, *options, str(folder / "source")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder

    return install


@pytest.fixture
def run_module() -> Callable[..., str]:
    """`run_module(folder, "tuna", ...)`: what `python -m tuna ...`, or `python -c ...`, prints in
    `folder`."""

    def run(folder: Path, *words: str) -> str:
        command = [sys.executable, *words] if words[0] == "-c" else [sys.executable, "-m", *words]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def check_generic_export(type_in: Callable[..., Ended], tmp_path: Path) -> Callable[[str], None]:
    """`check_generic_export(solver)`: session 1 is exported as JSON with a result of `solver`."""

    def check(solver: str) -> None:
        ended = type_in("tuna", "export", "--session-id", "1", "--form", "json", "-d", "out")
        assert ended.code == 0, ended
        (path,) = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        assert solver in path.read_text()

    return check
