"""A model's functions are compiled on all cores, and no byte depends on how many these are."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("tvm_here")


def _functions(folder: Path) -> dict[Path, Any]:
    """Three functions by their object files in the folder."""
    from tvm import te

    def scaled(factor: int) -> Any:
        x = te.placeholder((4,), name="x")
        return te.create_prim_func([x, te.compute((4,), lambda i: x[i] * factor, name="y")])

    found = {}
    for number in range(3):
        function = scaled(number).with_attr("global_symbol", f"scale{number}")
        (folder / f"{number}.o").unlink(missing_ok=True)
        found[folder / f"{number}.o"] = (f"scale{number}", function)
    return found


def _compile(folder: Path, processes: int) -> list[bytes]:
    """The object files of the functions."""
    import tvm

    from tuna.libraries.tvm.object_files import compile_all

    folder.mkdir(exist_ok=True)
    files = _functions(folder)
    compile_all(files, tvm.target.Target("llvm"), processes)
    return [file.read_bytes() for file in files]


def test_one_and_several_processes_compile_the_same_bytes(tmp_path: Path) -> None:
    one, three = (_compile(tmp_path / str(number), number) for number in (1, 3))
    assert one == three
    assert len(set(one)) == 3


def test_each_function_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm

    log, build = os.open(tmp_path / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY), tvm.tirx.build

    def logged(module: Any, target: Any) -> Any:
        os.write(log, module.get_global_vars()[0].name_hint.encode() + b"\n")
        return build(module, target=target)

    monkeypatch.setattr(tvm.tirx, "build", logged)
    _compile(tmp_path, 2)
    os.close(log)
    assert sorted((tmp_path / "log").read_text().split()) == ["scale0", "scale1", "scale2"]


def test_a_killed_fork_leaves_its_functions_to_the_process_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tvm

    right, own, build = _compile(tmp_path, 1), os.getpid(), tvm.tirx.build

    def killed(module: Any, target: Any) -> Any:
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)
        return build(module, target=target)

    monkeypatch.setattr(tvm.tirx, "build", killed)
    assert _compile(tmp_path, 3) == right


def test_a_fault_of_a_function_is_raised_whichever_process_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tvm

    def faulty(*_: Any, **__: Any) -> Any:
        raise ValueError("this function cannot be compiled")

    monkeypatch.setattr(tvm.tirx, "build", faulty)
    with pytest.raises(ValueError, match="cannot be compiled"):
        _compile(tmp_path, 3)
