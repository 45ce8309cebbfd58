"""What a distribution adds beside libraries, and what is said where one of ours is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click import UsageError
from command_lines import Ended

from tuna.cli import main, script
from tuna.configs import sources
from tuna.errors import LibraryMissing
from tuna.libraries import boards
from tuna.plugins import Plugins
from tuna.workers import joining

MODULE = """
import click
from tuna.exports.json_lines import JsonExporter
COMMANDS = {
    "greet": ("mine", "Say hello."),
    "status": ("mine", "Hide the core's."),
}
@click.command()
def greet():
    click.echo("hello")
@click.command()
def status():
    click.echo("not the core's")
class Mine(JsonExporter):
    form = "mine"
"""
POINTS = """
[tuna.commands]
mine = mine:COMMANDS
[tuna.exporters]
mine = mine:Mine
broken = mine:Missing
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    folder = tmp_path / "mine-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(POINTS)
    return tmp_path


@pytest.mark.usefixtures("home", "forked")
def test_commands_and_exporters_of_a_distribution_are_found(site: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tuna", *words],
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("greet") == "hello\n"
    listed = run("--help").splitlines()
    assert [line.split(maxsplit=1) for line in listed].count(["greet", "Say hello."]) == 1
    assert "not the core's" not in run("status"), "a command of the core stays"
    assert "mine" in run("export", "--help")


def test_what_a_package_brings_names_it_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "SOURCES", Plugins("none", "source", sources.Source))
    monkeypatch.setattr(main, "_PACKAGES", Plugins("none", "set of commands", dict))
    main.commands.cache_clear()
    try:
        with pytest.raises(UsageError, match="model needs the package tuna-models: pip install"):
            main.tuna.main(["model", "list"], standalone_mode=False)
    finally:
        main.commands.cache_clear()
    with pytest.raises(LibraryMissing, match=r"net\.onnx needs the package tuna-models"):
        sources.source_of(Path("net.onnx"))
    with pytest.raises(LibraryMissing, match="models needs the package tuna-models"):
        sources.api_of("models")


@pytest.mark.parametrize("words", [("gateway",), ("rpc-client",), ("tune-rpc", "--help")])
def test_a_command_of_a_package_that_is_missing_names_it(
    type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(main, "_PACKAGES", Plugins("tuna.none", "set of commands", dict))
    main.commands.cache_clear()
    ended = type_in("tuna", *words)
    main.commands.cache_clear()
    assert ended.code == 2
    assert f"{words[0]} needs the package tuna-remote: pip install tuna-remote" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("token", "create", "--role", "eval"), "join over the network need"),
        (("worker", "eval", "--join", "https://h#t"), "join over the network need"),
        (("worker", "eval", "--tvm-tracker", "h:1", "--device-key", "pi"), "on boards needs"),
    ],
)
def test_without_a_package_nothing_joins_and_nothing_measures_on_boards(
    type_in: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(joining, "_WAYS", Plugins("tuna.none", "way to join", joining.Joining))
    monkeypatch.setattr(boards, "_KINDS", Plugins("tuna.none", "kind of boards", boards.Boards))
    ended = type_in("tuna", *words)
    assert (ended.code, said in ended.err) == (LibraryMissing.exit_code, True), ended
    assert "pip install tuna-remote" in ended.err


def test_a_program_of_a_checkout_names_the_package_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tuna_remote", None)
    for name in [name for name in sys.modules if name.startswith("tuna_remote.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit, match="the package tuna-remote is not installed for"):
        script.run("tuna_remote.cli.lorien", "main")
