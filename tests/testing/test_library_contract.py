"""The contract suite fails a library that misbehaves, each in the test that says so, and passes one
that does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from misbehaving import BAD, Good

from tuna.configs import GemmConfig
from tuna.errors import TunaError
from tuna.libraries.base import Library
from tuna.testing.library_contract import LibraryContract
from tuna.testing.rehearsal import rehearse, run_context
from tuna.vocabulary import Cause

pytest_plugins = "pytester"

CONFIGS = [GemmConfig(2, 3, 4), GemmConfig(5, 6, 7)]
TESTS = [name for name in vars(LibraryContract) if name.startswith("test_")]


class Suite(LibraryContract):
    """The suite for libraries that no entry point names."""

    installed = False


def failures(library: Library, folder: Path) -> set[str]:
    """The tests of the suite that fail for `library`, called as pytest would."""
    context = run_context(folder)
    turns = rehearse(library, CONFIGS, context, {}, 3)
    fixtures = {
        "library": library,
        "configs": CONFIGS,
        "context": context,
        "turns": turns,
        "tmp_path": folder,
    }
    return {name for name in TESTS if _fails(getattr(Suite(), name), fixtures)}


def _fails(test: Callable[..., None], fixtures: dict[str, object]) -> bool:
    wanted = inspect.signature(test).parameters
    try:
        for cause in Cause if "cause" in wanted else ("",):
            test(**{name: cause if name == "cause" else fixtures[name] for name in wanted})
    except (AssertionError, TunaError, ValueError, pytest.fail.Exception):
        return True
    return False


def test_a_library_that_keeps_the_contract_passes(tmp_path: Path) -> None:
    assert len(TESTS) >= 25
    assert failures(Good(), tmp_path) == set()


@pytest.mark.parametrize("way", BAD)
def test_a_library_that_misbehaves_fails(way: str, tmp_path: Path) -> None:
    library, test = BAD[way]
    failed = failures(library(), tmp_path)
    assert test in failed
    assert len(failed) <= len(TESTS) // 2, "one fault is no reason to fail everything"


SUITE = """
    import pytest
    from misbehaving import BAD, Good
    from tuna.configs import GemmConfig
    from tuna.testing.library_contract import LibraryContract

    class Both(LibraryContract):
        installed = False

        @pytest.fixture(scope="class")
        @classmethod
        def configs(cls):
            return [GemmConfig(2, 3, 4), GemmConfig(5, 6, 7)]

    class TestGood(Both):
        @pytest.fixture(scope="class")
        @classmethod
        def library(cls):
            return Good()

    class TestBad(Both):
        @pytest.fixture(scope="class")
        @classmethod
        def library(cls):
            return BAD["another attempt"][0]()

    class TestNobody(LibraryContract):
        pass
"""


def test_pytest_runs_the_suite_of_a_subclass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    passed, skipped, failed = pytester.inline_run("-p", "no:cacheprovider").listoutcomes()
    names = {report.nodeid.split("::", 1)[1] for report in failed}
    assert not skipped
    assert {name for name in names if not name.startswith("TestNobody")} == {
        "TestBad::test_results_name_the_attempt_and_the_step"
    }
    assert any(name.startswith("TestNobody") for name in names)
    assert not any("TestNobody" in report.nodeid for report in passed), (
        "a subclass that gives nothing is not green"
    )
    assert sum("TestGood" in report.nodeid for report in passed) == len(TESTS) + len(Cause) - 1
