"""The oldest Python that pyproject.toml promises compiles Tuna and has what it imports."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from places import CORE, PACKAGES
from test_dependencies import PYPROJECT

OLDEST = next(iter(SpecifierSet(PYPROJECT["project"]["requires-python"]))).version
#: Needs no package: it compiles each module and looks up each name that it imports from Python's
#: own library, outside of conditions on the version.
PROGRAM = """
import ast, importlib.util, json, pathlib, sys
missing = []
def is_module(package, name):
    holds = hasattr(sys.modules[package], "__path__")
    return holds and importlib.util.find_spec(f"{package}.{name}")
def imports(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "version_info" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        yield from imports(child)
for path in sorted(path for place in sys.argv[1:] for path in pathlib.Path(place).rglob("*.py")):
    tree = ast.parse(path.read_text(), str(path))
    compile(tree, str(path), "exec")
    for node in imports(tree):
        listed = [one.name for one in node.names]
        plain = isinstance(node, ast.Import)
        for module in listed if plain else [node.module or ""]:
            if module.partition(".")[0] not in sys.stdlib_module_names:
                continue
            there = importlib.import_module(module)
            for name in [] if plain else listed:
                if not hasattr(there, name) and not is_module(module, name):
                    missing.append(f"{path.name}: {module}.{name}")
print(json.dumps(missing))
"""


def _oldest() -> str | None:
    """The program of the oldest Python that is supported: where pyenv installs it, or in PATH."""
    installed = Path.home().glob(f".pyenv/versions/{OLDEST}.*/bin/python{OLDEST}")
    return next(map(str, sorted(installed)), None) or shutil.which(f"python{OLDEST}")


def test_the_oldest_python_has_what_each_module_imports_from_it() -> None:
    program = _oldest()
    if program is None:
        pytest.skip(f"there is no Python {OLDEST} here; mypy checks the modules for it")
    done = subprocess.run(
        [program, "-c", PROGRAM, CORE, *PACKAGES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_static_checks_are_for_the_oldest_python() -> None:
    assert PYPROJECT["tool"]["mypy"]["python_version"] == OLDEST
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{OLDEST.replace('.', '')}"
