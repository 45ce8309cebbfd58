"""What is installed is told without importing TVM; a TVM that is missing or known to crash is
refused with its cure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tuna.errors import LibraryMissing
from tuna.libraries.tvm import TvmLibrary, kernels, toolchain
from tuna.sandbox.cores import eval_cpus


@pytest.fixture(scope="module")
def knows_machine() -> Callable[[Path], None]:
    """Nothing is known here before it is asked for."""
    return lambda home: None


def test_the_environment_names_the_cpu_the_cores_and_tvm(tvm_here: None, home: Path) -> None:
    found = TvmLibrary().environment()
    assert found.library == "tvm"
    assert found.toolchain == f"tvm-{found.library_version}-kernels-{kernels.VERSION}"
    assert found.num_cu == len(eval_cpus())
    assert json.loads(found.target) == {
        "kind": "llvm",
        "mcpu": found.arch,
        "num-cores": found.num_cu,
    }
    assert found.device
    assert found.flags["cpu_flags"]
    assert found.key == TvmLibrary().environment().key


def test_the_cpu_is_asked_for_once_and_a_corrupt_answer_is_asked_for_again(
    tvm_here: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = TvmLibrary().environment()
    (cache,) = (home / "cache" / "machine").glob("tvm-cpu-*.json")
    cache.write_text("{ half an ans")
    assert TvmLibrary().environment() == expected
    assert json.loads(cache.read_text()) == {"mcpu": expected.arch}
    monkeypatch.setattr(toolchain, "Child", None)  # nobody may be asked now
    assert TvmLibrary().environment() == expected


def test_the_cpu_has_the_name_that_tvm_gives_it_without_an_import_of_tvm(tvm_here: None) -> None:
    program = (
        "import sys; from tuna.libraries.tvm import toolchain; found = toolchain.host()\n"
        "assert 'tvm' not in sys.modules\n"
        "from tvm.target import codegen; assert found == {'mcpu': codegen.llvm_get_system_cpu()}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("missing", ["apache-tvm", "apache-tvm-ffi"])
def test_tvm_that_is_not_installed_is_a_sentence_with_the_command(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == missing:
            raise PackageNotFoundError(name)
        return toolchain.GOOD_FFI

    monkeypatch.setattr(toolchain, "version", version)
    with pytest.raises(LibraryMissing) as error:
        TvmLibrary().environment()
    assert error.value.hint == "pip install 'tuna-autotuner[tvm]'"


def test_a_tvm_ffi_that_crashes_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.15.post2"}
    monkeypatch.setattr(toolchain, "version", versions.__getitem__)
    with pytest.raises(
        LibraryMissing,
        match=r"crashes with apache-tvm-ffi 0\.1\.15\.post2; it needs 0\.1\.14\.post1",
    ):
        TvmLibrary().environment()
