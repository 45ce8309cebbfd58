"""Bad input gets one clear sentence, a non-zero exit code, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from settings_changes import change_setting
from shared_data import needed_program

from tuna import settings
from tuna.cli.main import guarded
from tuna.errors import StorageFull
from tuna.plugins import Plugins
from tuna.settings import get_settings

Type = Callable[..., object]
ROOT = Path(__file__).parents[2]


def _refused(ended: object, code: int, *words: str) -> None:
    assert ended.code == code, ended
    first, *rest = ended.err.strip().splitlines()
    assert first.startswith("Error: "), ended.err
    assert len(rest) <= 1, ended.err
    for word in words:
        assert word in ended.err
    assert "Traceback" not in ended.err


def test_an_unknown_library_is_named_with_those_there_are(type_in: Type) -> None:
    _refused(type_in("tuna", "init-session", "nope", "-l", "x"), 3, "nope", "example", "tvm")


def test_an_unknown_session_is_refused_by_every_command(type_in: Type) -> None:
    for words in (
        ("status",), ("applicability",), ("load-jobs",), ("run",), ("enqueue",), ("report",),
        ("export", "--form", "find"),
    ):  # fmt: skip
        _refused(type_in("tuna", words[0], "--session-id", 77, *words[1:]), 3, "Unknown session 77")


def test_only_a_coordinator_of_all_sessions_stays(type_in: Type) -> None:
    _refused(type_in("tuna", "enqueue", "--session-id", 1, "--stay"), 2, "--all --stay")


def test_an_unknown_tag_step_or_solver_is_named(loaded: Type) -> None:
    _refused(loaded("tuna", "configs", "-t", "nope"), 3, "'nope'", "small")
    for words in (
        ("load_job", "--session_id", 1, "-l", "x", "-t", "nope"),
        ("tuna", "applicability", "--session-id", 1, "-t", "nope"),
        ("export_db", "--session_id", 1, "-f", "--config_tag", "nope"),
    ):
        _refused(loaded(*words), 3, "'nope'")
    _refused(
        loaded("load_job", "--session_id", 1, "-t", "small", "--fin_steps", "fry", "-l", "x"),
        3,
        "'fry'",
        "build",
    )
    for solver in ("NoSuch", "Noop1,NoSuch", "noop1"):
        words = ("--session_id", 1, "-t", "small", "-s", solver, "-l", "x")
        _refused(loaded("load_job", *words), 3, "has no solver", "Noop0")
    _refused(
        loaded("go_fish", "noop", "--session_id", 1, "--fin_steps", "fry", "--enqueue_only"),
        3,
        "'fry'",
    )
    assert json.loads(loaded("tuna", "status", "--json").out)[0]["jobs"] == {"new": 20}


def test_a_session_of_another_library_is_refused(loaded: Type) -> None:
    _refused(
        loaded("go_fish", "example", "--update_applicability", "--session_id", 1),
        2,
        "belongs to noop",
    )


@pytest.mark.parametrize(
    ("content", "word"), [(b"", "empty"), (b"\x7fELF\x00\x01\xff\xfe", "layers.bin")]
)
def test_an_empty_or_binary_file_is_refused_before_anything_is_written(
    type_in: Type, tmp_path: Path, empty_home: Path, content: bytes, word: str
) -> None:
    path = tmp_path / "layers.bin"
    path.write_bytes(content)
    _refused(type_in("tuna", "import", path, "-t", "a"), 2, word)
    assert not (empty_home / "tuna.sqlite").exists()


def test_a_missing_file_is_refused(type_in: Type) -> None:
    _refused(type_in("tuna", "import", "nowhere.txt", "-t", "a"), 2, "nowhere.txt")


def test_one_bad_line_loses_only_itself_unless_strict(type_in: Type, layers: Path) -> None:
    with open(layers, "a") as lines:
        lines.write("MIOpenDriver conv --no_such_flag 1 -F 1\n")
    _refused_strict = type_in("tuna", "import", layers, "-t", "a", "--strict")
    assert _refused_strict.code == 2
    assert type_in("tuna", "configs", "-t", "a").code == 3
    ended = type_in("tuna", "import", layers, "-t", "a")
    assert ended.code == 0
    assert "layers.txt:4" in ended.err
    assert "no_such_flag" in ended.err
    assert "2 accepted" in ended.out
    assert "1 rejected" in ended.out


def test_a_file_that_is_no_database_is_refused(type_in: Type, home: Path) -> None:
    (home / "tuna.sqlite").write_bytes(b"this is not a database at all, it is only text" * 100)
    _refused(type_in("tuna", "status"), 4, "not a database")


def test_a_newer_schema_is_refused(type_in: Type, home: Path) -> None:
    type_in("tuna", "status")
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    _refused(type_in("tuna", "status"), 4, "9999", "newer")


def test_a_database_of_something_else_is_refused(type_in: Type, empty_home: Path) -> None:
    with sqlite3.connect(empty_home / "tuna.sqlite") as connection:
        connection.execute("CREATE TABLE precious (id INTEGER)")
    _refused(type_in("tuna", "status"), 4, "precious")
    _refused(type_in("tuna", "db", "upgrade"), 4, "precious")


def test_a_configured_database_is_not_upgraded_by_itself(
    type_in: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_setting(monkeypatch, "TUNA_DB_URL", f"sqlite:///{tmp_path}/team.sqlite")
    _refused(type_in("tuna", "status"), 4, "is empty", "tuna db upgrade")
    assert type_in("tuna", "db", "upgrade").code == 0
    assert type_in("tuna", "status").code == 0


def test_a_database_server_that_is_not_there_is_one_sentence_without_the_password(
    type_in: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_setting(monkeypatch, "TUNA_DB_URL", "mysql+pymysql://me:hunter2@127.0.0.1:9/tuna")
    ended = type_in("tuna", "status")
    _refused(ended, 4, "127.0.0.1")
    assert "hunter2" not in ended.err


def test_a_broker_that_is_not_there_is_one_sentence_without_the_password(
    loaded: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_setting(monkeypatch, "TUNA_BROKER_URL", "redis://:hunter2@127.0.0.1:9/0")
    ended = loaded("tuna", "enqueue", "--session-id", 1)
    assert ended.code == 5
    assert "Error: Redis at 127.0.0.1:9 cannot be used" in ended.err
    assert "Traceback" not in ended.err
    assert "hunter2" not in ended.err


def test_a_bad_setting_is_named(type_in: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    change_setting(monkeypatch, "TUNA_MAX_ATTEMPTS", "none")
    _refused(type_in("tuna", "status"), 2, "TUNA_MAX_ATTEMPTS")


def test_a_home_that_cannot_be_made_is_named(
    type_in: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    change_setting(monkeypatch, "TUNA_HOME", str(tmp_path / "file" / "home"))
    _refused(type_in("tuna", "status"), 2, "file/home")


def test_a_session_without_jobs_says_what_to_do(type_in: Type) -> None:
    type_in("tuna", "init-session", "noop", "-l", "x")
    _refused(type_in("tuna", "run", "--session-id", 1), 2, "no jobs", "load")
    _refused(
        type_in("tuna", "load-jobs", "--session-id", 1, "-l", "x"), 2, "tuna update-solvers noop"
    )


def test_an_export_of_nothing_writes_nothing(loaded: Type, tmp_path: Path) -> None:
    for flag in ("-p", "-f", "-k", "--tvm_db"):
        ended = loaded("export_db", "--session_id", 1, flag)
        assert ended.code != 0
        assert ended.err.startswith("Error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "layers.txt"]


@pytest.mark.parametrize(
    "words",
    [
        ("tuna", "status", "--session-id"),
        ("tuna", "run", "--session-id"),
        ("tuna", "report", "--session-id"),
        ("tuna", "cancel", "--session-id", "1", "--job"),
        ("tuna", "golden", "build", "1", "--session-id"),
        ("load_job", "-t", "small", "-l", "x", "--session_id"),
        ("export_db", "-f", "--session_id"),
        ("go_fish", "noop", "--update_applicability", "--session_id"),
    ],
    ids=" ".join,
)
def test_an_id_that_no_database_can_hold_is_a_bad_value(
    loaded: Type, words: tuple[str, ...]
) -> None:
    ended = loaded(*words, "1" + 22 * "0")
    assert ended.code == 2
    assert "10000000000000000000000 is too large for an id" in ended.err
    assert loaded(*words, 2**63 - 1).code == 3, "one that is just not there is told so"


def test_an_import_that_cannot_be_read_leaves_no_session(type_in: Type, tmp_path: Path) -> None:
    (tmp_path / "gfx90a68.HIP.fdb.txt").write_text("")
    facts = ("--rocm-version", "6.2.0", "--miopen-version", "3.3.0")
    _refused(
        type_in("tuna", "import-db", "gfx90a68.HIP.fdb.txt", *facts), 2, "gfx90a68.HIP.fdb.txt"
    )
    assert json.loads(type_in("tuna", "status", "--json").out) == []


def test_a_settings_file_that_is_not_there_or_has_what_is_no_setting_is_refused(
    type_in: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_setting(monkeypatch, "TUNA_CONFIG", str(tmp_path / "nosuch.toml"))
    _refused(type_in("tuna", "status"), 2, "nosuch.toml")
    (tmp_path / "tuna.toml").write_text("leas_s = 3.0\n")
    change_setting(monkeypatch, "TUNA_CONFIG", str(tmp_path / "tuna.toml"))
    _refused(type_in("tuna", "status"), 2, "leas_s", "did you mean lease_s?")


def test_settings_of_a_distribution_that_is_not_installed_are_ignored_with_a_warning(
    type_in: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no worker machine without the service could share the file of its team."""
    monkeypatch.setattr(settings, "_SECTIONS", Plugins("tuna.none", "section", type))
    (tmp_path / "tuna.toml").write_text("lease_s = 7.0\nspace_mib = 5\n")
    monkeypatch.setenv("TUNA_CONFIG", str(tmp_path / "tuna.toml"))
    change_setting(monkeypatch, "TUNA_SUBMIT_OPEN", "4")
    ended = type_in("tuna", "status")
    assert (ended.code, get_settings().lease_s) == (0, 7.0)
    assert ended.err == (
        "Warning: The settings file has space_mib, which only tuna-serve reads: it is not installed"
        " here\n"
    )
    (tmp_path / "tuna.toml").write_text("space_mbi = 5\n")
    get_settings.cache_clear()
    _refused(type_in("tuna", "status"), 2, "space_mbi")


def test_a_variable_that_looks_like_a_setting_is_warned_of(
    type_in: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that resemble no setting are ignored: Kubernetes sets TUNA_REDIS_PORT for a
    service."""
    monkeypatch.setenv("TUNA_EVAL_CPU", "1")
    monkeypatch.setenv("TUNA_REDIS_PORT", "tcp://10.0.0.1:6379")
    ended = type_in("tuna", "status")
    assert ended.code == 0
    assert ended.err == "Warning: unknown setting TUNA_EVAL_CPU; did you mean TUNA_EVAL_CPUS?\n"


def test_layers_are_read_from_standard_input(type_in: Type, layers: Path) -> None:
    with open(layers) as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", lines)
        assert "2 accepted" in type_in("tuna", "import", "-", "-t", "a").out


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_done(
    loaded: Type, empty_folder: Path
) -> None:
    for words in (
        ("report", "--session-id", 1, "-o", empty_folder / "nosuch" / "r.html"),
        ("export", "--session-id", 1, "--form", "json", "-d", empty_folder / "no" / "such"),
        ("quickstart", "-o", "/proc/foo"),
    ):
        ended = loaded("tuna", *words)
        assert ended.code == 2, ended
    assert list(empty_folder.iterdir()) == []
    assert len(json.loads(loaded("tuna", "status", "--json").out)) == 1


def test_a_full_disk_has_an_exit_code_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/srv/tuna/logs")

    assert guarded(write, []) == StorageFull.exit_code
    assert capsys.readouterr().err == (
        "Error: No space left on device: /srv/tuna/logs.\n  free some space and run it again\n"
    )


@pytest.fixture
def empty_folder(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_what_commands_write_by_default_is_not_offered_to_git() -> None:
    names = (
        "gfx90878.HIP.fdb.txt gfx90878.db gfx90878.db.txt gfx90878.kdb gfx90878.HIP.fdb.txt.bz2"
        " session-1.html"
    )
    found = subprocess.run(
        [needed_program("git"), "check-ignore", "--no-index", *names.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert found.stdout.split() == names.split()
