"""What Tuna and its tests need: all of it required, locked by hash, under a permissive licence."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from places import PACKAGES, TESTS
from pydantic_settings import TomlConfigSettingsSource
from shared_data import PROGRAMS

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
    "3-Clause BSD License": "BSD-3-Clause",
}
PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "MIT",
    "MIT-0",
    "PSF-2.0",
    "Zlib",
}
#: Imported where it happens to be installed, by anyio (other event loops), kombu (a serialiser),
#: redis (traces), rich and tenacity, for what Tuna does not use.
OPTIONAL = {"attr", "opentelemetry", "sniffio", "tornado", "yaml"}
#: Loads what workers, coordinators, exports and reports use. The transport is loaded by name when a
#: worker starts.
PROGRAM = """
import sys
import kombu.transport.redis, celery.bin.worker, celery.concurrency.prefork
import tuna.celery_app, tuna.coordinator.session_run, tuna.workers.serve, tuna.exports
import tuna.reports.html, tuna.reports.prometheus, tuna.golden, tuna.api.checks
import tuna.cli.main, tuna.libraries.measuring
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
            todo.append(
                (match[1], frozenset(filter(None, (match[2] or "").replace(" ", "").split(","))))
            )
    return {name for name, _ in seen}


def test_what_is_imported_is_required() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    modules = done.stdout.splitlines()[-1].split()
    owners = metadata.packages_distributions()
    there = {name for owner in set(owners["tuna"]) for name in _installed_with(owner)}
    assert {"celery", "kombu", "redis", "packaging"} <= there, "the search finds what is required"
    missing = {
        module: owners[module]
        for module in modules
        if module in owners.keys() - {one.name for one in PACKAGES}
        and not {re.sub(r"[-_.]+", "-", name).lower() for name in owners[module]} & there
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
    """What `lock` was made for: requirements/NAME.in, or the project with the extras in the name of
    the file."""
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
        or not all(
            requirement.specifier.contains(version) for version in pins[_normal(requirement.name)]
        )
    ]
    assert not wrong, "renew the locks: scripts/lock"
    direct, name = set(), ""
    for line in lock.read_text().splitlines():
        if found := re.match(r"([\w.-]+)==", line):
            name = found[1]
        elif line.endswith(
            (" tuna-autotuner (pyproject.toml)", f" -r requirements/{lock.stem}.in", "/build.in")
        ):
            direct.add(name)
    assert direct == {_normal(requirement.name) for requirement in asked}, (
        "renew the locks: scripts/lock"
    )


def test_each_package_in_a_lock_has_hashes() -> None:
    assert len(LOCKS) == 7
    for lock in LOCKS:
        packages = re.split(r"^(?=[\w.-]+==)", lock.read_text(), flags=re.MULTILINE)[1:]
        assert packages
        assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", package) for package in packages), (
            lock
        )


def test_tuna_is_built_with_what_its_build_system_names() -> None:
    assert [str(r) for r in _asked(ROOT / "requirements" / "build.txt")] == PYPROJECT[
        "build-system"
    ]["requires"]


def test_scripts_install_locks_that_are_there() -> None:
    calls = [
        extras
        for script in (ROOT / "scripts").iterdir()
        for extras in re.findall(r"^scripts/install (\S+)$", script.read_text(), re.MULTILINE)
    ]
    assert set(calls) == {"onnx,rpc,serve,tvm", "dev,onednn,rpc,serve,tvm"}
    assert {f"{extras}.txt" for extras in calls} <= {lock.name for lock in LOCKS}


@pytest.mark.parametrize("words", [[], ["tvm"], ["base", "dev"]], ids=str)
def test_scripts_install_says_what_it_wants(words: list[str]) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "install", *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: scripts/install EXTRAS")
    with_project = {lock.stem for lock in LOCKS if not lock.with_suffix(".in").exists()}
    assert set(re.findall(r"(\S+) \(", done.stderr)) == with_project


#: Looked up by tests that do not need it to be there, or that are given by what is.
NOT_INSTALLED = {
    "aws": "a drill: pip install awscli",
    "true": "coreutils; Debian has it always",
    "tuna": "in .venv",
}
#: Packages that a test needs and no lock has, and where that is.
NOT_LOCKED = {
    "boto3": "a drill, with moto",
    "botocore": "one case: AWS' model of its requests, which boto3 brings",
    "ipykernel": "a drill",
    "nbclient": "a drill",
    "moto": "a drill: pip install 'moto[server]'",
    "pandas": "one case: what a user may have",
    "requests": "a drill: of schemathesis",
    "resource": "Python's",
    "s3fs": "as moto",
    "schemathesis": "a drill",
    "signal": "Python's",
    "triton": "an extra whose wheel has 190 MB (docs/gpu.md)",
    "helion": "imports PyTorch, whose wheel has 200 MB and more (docs/adapters.md)",
    "torch": "not on PyPI without CUDA; scripts/demo-model installs it",
    "tuna": "this project",
}


def _packages() -> dict[str, str]:
    """Debian's package of each program, as scripts/programs has it."""
    table = (ROOT / "scripts" / "programs").read_text().split("<<'TABLE'\n")[1].split("TABLE\n")[0]
    return dict(line.split() for line in table.splitlines())


class _Call(NamedTuple):
    function: str
    text: str
    first: str | None  #: argument, if that is a literal
    file: str


@functools.cache  # no trees: collecting garbage takes longer than parsing
def _calls() -> list[_Call]:
    """The calls in tests of functions that look for something or skip a test."""
    found = []
    for path in sorted(path for folder in TESTS for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in _LOOKING:
                    first = node.args[0]
                    literal = str(first.value) if isinstance(first, ast.Constant) else None
                    file = str(path.relative_to(ROOT))
                    found.append(_Call(name, ast.unparse(node), literal, file))
    return found


_LOOKING = {"which", "needed_program", "find_spec", "importorskip", "skipif", "skip"}


def _looked_up(*functions: str) -> Iterator[tuple[str, str]]:
    """The literal first argument of each call of such a function in tests/, and the file."""
    for call in _calls():
        if call.function in functions and call.first is not None:
            yield call.first, call.file


def test_each_program_that_a_test_starts_is_one_that_scripts_test_installs() -> None:
    """`shared_data.needed_program` refuses others; what is looked up without it could be
    skipped."""
    other = {
        (name, file)
        for name, file in _looked_up("which")
        if name not in {*PROGRAMS, *NOT_INSTALLED}
    }
    assert not other, "use shared_data.needed_program; add it to scripts/test and scripts/programs"
    skipped = [
        (call.text, call.file)
        for call in _calls()
        if call.function in ("skipif", "skip") and "which(" in call.text
    ]
    assert not skipped, "a program that is absent fails the test in CI: shared_data.needed_program"
    assert set(dict(_looked_up("needed_program"))) == set(PROGRAMS), (
        "what no test starts need not be installed"
    )


def test_debians_package_of_each_program_is_known_and_documented() -> None:
    packages = _packages()
    scripts = {
        name: set(
            re.findall(
                r"^ *scripts/programs ([^#\n]*?) *(?:#.*)?$",
                (ROOT / "scripts" / name).read_text(),
                re.M,
            )
        )
        for name in ("demo-model", "demo-service", "install", "quickstart")
    }
    compiling = {name: {"c++"} for name in ("demo-model", "quickstart")}
    board = {"demo-service": {"c++ qemu-aarch64-static"}}
    assert scripts == {"install": {"venv"}, **compiling, **board}
    assert set(packages) == {*PROGRAMS, "c++", "venv"}
    documented = re.search(
        r"^Debian's packages: (.*?)\.$", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
    )
    assert documented is not None
    assert set(re.findall(r"`(\S+)`", documented[1])) == set(packages.values())
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *(ROOT / "scripts").iterdir()]
    asked = {
        word
        for page in pages
        for line in re.findall(r"apt-get install ([^\n\"'`$]+)", page.read_text())
        for word in line.split()
        if re.match("[a-z]", word)
    }
    assert asked <= set(packages.values()), "scripts/programs does not know it"


def test_scripts_programs_says_what_to_type_where_it_may_not_install(tmp_path: Path) -> None:
    """As a user who is not root and has no sudo, with nothing in PATH but what the script needs."""
    for name in ("bash", "awk", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/false")
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    words = ["bash", str(ROOT / "scripts" / "programs"), "c++", "g++", "aarch64-linux-gnu-g++"]
    done = subprocess.run(
        words, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.rpartition(": ")[2]) == (
        1,
        "apt-get install g++ g++-aarch64-linux-gnu\n",
    )


def test_each_package_that_a_test_looks_for_is_in_the_lock_of_scripts_test() -> None:
    there = _locked(ROOT / "requirements" / "dev,onednn,rpc,serve,tvm.txt")
    owners = {"tvm": "apache-tvm", "xgboost": "xgboost-cpu"}
    looked = {
        (name.partition(".")[0], file) for name, file in _looked_up("find_spec", "importorskip")
    }
    assert {"tvm", "tornado", "cloudpickle"} <= {name for name, _ in looked}
    assert {(name, file) for name, file in looked if owners.get(name, name) not in there} <= {
        (name, file) for name, file in looked if name in NOT_LOCKED
    }


def _licence(name: str) -> str:
    """As the package declares it: the SPDX expression, else the classifiers, else the free text."""
    declared = metadata.metadata(name)
    classifiers = [line.split(" :: ") for line in declared.get_all("Classifier", [])]
    approved = {line[2] for line in classifiers if line[:2] == ["License", "OSI Approved"]}
    texts = (
        [declared["License-Expression"]] if "License-Expression" in declared else sorted(approved)
    )
    return " OR ".join(SPDX.get(text, text) for text in texts or [declared["License"]])


def test_each_package_has_the_permissive_licence_that_the_page_says() -> None:
    page = (ROOT / "docs" / "security.md").read_text().partition("\n| licence | packages |\n")[2]
    rows = re.findall(r"^\| ([\w .-]+) \| ((?:[a-z0-9-]+(?:, )?)+) \|$", page, re.MULTILINE)
    listed = {name: licence for licence, names in rows for name in names.split(", ")}
    optional = {
        _normal(Requirement(PYPROJECT["project"]["optional-dependencies"]["onednn"][0]).name)
    }
    assert set(listed) == set(_locked(ROOT / "requirements" / "onnx,rpc,serve,tvm.txt")) | optional
    here = {_normal(distribution.name) for distribution in metadata.distributions()} & set(listed)
    assert {"celery", "numpy", "redis"} <= here
    assert {name: _licence(name) for name in here} == {name: listed[name] for name in here}
    for licence in set(listed.values()):
        assert set(re.split(" AND | OR ", licence)) <= PERMISSIVE
