"""TVM on boards: a server of TVM's RPC on loopback, behind a tracker that says what a test
wants."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from board_server import Board, Tracker
from shared_data import needed_program
from tvm_bench import Bench
from tvm_layers import gemm

from tuna.artifacts.store import Artifacts
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.contest import Budgets
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult
from tuna.libraries.tvm import tvm_library
from tuna.settings import get_settings
from tuna.vocabulary import Cause
from tuna_remote import boards
from tuna_remote.boards import BoardSession

pytestmark = [pytest.mark.keeps_processes, pytest.mark.usefixtures("forked_children")]

GEMM = "TvmGemmTile"
MAGIC = struct.pack("<i", 0x2F271)
CRASH = "int __tvm_ffi_main(void *h, void *a, int n, void *r) { *(volatile int *)8 = 1; return 0; }"
HANG = (
    "#include <unistd.h>\nint __tvm_ffi_main(void *h, void *a, int n, void *r) { for (;;)"
    " pause(); }"
)


@pytest.fixture(scope="module")
def board(tvm_here: None) -> Iterator[Board]:
    made = Board()
    yield made
    made.kill()


@pytest.fixture
def bench_at(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int | None], tuple[Bench, Tracker]]]:
    """`bench_at(port)`: the library of a worker for that board, and its tracker."""
    made: list[tuple[Bench, Tracker]] = []

    def make(port: int | None) -> tuple[Bench, Tracker]:
        tracker = Tracker(port)
        monkeypatch.setenv("TUNA_TVM_TRACKER", tracker.address)
        monkeypatch.setenv("TUNA_TVM_DEVICE_KEY", "pi")
        get_settings.cache_clear()
        library = tvm_library()
        assert isinstance(library.processes, BoardSession)
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
    return [
        trial.artifact
        for trial in bench.compile(gemm(m=64, n=64, k=64), GEMM, candidates=count).trials
    ]


def evaluated(bench: Bench, artifacts: list[str | None], **options: object) -> StepResult:
    return bench.evaluate(gemm(m=64, n=64, k=64), GEMM, artifacts, **options)


def bad(bench: Bench, folder: Path, source: str) -> str:
    (folder / "bad.c").write_text(source)
    command = [
        needed_program("gcc"),
        "-shared",
        "-fPIC",
        "-w",
        "-o",
        str(folder / "bad.so"),
        str(folder / "bad.c"),
    ]
    subprocess.run(command, check=True, timeout=60)
    return bench.context.artifacts.put((folder / "bad.so").read_bytes())


def test_candidates_are_checked_and_timed_on_the_board(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]
) -> None:
    bench, _ = bench_at(board.port)
    used: list[str] = []
    bench.context = replace(bench.context, uses=used.append)
    facts = bench.library.environment()
    assert (facts.flags["device_key"], facts.num_cu) == ("pi", 1)
    assert facts.machine_key != replace(facts, flags={}).machine_key
    artifacts = compiled(bench, 1)
    for caches in ("warm", "cold"):
        item = bench.eval_item(bench.item(gemm(m=64, n=64, k=64), GEMM), artifacts)
        result = bench.run(
            item.model_copy(update={"conditions": {"caches": caches} if caches == "cold" else {}})
        )
        assert result.ok, result.output_tail
        assert {trial.clock for trial in result.trials} == {"own"}
        assert all(
            trial.max_error is not None and trial.max_error < 1e-5 for trial in result.trials
        )
        assert not result.simulated
    assert [device for device, _ in groupby(used)] == [f"pi at 127.0.0.1:{board.port}", ""] * 2
    assert bench.library.device.probe(bench.library.device.own_device()) == "", (
        "the session was given back"
    )


def test_the_best_are_measured_again_in_sessions_of_their_own_on_the_same_board(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]
) -> None:
    """Where another board is free, a new session would be on that one."""
    bench, tracker = bench_at(board.port)
    artifacts = compiled(bench, 1)
    again = Budgets.finalist_processes
    # one more decides where half of them were disturbed, as on a busy machine
    for tracker.free, sessions in ((0, (1 + again, 2 + again)), (1, (1,))):
        before = tracker.given
        result = evaluated(bench, artifacts)
        assert result.ok, result.output_tail
        assert tracker.given - before in sessions


@pytest.mark.drill(only=True)  # starts a second board
def test_finalists_stay_as_they_were_if_another_board_took_the_place_of_theirs(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]
) -> None:
    other = Board()
    try:
        bench, tracker = bench_at(board.port)
        artifacts = compiled(bench, 1)
        bench.context = replace(
            bench.context,
            uses=lambda device: setattr(tracker, "port", other.port) if device else None,
        )
        result = evaluated(bench, artifacts)
    finally:
        other.kill()
    (trial,) = result.trials
    assert result.ok, result.output_tail
    assert trial.time_ms
    assert tracker.given == 3, "the environment's, the item's, and the other one"


def test_a_candidate_that_crashes_the_board_is_at_fault(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]], tmp_path: Path
) -> None:
    bench, _ = bench_at(board.port)
    first, second = compiled(bench)
    result = evaluated(bench, [first, bad(bench, tmp_path, CRASH), second])
    assert [trial.cause for trial in result.trials] == [None, Cause.RUN_ERROR, None]
    assert result.ok


@pytest.mark.drill(only=True)  # 7 s of waiting
def test_a_candidate_that_hangs_is_at_fault_and_holds_the_board(
    bench_at: Callable[..., tuple[Bench, Tracker]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "_AGAIN_S", 2.0)
    own = Board()
    try:
        bench, tracker = bench_at(own.port)
        first, second = compiled(bench)
        hang = bad(bench, tmp_path, HANG)
        # it has no other
        bench.context = replace(bench.context, uses=lambda _: setattr(tracker, "port", None))
        result = evaluated(bench, [first, hang, second], measure_timeout_s=6)
    finally:
        own.kill()
    assert [trial.cause for trial in result.trials] == [None, Cause.RUN_TIMEOUT, Cause.RUN_ERROR]
    assert result.trials[0].time_ms
    assert "did not come back after the candidate before" in result.trials[2].output_tail


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
            bench.context,
            uses=lambda device: threading.Timer(1.0, own.kill).start() if device else None,
        )
        result = evaluated(bench, [bad(bench, tmp_path, HANG)])
    finally:
        own.kill()
    assert (result.ok, result.cause, result.trials) == (False, Cause.DEVICE_LOST, ())
    assert "vanished" in result.output_tail
    assert "does not answer" in bench.library.device.probe(bench.library.device.own_device())


@pytest.mark.parametrize(("ends", "there"), [("refuses", True), ("is busy", True), ("dies", False)])
def test_a_server_that_dies_with_our_connection_in_its_queue_is_not_there(
    monkeypatch: pytest.MonkeyPatch, ends: str, there: bool
) -> None:
    """The system had taken the connection, so that the candidate was blamed for a board that was
    gone."""
    monkeypatch.setattr(boards, "_CONNECT_S", 1.0 if ends == "is busy" else 60.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            with server.accept()[0] as client:
                client.recv(4)

        actions: dict[str, Callable[[], object]] = {
            "refuses": refuse,
            "is busy": bool,
            "dies": server.close,
        }
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
    assert time.monotonic() - started < 60


def test_a_tracker_that_says_nothing_has_no_board(
    bench_at: Callable[..., tuple[Bench, Tracker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "_FIRST_WAIT_S", 1.0)
    bench, _ = bench_at(None)
    with pytest.raises(
        LibraryMissing,
        match="No board with the key pi can be used: No board with the device key 'pi'",
    ):
        bench.library.environment()


def test_a_board_of_another_kind_is_refused(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]
) -> None:
    bench, _ = bench_at(board.port)
    artifacts = compiled(bench, 1)
    assert isinstance(bench.library.processes, BoardSession)
    other = bench.library.environment()
    bench.library.processes._own = replace(other, flags={**other.flags, "cpu": "cortex-a72"})
    result = evaluated(bench, artifacts)
    assert result.cause is Cause.DEVICE_LOST
    assert "is another than the session's: flags" in result.output_tail


def test_a_board_that_does_not_say_its_architecture_needs_a_target() -> None:
    """A runtime without a compiler knows no triple; this machine's is not the board's."""
    silent = {"cpu": "", "triple": "", "threads": 4, "llvm": 0, "emulator": "", "model": ""}
    with pytest.raises(
        BadInput, match="The board with the key pi does not say what its CPU is"
    ) as refused:
        boards.environment_of(silent, None, "pi")
    assert "--target" in refused.value.hint


def test_waiting_for_a_board_ends_with_the_worker(
    board: Board, bench_at: Callable[..., tuple[Bench, Tracker]]
) -> None:
    bench, tracker = bench_at(board.port)
    artifacts = compiled(bench, 1)
    tracker.port = None
    bench.context = replace(bench.context, ending=lambda: True)
    result = evaluated(bench, artifacts)
    assert (result.cause, result.output_tail) == (Cause.DEVICE_LOST, "this worker is ending")
