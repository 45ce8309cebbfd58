"""Pieces of code in a process of little memory; what a box is tried with."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from box_place import HERE, SECRET, Place
from little_memory import little_memory
from shared_data import needed_program

from tuna.sandbox import box as boxes


@pytest.fixture()
def in_little_memory(tmp_path: Path) -> Callable[..., str]:
    """`in_little_memory(code, *arguments)`: what the code prints in a process that may have 700 MiB
    of address space."""
    return little_memory(tmp_path)


@pytest.fixture
def needs_a_box() -> None:
    """A kernel that cannot close the box has nothing to be tested; the reason is what a worker
    would log."""
    missing = boxes.lacking()
    if missing:
        pytest.skip(f"this kernel leaves open: {'; '.join(missing)}")


@pytest.fixture(scope="session")
def acts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of `box_acts.c`."""
    compiler = needed_program("cc")
    program = tmp_path_factory.mktemp("acts") / "box_acts"
    subprocess.run([compiler, "-o", str(program), str(HERE / "box_acts.c")], check=True)
    return program


@pytest.fixture
def victim(acts: Path) -> Iterator[psutil.Popen]:
    """A process of this user, outside of every box, which SIGURG ends."""
    process = psutil.Popen(
        [str(acts), "wait", "0"], env={"PASSWORD": SECRET}, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def listener() -> Iterator[str]:
    """The port of a server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.fixture
def place(tuna_home: Path, tmp_path: Path) -> Place:
    return Place(tuna_home, tmp_path)
