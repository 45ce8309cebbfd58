"""What an error tells a user to type is a command that works when pasted, with the options of the
program that was typed."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from command_lines import PROGRAMS
from settings_changes import change_setting

from tuna.cli import seeds
from tuna.cli.main import commands, tuna

TypeIn = Callable[..., Any]
ROOT = Path(__file__).parents[2]
#: What stands for a value in a sentence or a document, and one that can be parsed in its place.
WORDS = {"ID": "1", "N": "1", "VERSION": "1", "ROLE": "eval", "STATE": "new"}
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))


@functools.cache
def texts(module: Path) -> tuple[str, ...]:
    """The texts of a module that are no docstrings; what is filled in becomes 1, which is an id and
    a name."""
    source = module.read_text()
    if "tuna " not in source:
        return ()
    nodes, found = list(ast.walk(ast.parse(source))), []
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "1"
                    for part in node.values
                )
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        ):
            found.append(node.value)
    return tuple(found)


def pasted() -> Iterator[tuple[str, str]]:
    """Each command of `tuna` that a sentence or a document shows, and where."""
    for module in sorted(ROOT.glob("tuna/**/*.py")):
        for text in texts(module):
            for line in re.findall(r"`(tuna [^`]+)`", text):
                yield line, module.name
    for line in re.findall(r"`(tuna [^`]+)`", PAGES[0].read_text()):
        yield line, PAGES[0].name
    for page in PAGES:
        for line in re.findall(r"(?m)^    (tuna [a-z].*)$", page.read_text()):
            yield re.split(r"\s{2,}#|\s[>|]\s", line)[0], page.name


def test_each_command_that_is_shown_can_be_typed() -> None:
    wrong = []
    for line, where in sorted(set(pasted())):
        try:
            type_without_running(line)
        except Exception as error:
            wrong.append(f"{where}: {line}: {error!r}")
    assert not wrong, "\n".join(wrong)


def type_without_running(line: str) -> None:
    """Have Click take the command's words; raises what it raises for wrong ones, KeyError for a
    command that is none."""
    # a file of options
    words = [WORDS.get(word, word) for word in shlex.split(line)[1:] if not word.startswith("@")]
    if words[0] not in commands():
        if words[0].startswith("-") or "..." in line:
            return
        raise KeyError(words[0])
    command: click.Command = tuna
    context = click.Context(tuna, info_name="tuna")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, below, words = command.resolve_command(context, words)
        assert below is not None
        command, context = below, click.Context(below, parent=context, info_name=below.name)
    if words and words != ["--help"]:  # else only the command's name is mentioned
        with pytest.MonkeyPatch.context() as patch:
            for one in command.params:
                filled_in = isinstance(one.type, click.Choice) and any(
                    f"{option} 1" in line for option in one.opts
                )
                # what a document writes or reads need not be here
                if filled_in or isinstance(one.type, click.Path) or "FILE" in str(one.metavar):
                    patch.setattr(one, "type", click.STRING)
            command.make_context(command.name, words, parent=context.parent)


def test_commands_in_sentences_stand_in_backquotes() -> None:
    """So that the test above finds each of them."""
    names = "|".join(commands())
    wrong = [
        f"{module.name}: {text}"
        for module in sorted(ROOT.glob("tuna/**/*.py"))
        for text in texts(module)
        if re.search(rf"(?<!`)\btuna ({names})\b", text)
    ]
    # bytes to store, and how a signed message begins
    named = {"servers.py: tuna doctor 1\n"}
    named.add("remote_space.py: tuna cache")
    assert set(wrong) <= named


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("tune", "layers.txt", "-t", "mine"), "`MIOpenDriver conv "),
        (("import", "layers.txt", "-t", "mine"), "`MIOpenDriver conv "),
        (("tune", "model.onnx", "-o", "model.so"), "`python examples/make_models.py "),
        (("tune", "kernel.py", "--shapes", "shapes.json"), "examples/triton_kernels"),
        (("cache", "pack", "mykernels", "pack"), "docs/adapters.md"),
    ],
)
@pytest.mark.usefixtures("home")
def test_what_is_not_there_yet_comes_with_the_next_step(
    words: tuple[str, ...], shown: str, type_in: TypeIn
) -> None:
    """M6: a new user read "No such file or directory" and nothing else."""
    ended = type_in("tuna", *words)
    assert ended.code in {2, 3}
    assert shown in ended.err.splitlines()[1]
    assert (ROOT / shown.strip("` ").removeprefix("python ")).exists() or "MIOpen" in shown


@pytest.mark.usefixtures("forked")
def test_following_the_hints_leads_from_nothing_to_jobs(type_in: TypeIn, layers: Path) -> None:
    """Each refusal says what to type; that is pasted, until the command that was wanted works."""
    assert type_in("tuna", "init-session", "noop", "-l", "x").code == 0
    wanted = ("tuna", "run", "--session-id", 1)
    typed: list[tuple[Any, ...]] = [wanted]
    commands: list[str] = []
    while typed and len(commands) < 20:
        commands.append(" ".join(map(str, typed[-1][1:])))
        ended = type_in(*typed[-1])
        if ended.code == 0:
            typed.pop()
            continue
        (found,) = re.findall(r"`(tuna [^`]+)`", ended.err)
        typed.append(tuple(found.replace("FILE", str(layers)).replace("TAG", "small").split()))
    assert not typed, commands
    assert [line.split()[0] for line in commands][:4] == [
        "run",
        "load-jobs",
        "update-solvers",
        "load-jobs",
    ]
    assert "import" in " ".join(commands)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tuna", "import-db", "gfx90a68.HIP.fdb.txt"), "--rocm-version"),
        (("tuna", "init-session", "miopen", "-l", "x"), "--rocm-version"),
        (("go_fish", "miopen", "--init_session", "-l", "x"), "--rocm_v"),
        (("tuna", "export", "--golden", 1, "--form", "find"), "--arch"),
    ],
    ids=str,
)
def test_an_error_names_options_of_the_command_that_was_typed(
    words: tuple[Any, ...],
    said: str,
    type_in: TypeIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_setting(monkeypatch, "TUNA_ROCM_PATH", str(tmp_path / "nowhere"))
    key = "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F"
    (tmp_path / "gfx90a68.HIP.fdb.txt").write_text(
        f"{key}=A:1.5,64,miopenConvolutionFwdAlgoDirect\n"
    )
    ended = type_in(*words)
    assert ended.code in (2, 6)
    assert said in ended.err
    command = PROGRAMS[words[0]]
    context = click.Context(command)
    for word in words[1:]:
        if not isinstance(command, click.Group) or str(word).startswith("-"):
            break
        below = command.get_command(context, str(word))
        assert below is not None
        command = below
    options = {option for one in command.params for option in one.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z_-]+", re.sub(r"`[^`]*`", "", ended.err))) <= options


def test_each_respelt_option_is_one() -> None:
    def options(command: click.Command) -> set[str]:
        found = {option for one in command.params for option in one.opts}
        if isinstance(command, click.Group):
            context = click.Context(command)
            names = ["noop"] if command is PROGRAMS["go_fish"] else command.list_commands(context)
            below = [command.get_command(context, name) for name in names]
            found = found.union(*(options(one) for one in below if one is not None))
        return found

    assert set(seeds.SPELLING) <= options(tuna)
    assert set(seeds.SPELLING.values()) <= options(PROGRAMS["go_fish"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("configs", "-t", "smal"), "did you mean small?"),
        (("init-session", "nop", "-l", "x"), "did you mean noop?"),
        (("load-jobs", "--session-id", 1, "-s", "Nop1"), "did you mean Noop1?"),
        (("load-jobs", "--session-id", 1, "--steps", "biuld"), "did you mean build?"),
        (("load-jobs", "--session-id", 1, "--option", "trails=1"), "did you mean trials?"),
        (("export", "--session-id", 1, "--form", "jsn"), "did you mean json?"),
        (("golden", "biuld", 1), "'build'"),
        (("golden", "build", 1, "--session-id", 1, "--kind", "gem"), "did you mean gemm?"),
    ],
    ids=str,
)
def test_the_nearest_name_is_offered(words: tuple[Any, ...], said: str, loaded: TypeIn) -> None:
    ended = loaded("tuna", *words)
    assert ended.code in (2, 3)
    assert said in ended.err
