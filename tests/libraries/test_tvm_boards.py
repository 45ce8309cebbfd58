"""TVM on boards: a server of TVM's RPC on loopback, behind a tracker that says what a test wants."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from tvm_bench import Bench
from tvm_layers import conv, gemm

from tuna import api
from tuna.artifacts import Artifacts
from tuna.errors import BadInput, LibraryMissing, ServiceError
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult
from tuna.libraries.measurement import PROCESSES
from tuna.libraries.registry import get_library
from tuna.libraries.tvm import BoardTvmLibrary, board_library, boards, tvm_library
from tuna.membership.join import Facts
from tuna.queues import queue_name
from tuna.settings import get_settings
from tuna.vocabulary import Cause

pytestmark = [pytest.mark.keeps_processes, pytest.mark.usefixtures("forked_children")]

GEMM = "TvmGemmTile"
MAGIC = struct.pack("<i", 0x2F271)
SUMMARY = 6
#: A server that starts again when a candidate has crashed it, as docs/boards.md has it.
SERVER = """
import os
import sys
import tvm_ffi
from tvm.rpc import server
if sys.argv[2]:
    tvm_ffi.register_global_func("tuna.emulator", lambda: sys.argv[2])
while True:
    serving = os.fork()
    if not serving:
        server.PopenRPCServerState("127.0.0.1", int(sys.argv[1]), int(sys.argv[1]) + 1, key="board", silent=True).thread.join()
        os._exit(1)
    os.waitpid(serving, 0)
"""
CRASH = "int __tvm_ffi_main(void *h, void *a, int n, void *r) { *(volatile int *)8 = 1; return 0; }"
HANG = "#include <unistd.h>\nint __tvm_ffi_main(void *h, void *a, int n, void *r) { for (;;) pause(); }"


class Board:
    """A server in a process group of its own."""

    def __init__(self, emulator: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-c", SERVER, str(self.port), emulator]
        self.process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "TVM_NUM_THREADS": "1"})
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Tracker:
    """Gives every client the board at one port; without a port it says nothing after its greeting."""

    def __init__(self, port: int | None) -> None:
        self.port = port
        self.free = 0  #: boards, by its summary
        self.given = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.sendall(client.recv(4))
            asked = json.loads(client.recv(4096)[4:])
            if asked[0] == SUMMARY:
                self._say(client, {"queue_info": {"pi": {"free": self.free, "pending": 0}}, "server_info": []})
            elif self.port is not None:
                self.given += 1
                self._say(client, ["127.0.0.1", self.port, "board"])
            client.recv(4096)

    def _say(self, client: socket.socket, answer: object) -> None:
        text = json.dumps([0, answer]).encode()
        client.sendall(struct.pack("<i", len(text)) + text)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def board(tvm_here: None) -> Iterator[Board]:
    made = Board()
    yield made
    made.kill()


@pytest.fixture
def bench_at(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int | None], tuple[Bench, Tracker]]]:
    """`bench_at(port)`: the library of a worker for that board, and its tracker; short of patience."""
    monkeypatch.setattr(board_library, "_WAIT_S", 2.0)
    monkeypatch.setattr(board_library, "_AGAIN_S", 2.0)
    monkeypatch.setattr(boards, "_FIRST_WAIT_S", 1.0)
    made: list[tuple[Bench, Tracker]] = []

    def make(port: int | None) -> tuple[Bench, Tracker]:
        tracker = Tracker(port)
        monkeypatch.setenv("TUNA_TVM_TRACKER", tracker.address)
        monkeypatch.setenv("TUNA_TVM_DEVICE_KEY", "pi")
        get_settings.cache_clear()
        library = tvm_library()
        assert isinstance(library, BoardTvmLibrary)
        store = Artifacts((home / "artifacts").as_uri(), home / "cache")
        bench = Bench(library, RunContext(artifacts=store, scratch=tmp_path, cpus=()), "")
        made.append((bench, tracker))
        return bench, tracker

    yield make
    for bench, tracker in made:
        bench.library.close()
        tracker.close()
    monkeypatch.undo()
    get_settings.cache_clear()


def compiled(bench: Bench, count: int = 2) -> list[str | None]:
    bench.target = bench.library.environment().target
    return [trial.artifact for trial in bench.compile(gemm(m=64, n=64, k=64), GEMM, candidates=count).trials]


def evaluated(bench: Bench, artifacts: list[str | None], **options: object) -> StepResult:
    return bench.evaluate(gemm(m=64, n=64, k=64), GEMM, artifacts, **options)


def bad(bench: Bench, folder: Path, source: str) -> str:
    (folder / "bad.c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / "bad.so"), str(folder / "bad.c")]
    subprocess.run(command, check=True, timeout=60)
    return bench.context.artifacts.put((folder / "bad.so").read_bytes())


def test_candidates_are_checked_and_timed_on_the_board(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]
) -> None:
    bench, _ = bench_at(board.port)
    used: list[str] = []
    bench.context = replace(bench.context, uses=used.append)
    found = bench.library.environment()
    assert (found.flags["device_key"], found.num_cu) == ("pi", 1)
    assert found.machine_key != replace(found, flags={}).machine_key
    artifacts = compiled(bench, 1)
    for caches in ("warm", "cold"):
        item = bench.eval_item(bench.item(gemm(m=64, n=64, k=64), GEMM), artifacts)
        result = bench.run(item.model_copy(update={"conditions": {"caches": caches} if caches == "cold" else {}}))
        assert result.ok, result.output_tail
        assert {trial.clock for trial in result.trials} == {"own"}
        assert all(trial.max_error is not None and trial.max_error < 1e-5 for trial in result.trials)
        assert not result.simulated
    assert [device for device, _ in groupby(used)] == [f"pi at 127.0.0.1:{board.port}", ""] * 2
    assert bench.library.probe(bench.library.own_device()) == "", "the session was given back"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Facts]]:
    """What workers that join say of themselves; the settings that they make end with the test."""
    found: list[Facts] = []
    monkeypatch.setattr("tuna.membership.join.join", lambda line, role, facts: found.append(facts) or {})
    monkeypatch.setattr(boards, "_FIRST_WAIT_S", 1.0)
    for name in ("TRACKER", "DEVICE_KEY", "TARGET"):
        monkeypatch.setenv(f"TUNA_TVM_{name}", "")
    get_library.cache_clear()
    yield found
    monkeypatch.undo()
    get_library.cache_clear()
    get_settings.cache_clear()


def test_a_worker_joins_with_its_boards_environment(board: Board, joined: list[Facts]) -> None:
    tracker = Tracker(board.port)
    api.join("eval", "redis://here#token", 2, boards=api.Boards(tracker.address, "pi"))
    own = get_library("tvm").environment()
    (found,) = joined
    assert (own.flags["device_key"], found.device, found.processes) == ("pi", own.device, 2)
    assert found.environments == (queue_name(True, "", own.machine_key).partition(".")[2],)
    tracker.close()


def test_a_worker_without_a_board_spends_no_token(joined: list[Facts]) -> None:
    mute = Tracker(None)
    with pytest.raises(ServiceError, match=r"no board to join with.*No board"):
        api.join("eval", "redis://here#token", boards=api.Boards(mute.address, "pi"))
    assert not joined
    mute.close()


def test_the_best_are_measured_again_in_sessions_of_their_own_on_the_same_board(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]
) -> None:
    """Where another board is free, a new session would be on that one."""
    bench, tracker = bench_at(board.port)
    artifacts = compiled(bench, 1)
    for tracker.free, sessions in ((0, 1 + PROCESSES), (1, 1)):
        before = tracker.given
        result = evaluated(bench, artifacts)
        assert result.ok, result.output_tail
        assert tracker.given - before == sessions


@pytest.mark.drill(only=True)  # starts a second board
def test_finalists_stay_as_they_were_if_another_board_took_the_place_of_theirs(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]
) -> None:
    other = Board()
    try:
        bench, tracker = bench_at(board.port)
        artifacts = compiled(bench, 1)
        bench.context = replace(
            bench.context, uses=lambda device: setattr(tracker, "port", other.port) if device else None
        )
        result = evaluated(bench, artifacts)
    finally:
        other.kill()
    (trial,) = result.trials
    assert result.ok, result.output_tail
    assert trial.time_ms
    assert tracker.given == 3, "the environment's, the item's, and the other one"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a bad candidate")
def test_a_candidate_that_crashes_the_board_is_at_fault(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]], tmp_path: Path
) -> None:
    bench, _ = bench_at(board.port)
    first, second = compiled(bench)
    result = evaluated(bench, [first, bad(bench, tmp_path, CRASH), second])
    assert [trial.cause for trial in result.trials] == [None, Cause.RUN_ERROR, None]
    assert result.ok


@pytest.mark.drill(only=True)  # 7 s of waiting
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a bad candidate")
def test_a_candidate_that_hangs_is_at_fault_and_holds_the_board(
    bench_at: Callable[..., tuple[Bench, Tracker]], tmp_path: Path
) -> None:
    own = Board()
    try:
        bench, tracker = bench_at(own.port)
        first, second = compiled(bench)
        hang = bad(bench, tmp_path, HANG)
        bench.context = replace(bench.context, uses=lambda _: setattr(tracker, "port", None))  # it has no other
        result = evaluated(bench, [first, hang, second], measure_timeout_s=6)
    finally:
        own.kill()
    assert [trial.cause for trial in result.trials] == [None, Cause.RUN_TIMEOUT, Cause.RUN_ERROR]
    assert result.trials[0].time_ms
    assert "did not come back after the candidate before" in result.trials[2].output_tail


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a bad candidate")
def test_a_board_that_vanishes_is_lost_and_no_candidate_is_blamed(
    bench_at: Callable[..., tuple[Bench, Tracker]], tmp_path: Path
) -> None:
    own = Board("qemu-test")
    try:
        bench, _ = bench_at(own.port)
        candidates = compiled(bench, 1)
        assert evaluated(bench, candidates).simulated
        assert "emulated by qemu-test" in bench.library.environment().device
        bench.context = replace(
            bench.context, uses=lambda device: threading.Timer(1.0, own.kill).start() if device else None
        )
        result = evaluated(bench, [bad(bench, tmp_path, HANG)])
    finally:
        own.kill()
    assert (result.ok, result.cause, result.trials) == (False, Cause.DEVICE_LOST, ())
    assert "vanished" in result.output_tail
    assert "does not answer" in bench.library.probe(bench.library.own_device())


@pytest.mark.parametrize(("ends", "there"), [("refuses", True), ("is busy", True), ("dies", False)])
def test_a_server_that_dies_with_our_connection_in_its_queue_is_not_there(
    monkeypatch: pytest.MonkeyPatch, ends: str, there: bool
) -> None:
    """The system had taken the connection, so that the candidate was blamed for a board that was gone."""
    monkeypatch.setattr(boards, "_CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            with server.accept()[0] as client:
                client.recv(4)

        actions: dict[str, Callable[[], object]] = {"refuses": refuse, "is busy": bool, "dies": server.close}
        timer = threading.Timer(0.2, actions[ends])
        timer.start()
        assert boards.listens(f"127.0.0.1:{server.getsockname()[1]}", 0.5) is there
        timer.join()


@pytest.fixture
def rubbish() -> Iterator[Callable[[bytes], int]]:
    """`rubbish(answer)`: the port of a server that sends this to everybody and then waits."""
    listeners: list[socket.socket] = []

    def serve(answer: bytes) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept() -> None:
            held = []
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    held.append(client)
                    client.sendall(answer)

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])

    yield serve
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b""])
def test_what_is_no_board_is_lost_in_time(
    board: Board,
    bench_at: Callable[..., tuple[Bench, Tracker]],
    rubbish: Callable[[bytes], int],
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
) -> None:
    bench, tracker = bench_at(board.port)
    artifacts = compiled(bench, 1)
    monkeypatch.setattr(boards, "HANDSHAKE_S", 3.0)
    tracker.port = rubbish(answer)
    started = time.monotonic()
    result = evaluated(bench, artifacts)
    assert (result.cause, result.trials) == (Cause.DEVICE_LOST, ())
    assert time.monotonic() - started < 20


def test_a_tracker_that_says_nothing_has_no_board(bench_at: Callable[..., tuple[Bench, Tracker]]) -> None:
    bench, _ = bench_at(None)
    with pytest.raises(LibraryMissing, match="No board with the key pi can be used: No board with the device key 'pi'"):
        bench.library.environment()


def test_a_board_of_another_kind_is_refused(board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]) -> None:
    bench, _ = bench_at(board.port)
    artifacts = compiled(bench, 1)
    assert isinstance(bench.library, BoardTvmLibrary)
    other = bench.library.environment()
    bench.library._own = replace(other, flags={**other.flags, "cpu": "cortex-a72"})
    result = evaluated(bench, artifacts)
    assert result.cause is Cause.DEVICE_LOST
    assert "is another than the session's: flags" in result.output_tail


def test_a_board_that_does_not_say_its_architecture_needs_a_target() -> None:
    """A runtime without a compiler knows no triple; this machine's is not the board's."""
    silent = {"cpu": "", "triple": "", "threads": 4, "llvm": 0, "emulator": "", "model": ""}
    with pytest.raises(BadInput, match="The board with the key pi does not say what its CPU is") as refused:
        boards.environment_of(silent, None, "pi")
    assert "--target" in refused.value.hint


def test_waiting_for_a_board_ends_with_the_worker(board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]) -> None:
    bench, tracker = bench_at(board.port)
    artifacts = compiled(bench, 1)
    tracker.port = None
    bench.context = replace(bench.context, ending=lambda: True)
    result = evaluated(bench, artifacts)
    assert (result.cause, result.output_tail) == (Cause.DEVICE_LOST, "this worker is ending")


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="needs Debian's g++-aarch64-linux-gnu")
@pytest.mark.parametrize(("config", "solver"), [(conv(), "TvmConvTile"), (conv(), "TvmConvDirectNCHW"), (gemm(), GEMM)])
def test_candidates_for_another_architecture_are_its_code(
    new_bench: Callable[[], Bench], config: object, solver: str
) -> None:
    bench = new_bench()
    bench.target = json.dumps({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 4})
    result = bench.compile(config, solver)  # type: ignore[arg-type]
    assert result.ok, result.output_tail
    assert f"--target '{bench.target}'" in bench.library.reproduce(bench.item(config, solver))  # type: ignore[arg-type]
    for trial in result.trials:
        code = bench.context.artifacts.get(trial.artifact or "")
        assert (code[:4], code[18:20]) == (b"\x7fELF", b"\xb7\x00"), "e_machine 183: AArch64"
