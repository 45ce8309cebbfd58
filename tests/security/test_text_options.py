"""Every text option of every command: stored verbatim or refused in one sentence; never executed,
never a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa
from command_lines import PROGRAMS
from settings_changes import change_setting
from shared_data import DRILLS

from tuna import api
from tuna.cli.main import commands, load_command
from tuna.coordinator.session_run import Progress
from tuna.db.engine import make_engine, reading
from tuna.db.models import Base, ConfigTag, Framework, Job, Model, Session
from tuna.settings import get_settings

pytestmark = [pytest.mark.both_databases_in_drills, pytest.mark.usefixtures("forked")]

Type = Callable[..., Any]
NASTY = {
    "SQL": "' or '1'='1\"; DROP TABLE job; -- x') UNION SELECT key FROM config -- `d\\'e🐟é",
    "patterns": "%_*[a-z]? %s %(x)s {0} {x.__class__} ${HOME} $(id) `id`",
    "newlines": "a\nb\r\nc\x1b[31m\x1b]0;x\x07\u202e",
    "NUL": "a\0b",
    "10,000 characters": "x" * 10_000,
    "half a character": "a\ud800b",
    "nothing": "",
    "a path upwards": "../../../../tmp/x",
}
#: Differences between the two databases.
_ON_MARIADB = ("SQL", "10,000 characters")
_STORED = ("SQL", "patterns", "newlines", "a path upwards")
LAYERS = """\
MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1
MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 16 -y 1 -x 1 -F 1
"""
#: Command -> other arguments that it requires.
_NEEDS: dict[str, dict[str, str]] = {
    "init-session": {"library": "noop", "--label": "x"},
    "import": {"file": "layers.txt", "--tag": "t"},
    "configs": {"--tag": "small"},
    "reproduce": {"driver": LAYERS.splitlines()[0], "--library": "noop", "--solver": "Noop1",
     "--step": "build"},
    "export": {"--form": "find", "--golden": "1", "--arch": "none"},
    "import-db": {"file": "gfx90a68.HIP.fdb.txt", "--rocm-version": "6", "--miopen-version": "3"},
    "merge": {"master": "gfx90a68.HIP.fdb.txt", "targets": "gfx90a68.HIP.fdb.txt",
     "--directory": "merged"},
    "db-diff": {"a": "gfx90a68.HIP.fdb.txt", "b": "gfx90a68.HIP.fdb.txt"},
    "check-db": {"directory": "."},
    "load_job": {"--session_id": "1", "--tag": "small", "--label": "x"},
    "import_configs": {"--file_name": "layers.txt", "--tag": "t", "--model": "m",
     "--md_version": "1",
                       "--framework": "f", "--fw_version": "1"},
    "export_db": {"--session_id": "1", "form": "-f"},
}  # fmt: skip
#: Commands whose exit code 1 is a result, and those that run until they are stopped.
_SAYS_BY_CODE = {"check-db", "doctor"}
_NOT_RUN = {"worker", "quickstart", "watch"}


def _walk(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    if path[0] == "tuna" and len(path) == 1:
        children = {name: load_command(name) for name in commands()}
    elif path == ("go_fish",):
        children = {"noop": command.get_command(click.Context(command), "noop")}
    else:
        children = dict(command.commands)
        if command.invoke_without_command:
            yield path, click.Command(path[-1], params=command.params)
    for name, child in children.items():
        yield from _walk(child, (*path, name))


def _takes_text(parameter: click.Parameter) -> bool:
    return isinstance(parameter.type, click.types.StringParamType | click.Path) and not getattr(
        parameter, "is_flag", False
    )


def _cases() -> list[tuple[tuple[str, ...], click.Command, click.Parameter]]:
    return [
        (path, command, parameter)
        for name, program in PROGRAMS.items()
        for path, command in _walk(program, (name,))
        if not _NOT_RUN & set(path)
        for parameter in command.params
        if _takes_text(parameter)
    ]


def _words(
    path: tuple[str, ...], command: click.Command, tried: click.Parameter, text: str
) -> list[str]:
    """A command line with `text` as one parameter and valid values for the other required ones."""
    needs = _NEEDS.get(path[-1], {})
    words = [*path[1:]]
    arguments = []
    for parameter in command.params:
        flag = max(parameter.opts, key=len)
        if parameter is tried:
            value: str | None = text
        elif flag in needs:
            value = needs[flag]
        elif parameter.required:
            value = _default(parameter)
        else:
            continue
        if isinstance(parameter, click.Argument):
            arguments.append(value or "")
        else:
            words += [flag, value or ""]
    if "form" in needs:
        words.append(needs["form"])
    return [*words, "--", *arguments] if arguments else words


def _default(parameter: click.Parameter) -> str:
    if isinstance(parameter.type, click.Choice):
        return str(parameter.type.choices[0])
    return "1" if isinstance(parameter.type, click.types.IntParamType | click.IntRange) else "noop"


def _rows(engine: sa.Engine) -> dict[str, int]:
    with reading(engine) as connection:
        return {
            table.name: (
                connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            )
            for table in Base.metadata.sorted_tables
        }


@pytest.fixture()
def prepared(type_in: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Type:
    """A session with jobs; commands that would wait for workers are replaced by stubs."""
    (tmp_path / "layers.txt").write_text(LAYERS)
    key = "64-7-7-1x1-64-7-7-1-0x0-1x1-1x1-0-NCHW-FP32-F"
    (tmp_path / "gfx90a68.HIP.fdb.txt").write_text(
        f"{key}=S:1.5,0,miopenConvolutionFwdAlgoDirect\n"
    )
    for words in (
        ("init-session", "noop", "-l", "test"), ("import", "layers.txt", "-t", "small"),
        ("update-solvers", "noop"),
        ("applicability", "--session-id", 1), ("load-jobs", "--session-id", 1, "-l", "test"),
    ):  # fmt: skip
        assert type_in("tuna", *words).code == 0
    through = Progress({}, total=1, unfinished=0, errored=0)
    monkeypatch.setattr(api, "enqueue", lambda *_, **__: through)
    monkeypatch.setattr(api, "run", lambda *_, **__: through)
    return type_in


@pytest.fixture()
def database(
    request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sa.Engine]:
    """The configured database, SQLite or MariaDB."""
    if request.param == "mariadb":
        engine: sa.Engine = request.getfixturevalue("mariadb_engine")
        change_setting(monkeypatch, "TUNA_DB_URL", engine.url.render_as_string(hide_password=False))
    else:
        engine = make_engine(get_settings().sql_url)
    monkeypatch.setattr(
        "tuna.db.database.make_engine", lambda _: engine
    )  # a new connection for each command takes its time
    yield engine
    engine.dispose()


def test_the_walk_finds_the_options_of_every_program() -> None:
    found = {(path[0], parameter.opts[-1]) for path, _, parameter in _cases()}
    assert {
        ("tuna", "--label"),
        ("tuna", "--tag"),
        ("go_fish", "--add_model"),
        ("load_job", "--solvers"),
    } <= found
    assert len(_cases()) > 60


@pytest.mark.service
@pytest.mark.parametrize(
    ("database", "name"),
    [*(("sqlite", name) for name in NASTY), *(("mariadb", name) for name in _ON_MARIADB)],
    indirect=["database"],
)
def test_every_text_option_takes_or_refuses_what_is_typed(
    database: sa.Engine, prepared: Type, name: str
) -> None:
    before, wrong = _rows(database), []
    share = 3 if DRILLS == 1 else 1  # then each option with every third of the texts
    for path, command, parameter in _cases()[[*NASTY].index(name) % share :: share]:
        words = _words(path, command, parameter, NASTY[name])
        try:
            ended = prepared(path[0], *words)
        except BaseException as error:  # what guarded() lets through would be a traceback
            wrong.append(f"{path} {parameter.name}: {type(error).__name__}: {error!s:.200}")
            continue
        # as if it had not been given: then it is looked for here
        absent = ended.code == 6 and not NASTY[name]
        differs = ended.code == 1 and path[-1] in _SAYS_BY_CODE
        if not (ended.code in (0, 2, 3) or absent or differs) or "Traceback" in ended.err:
            wrong.append(f"{path} {parameter.name}: {ended}"[:400])
    assert not wrong, "\n".join(wrong)
    after = _rows(database)
    assert after.keys() == before.keys()
    assert {table for table in after if after[table] < before[table]} == set()
    assert after["job"] == before["job"] + (after["job"] - before["job"]) // 20 * 20


@pytest.mark.parametrize(
    ("database", "name"),
    [*(("sqlite", name) for name in _STORED), ("mariadb", "SQL")],
    indirect=["database"],
)
def test_what_is_taken_is_stored_letter_for_letter(
    database: sa.Engine, prepared: Type, name: str
) -> None:
    text = NASTY[name]
    assert prepared("tuna", "init-session", "noop", "-l", text).code == 0
    assert prepared("tuna", "import", "layers.txt", "-t", text).code == 0
    assert prepared("go_fish", "noop", "--add_model", text, "--md_version", text[:64]).code == 0
    assert prepared("go_fish", "noop", "--add_framework", text, "--fw_version", text[:64]).code == 0
    assert (
        prepared("tuna", "load-jobs", "--session-id", 1, "--steps", "build", "-l", text).code == 0
    )
    with reading(database) as connection:
        for column in (Session.reason, ConfigTag.tag, Model.name, Framework.name, Job.reason):
            assert text in connection.execute(sa.select(column)).scalars().all(), column
