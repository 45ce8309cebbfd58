"""Targets in both of their forms are one JSON text, and who links for them is found or named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from settings_changes import change_setting
from shared_data import needed_program

from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.tvm import toolchain
from tuna.settings import get_settings

PI = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}


def test_code_for_cores_that_reorder_instructions_is_scheduled_once() -> None:
    here = toolchain.for_code({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "cl-opt": ["-a"]})
    assert here["cl-opt"] == ["-a", "-disable-post-ra"]
    assert toolchain.for_code(PI)["cl-opt"] == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("llvm", {"kind": "llvm"}),
        ("llvm -device=arm_cpu -mtriple=aarch64-linux-gnu", PI),
        ("llvm -mtriple aarch64-linux-gnu -keys=arm_cpu,cpu", {**PI, "keys": ["arm_cpu", "cpu"]}),
        ('{"mtriple": "aarch64-linux-gnu", "kind": "llvm"}', PI),
        ("llvm -num-cores 4 -mattr=+v8.2a,+neon",
         {"kind": "llvm", "mattr": ["+neon", "+v8.2a"], "num-cores": 4}),
        ('{"kind": "llvm", "num-cores": 4, "mattr": ["+neon", "+v8.2a"]}',
         {"kind": "llvm", "mattr": ["+neon", "+v8.2a"], "num-cores": 4}),
        ("llvm -mcpu=cortex-a72 -fast-math -opt-level=3",
         {"kind": "llvm", "fast-math": True, "mcpu": "cortex-a72", "opt-level": 3}),
        ("llvm -device=arm_cpu -mtriple=x86_64-linux-gnu",
         {"kind": "llvm", "device": "arm_cpu", "mtriple": "x86_64-linux-gnu"}),
    ],
)  # fmt: skip
def test_both_forms_of_a_target_are_one(text: str, wanted: dict[str, object]) -> None:
    found = toolchain.parse(text)
    assert found == wanted
    assert toolchain.to_text(toolchain.parse(toolchain.to_text(found))) == toolchain.to_text(found)
    assert list(found) == sorted(found)


def test_lvm_is_taken_for_llvm_with_a_warning(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert toolchain.parse("lvm -device=arm_cpu -mtriple=aarch64-linux-gnu") == PI
    # by how another test set logs up
    assert "lvm is taken for llvm" in "".join([*capsys.readouterr(), caplog.text])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("cuda -arch=sm_80", "of kind llvm, not 'cuda'"),
        ("llvm -num-cores=four", "num-cores cannot be 'four'"),
        ("llvm -num-cores=²", "num-cores cannot be '²'"),
        (f"llvm -num-cores={'9' * 5000}", "num-cores cannot be '9"),
        (f"llvm -num-cores={1 << 31}", "num-cores cannot be"),
        ("llvm -mcpu", "mcpu cannot be True"),
        ("llvm -mcpus=x", "has no 'mcpus'"),
        ("llvm mcpu=x", "'mcpu' is not an attribute"),
        ("llvm -mcpu=a -mcpu=b", "'mcpu' twice"),
        ("llvm -mattr='", "cannot be read"),
        ('{"kind": "llvm", "host": {"kind": "llvm"}}', "no host"),
        ('{"kind": "llvm", "mattr": [1]}', "not a list of words"),
        ('{"kind": "llvm", "num-cores": true}', "num-cores cannot be True"),
        ("{", "not a JSON object"),
        ("{" * 100_000, "not a JSON object"),
    ],
)
def test_what_is_no_target_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        toolchain.parse(text)


@pytest.mark.parametrize(
    ("triple", "gnu"),
    [
        ("aarch64-conda-linux-gnu", "aarch64-linux-gnu"),
        ("arm64-linux-gnu", "aarch64-linux-gnu"),
        ("aarch64", "aarch64-linux-gnu"),
        ("arm-linux-gnueabihf", "arm-linux-gnueabihf"),
    ],
)
def test_triples_are_named_as_gnu_does(triple: str, gnu: str) -> None:
    assert toolchain.triple({"kind": "llvm", "mtriple": triple}) == gnu


def test_without_a_linker_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryMissing, match=r"riscv64-linux-gnu-g\+\+, which") as missing:
        toolchain.linker({"kind": "llvm", "mtriple": "riscv64-linux-gnu"}, "")
    assert (
        missing.value.hint
        == "apt-get install g++-riscv64-linux-gnu, or set TUNA_CC to a compiler that links for"
        " riscv64-linux-gnu"
    )
    assert toolchain.linker({"kind": "llvm", "num-cores": 2}, "") == "", "this machine's own"


def test_a_compiler_that_links_for_another_machine_is_refused(
    tvm_here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNA_HOME", str(tmp_path))
    change_setting(monkeypatch, "TUNA_CC", Path(needed_program("gcc")).name)
    try:
        with pytest.raises(
            LibraryMissing, match="gcc does not link for riscv64-linux-gnu: asked for its machine"
        ):
            toolchain.check({"kind": "llvm", "mtriple": "riscv64-linux-gnu"})
    finally:
        monkeypatch.undo()
        get_settings.cache_clear()


@pytest.mark.parametrize(
    ("target", "nearest"),
    [
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "zen4"}, "znver4"),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "cascade-lake"}, "cascadelake"),
    ],
)
def test_a_cpu_that_llvm_does_not_know_is_refused_and_the_nearest_is_named(
    tvm_here: None, home: Path, target: dict[str, object], nearest: str
) -> None:
    with pytest.raises(BadInput, match=f"LLVM knows no CPU '{target['mcpu']}' of x86_64") as error:
        toolchain.check(target)
    assert f"did you mean {nearest}? " in str(error.value.hint)
    toolchain.check({**target, "mcpu": nearest})


def test_targets_as_json_are_what_tvm_takes(tvm_here: None) -> None:
    """The attributes that are known here are those of the installed TVM."""
    tvm = pytest.importorskip("tvm")
    for text in (
        "llvm -device=arm_cpu -mtriple=aarch64-linux-gnu",
        "llvm -mattr=+neon -mtriple=aarch64-linux-gnu -num-cores=4",
    ):
        assert (
            tvm.target.Target(json.loads(toolchain.to_text(toolchain.parse(text)))).kind.name
            == "llvm"
        )
