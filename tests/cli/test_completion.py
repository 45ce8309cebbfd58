"""Shell completion: commands without loading them, and the values that are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from tuna.cli import options
from tuna.cli.main import commands, tuna
from tuna.settings import get_settings


def parameters(command: click.Command) -> Iterator[click.Parameter]:
    """Those of a command and of all below it."""
    yield from command.params
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), name)
            assert below is not None
            yield from parameters(below)


@pytest.fixture(autouse=True)
def _types_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of this process get back the types of their parameters."""
    for parameter in parameters(tuna):
        monkeypatch.setattr(parameter, "type", parameter.type)


def completed(*words: object) -> list[str]:
    """What a shell offers after these words, of which the last is not finished."""
    *before, last = map(str, words)
    found = ShellComplete(tuna, {}, "tuna", "_TUNA_COMPLETE").get_completions(before, last)
    return [item.value for item in found]


def test_commands_are_completed_without_loading_them() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tuna), "get_command", None)
        assert completed("") == list(commands())
        assert completed("init") == ["init-session"]
        assert "--debug" in completed("--d")


def test_what_the_database_knows_is_completed(loaded: Callable[..., Any]) -> None:
    assert completed("report", "--session-id", "") == ["1"]
    assert completed("compare", "--session-id", "1", "--session-id", "") == ["1"]
    assert completed("golden", "build", "1", "--session-id", "") == ["1"]
    assert completed("configs", "-t", "sm") == ["small"]
    assert completed("init-session", "no") == ["noop"]
    assert completed("load-jobs", "-s", "Noop1,Noop2") == ["Noop1,Noop2"]
    assert completed("reproduce", "--library", "tvm", "--solver", "") == []
    assert "Noop3" in completed("reproduce", "--library", "noop", "--solver", "")


def test_where_there_is_nothing_nothing_is_made(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed("report", "--session-id", "") == []
    assert not (empty_home / "tuna.sqlite").exists()
    monkeypatch.setenv("TUNA_DB_URL", "mysql+pymysql://me:secret@127.0.0.1:9/tuna")
    get_settings.cache_clear()
    assert completed("report", "--session-id", "") == []


def test_every_command_completes_what_is_known() -> None:
    """By the names of parameters, so that a new command does too."""
    options.attach(tuna)
    for name in commands():
        command = tuna.get_command(click.Context(tuna), name)
        assert command is not None
        options.attach(command)
    found = [one for one in parameters(tuna) if one.name in options.KNOWN]
    assert len(found) > 30
    assert all(one.type is options.KNOWN[str(one.name)] for one in found)
