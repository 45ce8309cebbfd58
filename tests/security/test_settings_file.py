"""A settings file names programs that run as its reader: where it may lie, whose it may be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended

from tuna.errors import BadInput
from tuna.settings import get_settings

OTHER = 54321
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
TypeIn = Callable[..., Ended]


@pytest.fixture()
def named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that TUNA_CONFIG names, in a folder of its own."""
    folder = tmp_path / "etc"
    folder.mkdir(mode=0o755)
    path = folder / "mine.toml"
    path.write_text("max_attempts = 7\n")
    path.chmod(0o644)
    monkeypatch.setenv("TUNA_CONFIG", str(path))
    return path


def _refusal() -> str:
    get_settings.cache_clear()
    with pytest.raises(BadInput) as caught:
        get_settings()
    return f"{caught.value} {caught.value.hint}"


def _is_read() -> bool:
    get_settings.cache_clear()
    return get_settings().max_attempts == 7


@pytest.mark.service
def test_a_file_in_the_current_folder_runs_nothing(
    home: Path, tmp_path: Path, type_in: TypeIn
) -> None:
    """Whoever made the folder, or what was unpacked there, wrote it."""
    ran = tmp_path / "ran"
    (tmp_path / "tuna.toml").write_text(f'before_worker = "touch {ran}"\n')
    tmp_path.chmod(0o1777)
    if os.getuid() == 0:
        os.chown(tmp_path / "tuna.toml", OTHER, -1)
    get_settings.cache_clear()
    ended = type_in("tuna", "worker", "compile", "--once")
    tmp_path.chmod(0o700)
    assert not ran.exists()
    assert "tuna.toml in the current folder is not read" in ended.err
    assert "TUNA_CONFIG=./tuna.toml" in ended.err
    assert str(tmp_path / "config" / "tuna" / "tuna.toml") in ended.err


@pytest.mark.service
def test_a_celery_worker_logs_that_it_is_ignored(home: Path, tmp_path: Path) -> None:
    (tmp_path / "tuna.toml").write_text('before_worker = "false"\n')
    words = ["worker", "-Q", "nothing"]
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tuna.celery_app", *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "tuna.toml in the current folder is not read" in done.stdout + done.stderr


def test_the_file_that_is_named_is_read(named: Path, type_in: TypeIn) -> None:
    assert _is_read()
    ended = type_in("tuna", "status")
    assert (ended.code, ended.err) == (0, "")


def test_the_file_in_the_users_configuration_folder_is_read(
    home: Path, tmp_path: Path, type_in: TypeIn
) -> None:
    (tmp_path / "config" / "tuna").mkdir(parents=True, mode=0o700)
    (tmp_path / "config" / "tuna" / "tuna.toml").write_text("max_attempts = 7\n")
    assert _is_read()
    (tmp_path / "tuna.toml").symlink_to("config/tuna/tuna.toml")
    assert type_in("tuna", "status").err == ""


def test_a_configuration_folder_relative_to_the_current_one_is_none(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a home `~` stays as it is."""
    (tmp_path / "config" / "tuna").mkdir(parents=True)
    (tmp_path / "config" / "tuna" / "tuna.toml").write_text("max_attempts = 7\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    assert not _is_read()


@pytest.mark.parametrize("mode", [0o646, 0o664, 0o666])
def test_a_file_that_others_may_write_to_is_refused(named: Path, mode: int) -> None:
    named.chmod(mode)
    assert f"other users may write to {named}" in _refusal()
    assert f"chmod go-w {named}" in _refusal()
    named.chmod(mode & 0o755)
    assert _is_read()


@pytest.mark.parametrize("mode", [0o757, 0o775, 0o777])
def test_a_folder_in_which_others_may_replace_it_is_refused(named: Path, mode: int) -> None:
    named.parent.chmod(mode)
    assert f"other users may write to {named.parent}" in _refusal()
    named.parent.chmod(mode | 0o1000)  # as /tmp, where they may not
    assert _is_read()


@as_root
def test_a_file_a_folder_or_a_link_of_another_user_is_refused(
    named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = named.parent / "link.toml"
    link.symlink_to("mine.toml")
    os.chown(link, OTHER, -1, follow_symlinks=False)
    monkeypatch.setenv("TUNA_CONFIG", str(link))
    assert f"{link} belongs to another user" in _refusal()
    monkeypatch.setenv("TUNA_CONFIG", str(named))
    for place in (named, named.parent):
        os.chown(place, OTHER, -1)
        assert f"{place} belongs to another user" in _refusal()
        os.chown(place, 0, -1)
    assert _is_read()


def test_a_secret_of_kubernetes_is_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volume is a folder with the sticky bit, the file a link through a link to one of root."""
    volume = tmp_path / "secrets"
    (volume / "..2026_11_28").mkdir(parents=True)
    (volume / "..2026_11_28" / "tuna.toml").write_text("max_attempts = 7\n")
    (volume / "..2026_11_28" / "tuna.toml").chmod(0o440)
    (volume / "..data").symlink_to("..2026_11_28")
    (volume / "tuna.toml").symlink_to("..data/tuna.toml")
    volume.chmod(0o3777)
    monkeypatch.setenv("TUNA_CONFIG", str(volume / "tuna.toml"))
    assert _is_read()


def test_links_in_a_circle_end(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("../" + tmp_path.name + "/a")
    monkeypatch.setenv("TUNA_CONFIG", str(tmp_path / "a"))
    assert "TUNA_CONFIG names" in _refusal() or "links" in _refusal()
