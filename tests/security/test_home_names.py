"""A TUNA_HOME whose name means something in a URL: all that Tuna keeps is in it, and nothing beside
it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended
from settings_changes import change_setting

from tuna.artifacts.store import Artifacts
from tuna.settings import get_settings


@pytest.mark.parametrize("name", ["a?b=c", "a#b", "a b", "a%41b", "ä:b"])
def test_a_home_keeps_its_database_and_its_artifacts(
    name: str,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    type_in: Callable[..., Ended],
) -> None:
    """SQLite's file is not cut off at the question mark, nor do artifacts lie in `a%20b`."""
    odd = tmp_path / "homes" / name
    odd.parent.mkdir()
    change_setting(monkeypatch, "TUNA_HOME", str(odd))
    assert type_in("tuna", "init-session", "noop", "-l", "r").code == 0
    digest = Artifacts.from_settings(get_settings()).put(b"code")
    assert {path.name for path in odd.parent.iterdir()} == {name}
    assert (odd / "tuna.sqlite").stat().st_size > 0
    assert (odd / "artifacts" / digest[:2] / digest).read_bytes() == b"code"


def test_an_empty_name_is_not_the_current_folder(
    home: Path, tmp_path: Path, type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a variable that a script has not set."""
    change_setting(monkeypatch, "TUNA_HOME", "")
    before = sorted(tmp_path.iterdir())
    ended = type_in("tuna", "status")
    assert ended.code == 2
    assert "TUNA_HOME is not usable: it is empty" in ended.err
    assert sorted(tmp_path.iterdir()) == before
