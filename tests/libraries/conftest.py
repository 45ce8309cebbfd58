"""A TVM library with a home, an artifact store and a scratch folder of its own; skipped where TVM
is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tvm_bench import Bench

from tuna.artifacts.store import Artifacts
from tuna.libraries.context import RunContext
from tuna.libraries.tvm import TvmLibrary
from tuna.sandbox.cores import eval_cpus
from tuna.settings import get_settings


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, knows_machine: Callable[[Path], None]
) -> Iterator[Path]:
    """A TUNA_HOME that is thrown away."""
    folder = tmp_path_factory.mktemp("home")
    knows_machine(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNA_HOME", str(folder))
        get_settings.cache_clear()
        yield folder
    get_settings.cache_clear()


@pytest.fixture(scope="module")
def new_bench(
    tvm_here: None, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Bench]]:
    """Makes benches that share one artifact store, each with processes of its own."""
    made: list[Bench] = []
    store = Artifacts((home / "artifacts").as_uri(), home / "cache")

    def make() -> Bench:
        library = TvmLibrary()
        context = RunContext(
            artifacts=store, scratch=tmp_path_factory.mktemp("scratch"), cpus=eval_cpus()
        )
        made.append(Bench(library, context, library.environment().target))
        return made[-1]

    yield make
    for bench in made:
        bench.library.close()


@pytest.fixture(scope="module")
def bench(new_bench: Callable[[], Bench]) -> Bench:
    """One bench for all tests of a module that leave it as it was."""
    return new_bench()


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """`examples/use_exported_db.py`, which has to pack without Tuna."""
    path = Path(__file__).parents[2] / "examples" / "use_exported_db.py"
    spec = importlib.util.spec_from_file_location("use_exported_db", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
