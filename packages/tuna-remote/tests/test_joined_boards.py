"""Workers of boards that join a coordinator by token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from board_server import Board, Tracker

from tuna.errors import ServiceError
from tuna.libraries.boards import WorkerBoards
from tuna.libraries.registry import get_library
from tuna.settings import get_settings
from tuna.vocabulary import queue_name
from tuna_remote import boards, joining
from tuna_remote.gateway.protocol import Facts
from tuna_remote.gateway.tokens import Credentials

#: A token for nobody.
LINE = f"https://127.0.0.1:9#{'0' * 64}.{'0' * 12}.{'s' * 32}"
pytestmark = [pytest.mark.keeps_processes, pytest.mark.usefixtures("forked_children")]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Facts]]:
    """What workers that join say of themselves; the settings that they make end with the test."""
    found: list[Facts] = []
    monkeypatch.setattr(
        "tuna_remote.gateway.https_client.join",
        lambda token, role, facts: (
            found.append(facts) or Credentials(token.gateway, "eval-h-1", "s" * 43)
        ),
    )
    monkeypatch.setattr(boards, "_FIRST_WAIT_S", 1.0)
    for name in ("TUNA_GATEWAY", "TUNA_WORKER_NAME"):
        monkeypatch.setenv(name, "")
    for name in ("TRACKER", "DEVICE_KEY", "TARGET"):
        monkeypatch.setenv(f"TUNA_TVM_{name}", "")
    get_library.cache_clear()
    yield found
    monkeypatch.undo()
    get_library.cache_clear()
    get_settings.cache_clear()


def test_a_worker_joins_with_its_boards_environment(tvm_here: None, joined: list[Facts]) -> None:
    board = Board()
    tracker = Tracker(board.port)
    joining.join("eval", LINE, 2, boards=WorkerBoards(tracker.address, "pi"))
    own = get_library("tvm").environment()
    (found,) = joined
    assert (own.flags["device_key"], found.device, found.processes) == ("pi", own.device, 2)
    assert found.environments == (queue_name(True, "", own.machine_key).partition(".")[2],)
    tracker.close()
    board.kill()


def test_a_worker_without_a_board_spends_no_token(tvm_here: None, joined: list[Facts]) -> None:
    mute = Tracker(None)
    with pytest.raises(ServiceError, match=r"no board to join with.*No board"):
        joining.join("eval", LINE, boards=WorkerBoards(mute.address, "pi"))
    assert not joined
    mute.close()
