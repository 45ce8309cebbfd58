"""What a stranger's distribution adds beside libraries: commands, and forms of databases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click import UsageError

from tuna.cli import main
from tuna.configs import sources
from tuna.errors import LibraryMissing
from tuna.plugins import Plugins

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
