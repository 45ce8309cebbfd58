"""Boards with TVM's own tracker and servers: on loopback, where one is killed, and emulated, by the
commands of docs/boards.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from private_servers import free_port, listens, wait_until
from shared_data import need, needed_program

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "boards.md"
pytestmark = [pytest.mark.drill(only=True), pytest.mark.timeout(900)]


class Shell:
    """Programs that a person would start in terminals, with one TUNA_HOME; their groups are killed
    at the end."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._all: list[subprocess.Popen[bytes]] = []
        self.folder = folder
        bin_folder = Path(sys.executable).parent
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        self.env = {
            **os.environ,
            "PATH": path,
            "TUNA_HOME": str(folder / "home"),
            "TVM_NUM_THREADS": "1",
        }

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            made = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
            )
        return self.adopt(made)

    def adopt(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Let `close` end it."""
        self._all.append(process)
        return process

    def run(self, *command: str, limit_s: float = 300.0) -> str:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env,
            cwd=self.folder,
            timeout=limit_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + self._log.read_text()[-3000:]
        return done.stdout

    def tracker(self, port: int) -> None:
        where = ["--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)]
        self.start(sys.executable, "-m", "tvm.exec.rpc_tracker", *where)
        wait_until(lambda: listens(("127.0.0.1", port)), 60, "the tracker")

    def server(self, tracker: int, port: int) -> subprocess.Popen[bytes]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)]
        return self.start(
            *(sys.executable, "-m", "tvm.exec.rpc_server", *where),
            *("--tracker", f"127.0.0.1:{tracker}", "--key", "loopback"),
        )

    def close(self) -> None:
        for process in reversed(self._all):
            process.terminate()  # the emulated board's script ends the emulator
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    need(
        find_spec("tvm") and find_spec("tornado") and find_spec("cloudpickle"),
        "TVM's RPC (the extra rpc)",
    )
    made = Shell(tmp_path)
    yield made
    made.close()


def workers(shell: Shell) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(shell.run("tuna", "workers", "--json"))
    return [one for one in found if one["role"] == "eval"]


def test_a_killed_board_loses_nothing_and_is_used_again(shell: Shell) -> None:
    tracker, first, second = free_port(), free_port(), free_port()
    shell.tracker(tracker)
    doomed = shell.server(tracker, first)
    shell.server(tracker, second)
    where = ["--tvm-tracker", f"127.0.0.1:{tracker}", "--device-key", "loopback"]
    layers = shell.folder / "layers.txt"
    layers.write_text(
        "".join(f"MIOpenDriver gemm -m {n} -n {n} -k {n}\n" for n in range(32, 32 * 17, 32))
    )
    shell.run("tuna", "init-session", "tvm", "-l", "two boards", *where)
    for line in (
        "import layers.txt -t mine",
        "update-solvers tvm",
        "applicability --session-id 1",
        "load-jobs --session-id 1 -t mine -s TvmGemmTile --candidates 4",
    ):
        shell.run("tuna", *line.split())
    shell.start("tuna", "worker", "compile")
    on_boards = shell.start("tuna", "worker", "eval", *where, "-c", "2")
    enqueue = shell.start("tuna", "enqueue", "--session-id", "1")

    def on(port: int) -> list[dict[str, object]]:
        return [
            one
            for one in workers(shell)
            if str(port) in str(one["device"]) and one["state"] == "busy"
        ]

    wait_until(lambda: on(first) and on(second), 120, "both boards measure")
    end(doomed)
    killed_at = time.monotonic()
    aside = wait_for_aside(shell)
    assert f"127.0.0.1:{first} vanished" in str(aside["aside"])
    time.sleep(max(0.0, 20 - (time.monotonic() - killed_at)))
    shell.server(tracker, first)
    assert enqueue.wait(400) == 0
    (session,) = json.loads(shell.run("tuna", "status", "--json"))
    assert set(session["jobs"]) == {"evaluated"}, session
    wait_until(
        lambda: all(one["state"] == "idle" for one in workers(shell)), 120, "both workers are back"
    )
    started = time.monotonic()
    on_boards.send_signal(signal.SIGTERM)
    on_boards.wait(60)
    assert time.monotonic() - started < 20  # and the bound is 30


def wait_for_aside(shell: Shell) -> dict[str, object]:
    found: list[dict[str, object]] = []

    def look() -> bool:
        found[:] = [one for one in workers(shell) if one["state"] == "aside"]
        return bool(found)

    wait_until(look, 60, "the worker of the killed board is aside")
    return found[0]


def pasted(port: int) -> Sequence[str]:
    """The blocks of commands, with another port for the tracker."""
    return [
        block.replace("--port 9190", f"--port {port} --port-end {port + 1}").replace(
            "9190", str(port)
        )
        for block in re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    ]


def test_a_newcomer_tunes_a_layer_on_the_emulated_board(shell: Shell) -> None:
    needed_program("qemu-aarch64-static")
    needed_program("aarch64-linux-gnu-g++")
    port, board_port = free_port(), free_port()
    _, tracker, board, session = pasted(port)
    shell.start("bash", "-ec", tracker)
    wait_until(lambda: listens(("127.0.0.1", port)), 60, "the tracker")
    where = (
        board.strip().replace("scripts/board", str(ROOT / "scripts" / "board"))
        + f" --port {board_port}"
    )
    shell.env["TUNA_BOARDS"] = os.environ.get("TUNA_BOARDS") or str(ROOT / "build")
    shell.start("bash", "-ec", f"exec {where}")
    wait_until(lambda: listens(("127.0.0.1", board_port)), 400, "the emulated board")
    printed = shell.run("bash", "-ec", session, limit_s=600)
    assert "emulated by qemu-aarch64" in printed
    assert "simulated: " in printed
    assert "conv 1x16x14x14" in printed
    assert "gemm 32x32x32" in printed
    artifacts = [
        path.read_bytes()
        for path in (shell.folder / "home" / "artifacts").glob("??/*")
        if "." not in path.name
    ]
    built = [code for code in artifacts if code[:4] == b"\x7fELF"]
    assert built
    assert {code[18:20] for code in built} == {b"\xb7\x00"}, "e_machine 183: AArch64"
    export = [
        str(shutil.which("tuna", path=shell.env["PATH"])),
        "export",
        "--session-id",
        "1",
        "--form",
        "tvm",
    ]
    refused = subprocess.run(
        export, env=shell.env, cwd=shell.folder, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "qemu-aarch64 emulates" in refused.stderr
