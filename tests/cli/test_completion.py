"""Shell completion of commands and options."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from tuna.cli.main import commands, tuna


def completed(word: str) -> list[str]:
    """What a shell offers for a word that is not finished."""
    found = ShellComplete(tuna, {}, "tuna", "_TUNA_COMPLETE").get_completions([], word)
    return [item.value for item in found]


def test_commands_are_completed_without_loading_them() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tuna), "get_command", None)
        assert completed("") == list(commands())
        assert completed("init") == ["init-session"]
        assert "--debug" in completed("--d")
