"""Packages that Tuna needs: all are required, locked by hash in requirements/, and under a permissive licence."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pydantic_settings import TomlConfigSettingsSource

from tuna.settings import Settings

ROOT = Path(__file__).parents[1]
PYPROJECT = TomlConfigSettingsSource(Settings, toml_file=ROOT / "pyproject.toml").toml_data
LOCKS = sorted((ROOT / "requirements").glob("*.txt"), key=lambda path: path.name)
#: How packages that give no SPDX expression spell their licence.
SPDX = {
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache v2.0": "Apache-2.0",
    "BSD License": "BSD",  # which one is not declared
    "MIT License": "MIT",
}
PERMISSIVE = {"0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "MIT", "MIT-0", "PSF-2.0", "Zlib"}
#: Imported where it happens to be installed, by kombu (a serialiser), rich and tenacity, for what Tuna does not use.
OPTIONAL = {"yaml", "attr", "tornado"}
#: Loads what workers, coordinators, exports and reports use. The transport is loaded by name when a worker starts.
PROGRAM = """
import sys
import kombu.transport.redis, celery.bin.worker, celery.concurrency.prefork
import tuna.celery_app, tuna.workers.session_run, tuna.workers.serve, tuna.exports, tuna.reports.html
import tuna.reports.prometheus, tuna.golden, tuna.doctor, tuna.cli.main, tuna.libraries.measuring
from tuna.exports.registry import exporters
exporters()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def _installed_with(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The distributions that installing `name` brings, itself included, by normalised name."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(name, extras)]
    while todo:
        current, wanted = todo.pop()
        key = (re.sub(r"[-_.]+", "-", current).lower(), wanted)
        if key in seen:
            continue
        seen.add(key)
        try:
            lines = metadata.requires(current) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        for line in lines:
            requirement, _, marker = line.partition(";")
            extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker)
            if extra and extra[1] not in wanted:
                continue
            match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", requirement)
            assert match is not None
            todo.append((match[1], frozenset(filter(None, (match[2] or "").replace(" ", "").split(",")))))
    return {name for name, _ in seen}


def test_what_is_imported_is_required() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    owners = metadata.packages_distributions()
    there = {name for owner in set(owners["tuna"]) for name in _installed_with(owner)}
    assert {"celery", "kombu", "redis", "packaging"} <= there, "the search finds what is required"
    missing = {
        module: owners[module]
        for module in modules
        if module in owners and not {re.sub(r"[-_.]+", "-", name).lower() for name in owners[module]} & there
    }
    assert missing.keys() <= OPTIONAL


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _locked(lock: Path) -> dict[str, set[str]]:
    """The versions of each package; several where they depend on the Python version."""
    pins = defaultdict(set)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE):
        pins[name].add(version)
    return pins


def _asked(lock: Path) -> list[Requirement]:
    """What `lock` was made for: requirements/NAME.in, or the project with the extras in the name of the file."""
    source = lock.with_suffix(".in")
    if source.exists():
        lines = [line.partition("#")[0].strip() for line in source.read_text().splitlines()]
        return [Requirement(line) for line in lines if line]
    extras = [] if lock.stem == "base" else lock.stem.split(",")
    project = PYPROJECT["project"]
    lists = [project["dependencies"], PYPROJECT["build-system"]["requires"]]
    lists += [project["optional-dependencies"][extra] for extra in extras]
    return [Requirement(line) for lines in lists for line in lines]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_the_lock_has_what_is_asked_for(lock: Path) -> None:
    asked, pins = _asked(lock), _locked(lock)
    wrong = [
        str(requirement)
        for requirement in asked
        if not pins[_normal(requirement.name)]
        or not all(requirement.specifier.contains(version) for version in pins[_normal(requirement.name)])
    ]
    assert not wrong, "renew the locks: scripts/lock"
    direct, name = set(), ""
    for line in lock.read_text().splitlines():
        if found := re.match(r"([\w.-]+)==", line):
            name = found[1]
        elif line.endswith((" tuna-autotuner (pyproject.toml)", f" -r requirements/{lock.stem}.in", "/build.in")):
            direct.add(name)
    assert direct == {_normal(requirement.name) for requirement in asked}, "renew the locks: scripts/lock"


def test_each_package_in_a_lock_has_hashes() -> None:
    assert len(LOCKS) == 7
    for lock in LOCKS:
        packages = re.split(r"^(?=[\w.-]+==)", lock.read_text(), flags=re.MULTILINE)[1:]
        assert packages
        assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", package) for package in packages), lock


def test_tuna_is_built_with_what_its_build_system_names() -> None:
    assert [str(r) for r in _asked(ROOT / "requirements" / "build.txt")] == PYPROJECT["build-system"]["requires"]


def test_scripts_install_locks_that_are_there() -> None:
    calls = [
        extras
        for script in (ROOT / "scripts").iterdir()
        for extras in re.findall(r"^scripts/install (\S+)$", script.read_text(), re.MULTILINE)
    ]
    assert set(calls) == {"tvm", "dev,onednn,rpc,tvm"}
    assert {f"{extras}.txt" for extras in calls} <= {lock.name for lock in LOCKS}


def _licence(name: str) -> str:
    """As the package declares it: the SPDX expression, else the classifiers, else the free text."""
    declared = metadata.metadata(name)
    classifiers = [line.split(" :: ") for line in declared.get_all("Classifier", [])]
    approved = {line[2] for line in classifiers if line[:2] == ["License", "OSI Approved"]}
    texts = [declared["License-Expression"]] if "License-Expression" in declared else sorted(approved)
    return " OR ".join(SPDX.get(text, text) for text in texts or [declared["License"]])


def test_each_package_has_the_permissive_licence_that_the_page_says() -> None:
    page = (ROOT / "docs" / "security.md").read_text().partition("\n| licence | packages |\n")[2]
    rows = re.findall(r"^\| ([\w .-]+) \| ((?:[a-z0-9-]+(?:, )?)+) \|$", page, re.MULTILINE)
    listed = {name: licence for licence, names in rows for name in names.split(", ")}
    optional = {_normal(Requirement(PYPROJECT["project"]["optional-dependencies"]["onednn"][0]).name)}
    assert set(listed) == set(_locked(ROOT / "requirements" / "tvm.txt")) | optional
    here = {_normal(distribution.name) for distribution in metadata.distributions()} & set(listed)
    assert {"celery", "numpy", "redis"} <= here
    assert {name: _licence(name) for name in here} == {name: listed[name] for name in here}
    for licence in set(listed.values()):
        assert set(re.split(" AND | OR ", licence)) <= PERMISSIVE
