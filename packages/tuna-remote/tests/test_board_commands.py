"""Commands that name boards: what they refuse, in a sentence, and sessions of a target without a
board."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from command_lines import Ended
from shared_data import need, needed_program

from tuna.libraries.boards import BoardSettings
from tuna.settings import get_settings
from tuna.workers import launch

TypeIn = Callable[..., Ended]
WHERE = ("--tvm-tracker", "127.0.0.1:1", "--device-key", "pi")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("init-session", "tvm", "-l", "x", "--target", "cuda -arch=sm_80"),
            "of kind llvm, not 'cuda'",
        ),
        (
            ("init-session", "tvm", "-l", "x", "--tvm-tracker", "127.0.0.1:1"),
            "named by its tracker and its key",
        ),
        (
            ("init-session", "tvm", "-l", "x", "--tvm-tracker", "here", "--device-key", "pi"),
            "of the form HOST:PORT",
        ),
        (
            ("init-session", "tvm", "-l", "x", "--target", "llvm", "--arch", "gfx90a"),
            "tvm takes no arch",
        ),
        (
            ("init-session", "tvm", "-l", "x", *WHERE, "--target", "llvm -num-cores=²"),
            "num-cores cannot be '²'",
        ),
        (("init-session", "miopen", "-l", "x", "--target", "llvm"), "miopen takes no target"),
        (
            ("worker", "eval", "--tvm-tracker", "here", "--device-key", "pi"),
            "of the form HOST:PORT",
        ),
        (("worker", "eval", *WHERE, "--target", "cuda"), "of kind llvm, not 'cuda'"),
        (("worker", "compile", *WHERE), "Only eval workers measure on boards"),
        (("worker", "eval", "--device-key", "pi"), "named by its tracker and its key"),
        (("worker", "eval", *WHERE, "--devices", "all"), "not among this machine's devices"),
    ],
)
def test_what_names_no_board_is_refused(type_in: TypeIn, words: tuple[str, ...], said: str) -> None:
    need(find_spec("tvm"), "TVM")
    ended = type_in("tuna", *words)
    assert (ended.code, said in ended.err) == (2, True), ended


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("eval", "--tvm-tracker", "here", "--device-key", "pi"), "of the form HOST:PORT"),
        (("eval", *WHERE, "--devices", "all"), "not among this machine's devices"),
        (("compile", "--devices", "all"), "Only eval workers have devices"),
    ],
)
def test_what_a_worker_refuses_spends_no_token(
    type_in: TypeIn, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    need(find_spec("tvm"), "TVM")
    monkeypatch.setattr(
        "tuna_remote.gateway.https_client.join", lambda *_: pytest.fail("the token is spent")
    )
    ended = type_in(
        "tuna", "worker", *words, "--join", f"https://127.0.0.1:9#{'0' * 64}.{'0' * 12}.{'s' * 32}"
    )
    assert (ended.code, said in ended.err) == (2, True), ended


def test_a_target_alone_makes_one_session_in_either_form(type_in: TypeIn) -> None:
    need(find_spec("tvm"), "TVM")
    needed_program("aarch64-linux-gnu-g++")
    old = "lvm -device=arm_cpu -mtriple=aarch64-linux-gnu"
    ended = type_in("tuna", "init-session", "tvm", "-l", "x", "--target", old)
    assert (ended.code, "taken for llvm" in ended.err) == (0, True), ended
    assert ended.out.startswith("session 1 (new): tvm"), "a warning is none of the command's output"
    same = '{"mtriple": "aarch64-linux-gnu", "kind": "llvm"}'
    ended = type_in("tuna", *["init-session", "tvm", "-l", "x", "--target"], same)
    assert "session 1 (" in ended.out, ended


def test_a_lost_board_is_reset_once_a_minute_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(launch, "run_hook", lambda name, command, env: ran.append(command))
    clock = iter((1000.0, 1000.0, 1030.0, 1060.0, 1060.0))
    # the module's clock alone: other threads ask for the time too
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(launch, "board_settings", lambda: BoardSettings(tvm_reset="power-cycle"))
    repair = launch.DeviceRepair(get_settings().model_copy(update={"after_worker": ""}))
    for _ in range(3):
        repair()
    assert [command for command in ran if command] == ["power-cycle", "power-cycle"]
