"""The documents, the help texts and the code say the same."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest
from places import CORE, PACKAGES, ROOT, TESTS
from pydantic_settings import TomlConfigSettingsSource

from tuna.cli.main import commands
from tuna.db.models import Base
from tuna.db.session_options import DEFAULTS, SessionOptions
from tuna.errors import TunaError
from tuna.jobs.states import mermaid
from tuna.libraries.base import Library, SearchRules
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.params_text import ParamsText
from tuna.settings import Settings, setting_names
from tuna.vocabulary import Cause, RequestState, State
from tuna_serve.db import requests

USAGE = (ROOT / "docs" / "usage.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
README = (ROOT / "README.md").read_text()
TASKS = (ROOT / "docs" / "tasks.md").read_text()
PROJECT = TomlConfigSettingsSource(Settings, toml_file=ROOT / "pyproject.toml").toml_data


@pytest.mark.parametrize("name", commands())
def test_each_command_is_in_the_documents(name: str) -> None:
    assert f"tuna {name}" in USAGE + README + TASKS


@pytest.mark.parametrize("name", sorted(setting_names()))
def test_each_setting_is_in_the_documents(name: str) -> None:
    assert f"`TUNA_{name.upper()}`" in USAGE


def test_each_group_of_entry_points_is_in_the_documents() -> None:
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    groups = [
        group for group in PROJECT["project"]["entry-points"] if not group.endswith(".simulated")
    ]
    assert [
        group for group in groups if f"`{group}`" not in pages and f'"{group}"' not in pages
    ] == []


def test_each_exit_code_is_in_the_documents() -> None:
    found = set(
        map(int, re.findall(r"(?m)^\| (\d+) \|", USAGE.split("## Exit codes")[1].split("## ")[0]))
    )
    classes = [TunaError]
    for one in classes:  # grows
        classes += one.__subclasses__()
    assert {one.exit_code for one in classes} <= found


@pytest.mark.parametrize("cause", Cause)
def test_each_cause_is_in_the_documents(cause: Cause) -> None:
    assert f"`{cause.value}`" in USAGE


@pytest.mark.parametrize("state", State)
def test_each_state_is_in_the_documents(state: State) -> None:
    assert re.search(rf"\b{state.value}\b", ARCHITECTURE)


def test_the_drawing_of_the_states_is_made_from_the_transition_table() -> None:
    drawn = re.search(r"```mermaid\n(.*?)\n```", ARCHITECTURE, re.DOTALL)
    assert drawn is not None
    assert drawn[1] == mermaid(), "run: python -m tuna.jobs.states"


def test_the_states_of_a_request_and_their_drawing_are_in_the_documents() -> None:
    text = (ROOT / "docs" / "service.md").read_text()
    drawn = re.search(r"```mermaid\n(.*?)\n```", text, re.DOTALL)
    assert drawn is not None
    assert drawn[1] == requests.mermaid(), "run: python -m tuna_serve.db.requests"
    for state in RequestState:
        assert f"| `{state}` |" in text


def test_each_package_and_module_has_its_place_in_the_architecture() -> None:
    table = ARCHITECTURE.split("## Packages")[1].split("##")[0]
    names = {path.parent.name + "/" for path in ROOT.glob("tuna/*/__init__.py")}
    names |= {path.name for path in ROOT.glob("tuna/*.py") if not path.name.startswith("__")}
    assert {path.parent.name for path in PACKAGES if f"`{path.parent.name}`" not in table} == set()
    assert {name for name in names if f"`tuna/{name}`" not in table} == set()


@pytest.mark.parametrize("table", Base.metadata.tables)
def test_each_table_is_in_the_documents(table: str) -> None:
    assert f"`{table}`" in ARCHITECTURE


def test_each_dependency_has_its_reason() -> None:
    wanted = {re.split(r"[\[<>=;! ]", text)[0] for text in PROJECT["project"]["dependencies"]}
    explained = set(
        re.findall(r"^\| ([a-z0-9.-]+) \| ", ARCHITECTURE.split("## Dependencies")[1], re.MULTILINE)
    )
    assert explained - {"package"} == wanted


def test_each_benchmark_has_the_options_of_all() -> None:
    """`--json` of some wanted a file, and so took the next word for one."""
    names = {path.name for path in ROOT.glob("benchmarks/*.py") if "Outcome(" in path.read_text()}
    own = {name for name in names if "ArgumentParser" in (ROOT / "benchmarks" / name).read_text()}
    assert not own


def test_each_folder_with_modules_is_a_package_that_the_build_finds() -> None:
    folders = {path.parent for place in (CORE, *PACKAGES) for path in place.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *ROOT.glob("packages/*/*.md")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_each_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_tests_in_the_table_of_trust_are_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page[page.index("## Who is trusted with what") : page.index("## Remote workers")]
    owner, *others = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert owner[0].startswith("| owner")
    named = [re.findall(r"`([^`]+)`", row[-1]) for row in others]
    assert all(named), "each promise has a test"
    elsewhere = re.findall(r"`([\w/-]*test_\w+\.py)", page)
    for name, _, test in (text.partition("::") for text in (*chain(*named), *elsewhere)):
        (path,) = (folder / name for folder in (ROOT, *TESTS) if (folder / name).is_file())
        assert f"def {test or 'test_'}" in path.read_text(), name


def test_the_options_of_a_session_are_in_the_documents() -> None:
    text = (ROOT / "docs/usage.md").read_text()
    for name, field in SessionOptions.model_fields.items():
        row = f"| `{name}` | {DEFAULTS.text(name)} | {field.description} |"
        assert row in text, name


@pytest.mark.parametrize(
    ("part", "title"),
    [
        (Library, "`Library`"),
        (SearchRules, "`Library.search`"),
        (ParamsText, "`Library.params`"),
        (DeviceUse, "`Library.device`"),
    ],
)
def test_plug_in_page_lists_the_members_of_the_contract(part: type, title: str) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text().split("## Every hook")[1]
    (table,) = re.findall(rf"(?m)^\| {title}[^\n]*\n((?:\|.*\n)+)", page)
    listed = re.findall(r"`(\w+)", " ".join(row.split(" | ")[0] for row in table.splitlines()))
    names = {name for name in {**vars(part), **part.__annotations__} if name[0] != "_"}
    assert set(listed) == names - {"search", "params"}
    assert len(listed) <= 14, "what only some libraries need is not for all to read"
