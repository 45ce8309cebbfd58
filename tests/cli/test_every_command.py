"""Every command with bad values: one sentence, the documented exit code, nothing left behind.

The commands and their parameters are read from the programs themselves, so that a new one is
checked without being named here.
"""

from __future__ import annotations

import contextlib
import io
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from command_lines import PROGRAMS, Ended
from databases import SqliteTemplate

from tuna.cli import options, seeds
from tuna.cli.main import guarded
from tuna.errors import TunaError
from tuna.queue.connection import release_services
from tuna.settings import Settings, get_settings

LAYERS = "MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1\n"
#: Values that exist, by the parameter's name; any other text parameter gets `x`.
SAMPLES = {
    "library": "noop", "tag": "small", "config_tag": "small", "driver": LAYERS.strip(),
    "key": LAYERS.strip(), "form": "json",
    "solver": "Noop1", "solvers": "Noop1", "last": "measure", "steps": "build",
    "fin_steps": "build", "listen": "127.0.0.1:0",
    "command": "true", "conditions": "a=b", "pairs": "a=b", "shapes": "x=1",
}  # fmt: skip
#: Text that nothing is looked up by: labels, names of what is made, and what is only compared.
FREE = {
    "behind",
    "reason", "label", "name of init", "filename", "command", "model", "md_version", "framework",
    "fw_version", "add_model",
    "add_framework", "rocm_version", "miopen_version", "rocm_v", "miopen_v", "arch", "ttl", "url",
    "target", "layer", "shape",
    "stored",  # of --log-to: a folder that is made
    "owner",  # of a session: any command
}  # fmt: skip
#: Where a name is given to what is made.
MAKES = {
    (("import",), "tag"),
    (("capture",), "tag"),
    (("import_configs",), "tag"),
    (("tune",), "tag"),
    (("tune",), "name"),
}
pytestmark = pytest.mark.keeps_processes  # the private Redis, until the module's end
DOCUMENTED = {error.exit_code for error in TunaError.__subclasses__()} | {TunaError.exit_code, 3}


class Line(NamedTuple):
    """A command of a program."""

    program: str
    words: tuple[str, ...]
    command: click.Command

    def __str__(self) -> str:
        return " ".join((self.program, *self.words))


def lines(program: str, command: click.Command, words: tuple[str, ...] = ()) -> Iterator[Line]:
    """The command itself if it can be called, and those below it."""
    if not isinstance(command, click.Group):
        yield Line(program, words, command)
        return
    if command.invoke_without_command:
        yield Line(program, words, command)
    context = click.Context(command)
    for name in ("noop",) if program == "go_fish" and not words else command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        yield from lines(program, below, (*words, name))


LINES = [line for name, program in PROGRAMS.items() for line in lines(name, program)]


def valued(command: click.Command) -> list[click.Parameter]:
    """The parameters that take a value."""
    return [
        one
        for one in command.params
        if not (isinstance(one, click.Option) and (one.is_flag or one.is_eager))
    ]


def spelled(parameter: click.Parameter, value: object) -> list[str]:
    return (
        [max(parameter.opts, key=len), str(value)]
        if isinstance(parameter, click.Option)
        else [str(value)]
    )


class Scene:
    """A home with a session of 20 jobs, in which nothing may change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "layers.txt").write_text(LAYERS)
        (folder / "other.bin").write_bytes(b"\x80\xff\xfeMIOpenDriver conv \xe9\n" * 3)
        for words in (
            ("init-session", "noop", "-l", "test"), ("import", "layers.txt", "-t", "small"),
            ("update-solvers", "noop"),
            ("applicability", "--session-id", "1"), ("load-jobs", "--session-id", "1"),
        ):  # fmt: skip
            assert self.type("tuna", *words).code == 0
        self._reader = sqlite3.connect(folder / "home" / "tuna.sqlite")

    def type(self, program: str, *words: str) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        respell = {} if program == "tuna" else {"respell": seeds.respell}
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = guarded(PROGRAMS[program], list(words), program, **respell)
        return Ended(code, out.getvalue(), err.getvalue())

    def words(self, line: Line, chosen: click.Parameter | None, value: object) -> list[str]:
        """The command line with what it cannot do without, and the value of one parameter."""
        words: list[str] = list(line.words)
        arguments: list[str] = []
        for parameter in valued(line.command):
            if parameter is chosen:
                found = spelled(parameter, value)
            elif parameter.required or parameter.name in ("session_id", "session_ids"):
                found = spelled(parameter, self.sample(parameter))
            else:
                continue
            if isinstance(parameter, click.Option):
                words += found
            else:
                arguments += found
        return words + arguments

    def sample(self, parameter: click.Parameter) -> object:
        kind = parameter.type
        if isinstance(kind, click.Choice):
            return kind.choices[0]
        if isinstance(kind, click.types.IntParamType):
            return 1
        if isinstance(kind, click.Path):
            return self.folder / (
                "made" if type(kind) is type(options.OUTPUT_FILE) else "layers.txt"
            )
        return SAMPLES.get(str(parameter.name), "x")

    def state(self) -> tuple[object, ...]:
        """What a command may leave behind: rows and files."""
        tables = [
            name
            for (name,) in self._reader.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1"
            )
        ]
        counts = [
            self._reader.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables
        ]
        files = sorted(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if "home" not in path.parts
        )
        return (counts, files)

    def refused(self, line: Line, words: list[str], codes: set[int], about: str) -> list[str]:
        """What is wrong with the way in which a command line is refused."""
        before = self.state()
        try:
            ended = self.type(line.program, *words)
        except Exception as error:
            return [f"{about}: {words}: {type(error).__name__}: {error}"]
        wrong = []
        if ended.code not in codes:
            wrong.append(f"exit code {ended.code}")
        sentences = [text for text in ended.err.splitlines() if text.startswith("Error: ")]
        if (
            len(sentences) != 1
            or not sentences[0].rstrip().endswith((".", "?", "!"))
            or "Traceback" in ended.err
        ):
            wrong.append(f"not one sentence: {ended.err!r}")
        if self.state() != before:
            wrong.append("it left something behind")
        return [f"{about}: {words}: {'; '.join(wrong)}"] if wrong else []


@pytest.fixture(scope="module")
def scene(
    tmp_path_factory: pytest.TempPathFactory, sqlite_template: SqliteTemplate
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene")
    (folder / "home").mkdir()
    sqlite_template.copy_to(folder / "home" / "tuna.sqlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TUNA_HOME", str(folder / "home"))
        patch.setenv("TUNA_SIMULATED", "1")
        patch.setenv("COLUMNS", "40")
        get_settings.cache_clear()
        yield Scene(folder)
        release_services(Settings.model_construct(home=folder / "home", broker_url=None))
    get_settings.cache_clear()


#: Commands that start the embedded Redis for a value that they refuse only then.
REDIS = {"token", "workers"}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.service) if REDIS & set(str(line).split()) else line
        for line in LINES
    ],
    ids=str,
)
def test_bad_values_of_every_command_end_in_one_sentence(line: Line, scene: Scene) -> None:
    wrong: list[str] = []
    for parameter in valued(line.command):
        for value, codes, about in bad_values(line, parameter, scene):
            wrong += scene.refused(line, scene.words(line, parameter, value), codes, about)
    assert not wrong, "\n".join(wrong)


def bad_values(
    line: Line, parameter: click.Parameter, scene: Scene
) -> Iterator[tuple[object, set[int], str]]:
    """Values that a parameter must refuse, the exit codes that say so, and what they are."""
    kind, name = parameter.type, str(parameter.name)
    if line.program == "tuna":
        yield "", {2}, "an empty value"
    if isinstance(kind, click.types.IntParamType):
        yield 10**22, {2}, "a number of 23 digits"
        yield "nosuch", {2}, "no number"
    elif isinstance(kind, click.Choice):
        yield "nosuch", {2}, "an unknown choice"
    elif type(kind) is type(options.OUTPUT_FILE):
        yield "/proc/nosuch", {2}, "an output that cannot be written"
        yield scene.folder / "nosuch" / "file", {2}, "an output into a folder that is not there"
    elif isinstance(kind, click.Path):
        yield scene.folder / "nosuch", {2}, "a file that is not there"
        yield scene.folder / "other.bin", {1, 2}, "a file that is not UTF-8"
        if (line.words[-1:], name) != (("import",), "file"):
            yield "-", {2}, "standard input as file"
    elif (
        isinstance(kind, click.types.StringParamType)
        and name not in FREE
        and (line.words[-1:], name) not in MAKES
    ):
        yield "nosuch", DOCUMENTED, "an unknown name"


@pytest.mark.parametrize("line", LINES, ids=str)
def test_an_unknown_option_names_the_nearest(line: Line, scene: Scene) -> None:
    names = [max(one.opts, key=len) for one in line.command.params if isinstance(one, click.Option)]
    long = [name for name in names if len(name) > 5]
    if not long or line.words[-1:] == ("capture",):
        return
    ended = scene.type(line.program, *line.words, f"{long[0][:-1]}x{long[0][-1]}")
    assert ended.code == 2
    assert long[0] in ended.err


def test_an_unknown_command_names_the_nearest(scene: Scene) -> None:
    groups = [
        ("tuna",),
        *{line.words[:-1] for line in LINES if line.program == "tuna" and len(line.words) > 1},
    ]
    for words in ((), *(group for group in groups if group != ("tuna",))):
        name = next(
            line.words[len(words)]
            for line in LINES
            if line.program == "tuna"
            and line.words[: len(words)] == words
            and len(line.words) > len(words)
        )
        ended = scene.type("tuna", *words, f"{name}x")
        assert ended.code == 2, words
        assert f"Did you mean {name!r}?" in ended.err or f"'{name}'" in ended.err, ended.err


@pytest.mark.parametrize("line", LINES, ids=str)
def test_the_help_of_every_command_fits_a_narrow_terminal(line: Line, scene: Scene) -> None:
    ended = scene.type(line.program, *line.words, "--help")
    assert ended.code == 0
    lines = ended.out.splitlines()[1:]
    # Click needs 50 columns; what it cannot wrap is a single word: the name of an option, or a
    # path.
    assert not [
        text
        for text in lines
        if len(text) > 51 and len(text.split()) > 2 and not text.lstrip().startswith("-")
    ]
