"""The rooms of the code: no circle of files, no long module, no name of a module that is no
more."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from shared_data import need, needed_program

ROOT = Path(__file__).parent.parent
LIMIT = 400
#: Modules of the first release that have another name or place, as `room/module`.
OLD_MODULES = (
    *("cli/actions", "cli/seeds", "db/members"),
    *(
        f"pipeline/{name}"
        for name in ("ending", "enqueue", "everywhere", "fitness", "intervene", "members")
    ),
    *(f"pipeline/{name}" for name in ("once", "orders", "pace", "presence", "run", "wire")),
    *(f"reports/{name}" for name in ("exporter", "figures", "health", "reading")),
    *(
        f"workers/{name}"
        for name in ("child", "cores", "devices", "discovery", "membership", "sandbox")
    ),
)


def _modules() -> dict[str, Path]:
    """The files of the package by module name."""
    found = {}
    for path in sorted((ROOT / "tuna").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(tree: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    """What a file imports of the package: at its top, inside of functions, and for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules:
                    yield name
                elif node.module in modules:
                    yield node.module


def _graph(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    return {
        name: set(_imported(ast.parse(path.read_text()), modules)) for name, path in modules.items()
    }


def _circle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of the graph, if there is any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = _graph(_modules())
    assert graph["tuna.cli.quickstart"] >= {"tuna.api", "tuna.cli.show"}, "imports are found"
    assert _circle(graph) == []


def test_a_circle_through_a_function_and_a_type_would_be_found() -> None:
    sources = {
        "p.a": "def f():\n    from p import b\n",
        "p.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.c import C\n",
        "p.c": "import p.a\n",
        "p.d": "from p.a import f\n",
    }
    modules = {name: Path() for name in ("p", *sources)}
    graph = {name: set(_imported(ast.parse(text), modules)) for name, text in sources.items()}
    assert set(_circle(graph)) == {"p.a", "p.b", "p.c"}


def test_no_module_is_long() -> None:
    paths = [
        path for folder in ("tuna", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    long = {
        str(path.relative_to(ROOT)) for path in paths if len(path.read_text().splitlines()) > LIMIT
    }
    assert long == set()


def _tracked() -> list[Path]:
    """The files that git has or would take."""
    need((ROOT / ".git").exists(), "a checkout")
    command = [
        needed_program("git"),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_nothing_names_a_module_that_is_no_more() -> None:
    either = "|".join(name.replace("/", "[./]") for name in OLD_MODULES)
    old = re.compile(rf"\b(?:{either})(?:\.py)?\b")
    found = []
    for path in _tracked():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), 1)
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in lines
            if old.search(line)
        ]
    assert found == []


@pytest.mark.parametrize("name", OLD_MODULES)
def test_the_old_modules_are_gone(name: str) -> None:
    assert not (ROOT / "tuna" / f"{name}.py").exists()
    assert not (ROOT / "tuna" / name).is_dir()
