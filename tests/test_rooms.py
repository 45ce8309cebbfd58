"""The rooms of the code: no circle of files, no long module."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from places import CORE, PACKAGES, ROOT, TESTS

LIMIT = 500
#: Rooms of the core that a package may import
PUBLIC = frozenset(
    {
        *("api", "cli", "common", "configs", "errors", "libraries", "plugins", "testing"),
        "vocabulary",
    }
)
#: Other modules of the core that packages import, without `tuna.`; the list may only shrink: a name
#: that is a row goes to `tuna.api.rows`, one that any room could hold to `tuna.common`
EXCEPTIONS = {
    "tuna_models": """
        artifacts.store sandbox.box sandbox.cores sandbox.forks sandbox.processes
        workers.launch
    """,
    "tuna_onednn": "sandbox.cores sandbox.discovery sandbox.processes",
    "tuna_remote": """
        artifacts.copies artifacts.store exports.json_lines exports.trial_log
        queue.announcements queue.celery_internals queue.connection
        queue.envelopes queue.heartbeat queue.leases queue.messages sandbox.box
        sandbox.cores sandbox.discovery sandbox.processes services.listening services.ports
        workers.launch workers.link workers.serve workers.served_queues workers.worker_process
    """,
    "tuna_serve": """
        artifacts.signatures artifacts.store reports.prometheus services.listening
        services.ports
    """,
    "tuna_simulate": "coordinator.policies",
    "tuna_trials": "artifacts.files exports.trial_log",
    "tuna_triton": "sandbox.box sandbox.discovery sandbox.processes sandbox.seccomp",
}


def _modules() -> dict[str, Path]:
    """The files of all packages by module name."""
    found = {}
    for folder in (CORE, *PACKAGES):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
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


@cache
def _graph() -> dict[str, set[str]]:
    """What each module of all packages imports of them."""
    modules = _modules()
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
    graph = _graph()
    assert graph["tuna.cli.tune"] >= {"tuna.api", "tuna.cli.show"}, "imports are found"
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
        path
        for folder in (CORE, *PACKAGES, *TESTS, ROOT / "benchmarks")
        for path in folder.rglob("*.py")
    ]
    long = {
        str(path.relative_to(ROOT)) for path in paths if len(path.read_text().splitlines()) > LIMIT
    }
    assert long == set()


def test_packages_import_public_rooms_of_the_core_and_counted_exceptions() -> None:
    listed = {
        (package, f"tuna.{name}") for package, names in EXCEPTIONS.items() for name in names.split()
    }
    imported = {
        (module.split(".")[0], name)
        for module, names in _graph().items()
        if module.split(".")[0] != "tuna"
        for name in names
        if name.startswith("tuna.") and name.split(".")[1] not in PUBLIC
    }
    assert imported - listed == set(), "what a package needs is a row, or belongs to a public room"
    assert listed - imported == set(), "shorten the list"
    assert len({name for _, name in listed}) <= 28
