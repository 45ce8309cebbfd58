"""A plug-in's form is offered, accepted, compared and checked without a change of Tuna."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from builders import DRIVERS, DatabaseBuilder

from tuna.errors import BadInput, LibraryMissing
from tuna.exports import export, registry
from tuna.exports.database_files import check, diff
from tuna.libraries.exporter import CheckFacts, Entry, Exporter, ExportTally, FileOptions
from tuna.libraries.results import ResultSource

TypeIn = Callable[..., Any]


class _Row(NamedTuple):
    driver: str
    solver_id: int
    time_ms: float | None


class ToyExporter(Exporter[FileOptions]):
    """One line of text a result."""

    form = "toy"
    title = "toy file"
    endings = (".toy",)
    options = FileOptions

    def ending(self, source: ResultSource, options: FileOptions) -> str:
        return ".toy"

    def write(
        self, path: Path, source: ResultSource, options: FileOptions, tally: ExportTally
    ) -> int:
        rows = sorted(
            (row.driver, source.solvers[row.solver_id].name, row.time_ms)
            for row in source.results(_Row)
        )
        path.write_text("".join(f"{'|'.join(map(str, row))}\n" for row in rows))
        tally.configs = len({row[0] for row in rows})
        return len(rows)

    def recognises(self, path: Path, head: bytes) -> bool:
        return head.startswith(b"./bin/MIOpenDriver")

    def entries(self, path: Path) -> Iterator[Entry]:
        for line in path.read_text().splitlines():
            driver, solver, time_ms = line.split("|")
            yield Entry(driver, solver, (float(time_ms),))


class _Toy:
    exporters = (ToyExporter(),)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed library `toy` with a form, and one that cannot be loaded."""
    get, names = registry.registry.get_library, registry.registry.names()

    def library(name: str) -> Any:
        if name == "broken":
            raise LibraryMissing("The library broken cannot be loaded: ImportError: no such thing")
        return _Toy() if name == "toy" else get(name)

    monkeypatch.setattr(registry.registry, "names", lambda: [*names, "broken", "toy"])
    monkeypatch.setattr(registry.registry, "get_library", library)
    registry._found.cache_clear()
    yield
    registry._found.cache_clear()


def test_there_are_the_forms_of_the_installed_libraries_and_the_generic_ones() -> None:
    generic = {"csv", "json"}
    assert {"find", "kernel", "perf", "tvm", *generic} <= set(registry.forms())


@pytest.mark.usefixtures("plugged")
def test_a_plug_ins_form_is_exported_compared_and_checked(
    build: DatabaseBuilder, tmp_path: Path
) -> None:
    session = build.session()
    build.winner(session, build.config(DRIVERS[0]), build.solver("A"), 0.5)
    path = export(build.connection, session, "toy", tmp_path).path
    assert path.name == "znver5_2.toy"
    assert registry.exporter_of(path).form == "toy"
    assert diff(path, path).total("same") == 1
    found = check(tmp_path, CheckFacts(None, lambda *_: {}))
    assert (found.entries, found.faults) == (1, [])
    path.write_text(path.read_text() * 2)
    assert [fault.rule for fault in check(tmp_path, CheckFacts(None, lambda *_: {})).faults] == [
        "duplicate"
    ]


@pytest.mark.usefixtures("plugged")
def test_an_unknown_form_is_refused_with_those_there_are_and_the_library_that_is_broken() -> None:
    with pytest.raises(
        BadInput, match=r"Unknown database form 'nosuch'.*The library broken cannot be loaded"
    ) as caught:
        registry.exporter("nosuch")
    forms = registry.forms()
    assert forms == sorted(forms)
    assert "toy" in forms
    assert caught.value.hint == f"forms: {', '.join(forms)}"


@pytest.mark.usefixtures("plugged")
def test_a_form_that_two_libraries_claim_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyExporter, "form", "find")
    registry._found.cache_clear()
    with pytest.raises(
        BadInput, match=r"Several libraries bring a form 'find': .*FindExporter.* and .*ToyExporter"
    ):
        registry.exporter("find")


@pytest.mark.usefixtures("plugged")
def test_the_help_lists_a_plug_ins_form_and_an_error_too(type_in: TypeIn) -> None:
    assert "toy file: packed" in " ".join(type_in("tuna", "export", "--help").out.split())
    ended = type_in("tuna", "export", "--session-id", 1, "--form", "nosuch")
    assert ended.code == 2
    assert "toy" in ended.err


def test_an_option_of_another_form_is_refused(build: DatabaseBuilder, tmp_path: Path) -> None:
    session = build.session()
    with pytest.raises(BadInput, match="A find db has no option 'text'") as caught:
        export(build.connection, session, "find", tmp_path, text=True)
    assert caught.value.hint == "options: opencl, packed, top"


def test_the_map_of_commands_imports_neither_libraries_nor_sql() -> None:
    code = "import sys, tuna.cli.main, tuna.cli.databases\n"
    code += "heavy = {'sqlalchemy', 'celery', 'tvm', 'tuna.libraries', 'tuna.exports'}\n"
    code += "print(sorted(heavy & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
