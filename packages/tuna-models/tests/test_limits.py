"""Limits of the process that works on models: which hold, and what is said at one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuna.common import control_groups
from tuna.sandbox.processes import ChildCrashed, ChildFailed, ChildFault
from tuna.settings import OF_DISTRIBUTIONS
from tuna_models import limits
from tuna_models.limits import ModelLimits, ModelSettings, raise_memory_error
from tuna_models.process import refusing

GIB = 1 << 30
LIMITS = ModelLimits(2048, 300)
NO_MEMORY = "X needs more memory than the 2048 MiB that it may take, or than is free."


def crashed(reason: str, tail: str = "", peak_bytes: int = 0) -> ChildCrashed:
    fault = ChildCrashed(f"the child ended with {reason}", tail)
    fault.peak_bytes = peak_bytes
    return fault


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (ChildFailed("MemoryError: ", "a traceback"), NO_MEMORY),
        (ChildFailed("_ArrayMemoryError: Unable to allocate 4 GiB", ""), NO_MEMORY),
        (crashed("SIGABRT", "terminate called after ... 'std::bad_alloc'"), NO_MEMORY),
        (crashed("SIGABRT", "LLVM ERROR: out of memory"), NO_MEMORY),
        (crashed("SIGKILL"), NO_MEMORY),
        (crashed("SIGSEGV", peak_bytes=2 * GIB - 1), NO_MEMORY),  # of a pointer that is null
        (crashed("SIGXCPU"), "X took more than 600 CPU seconds."),
        (crashed("SIGSEGV", peak_bytes=GIB), None),
        (crashed("exit code 1", peak_bytes=2 * GIB), None),
        (ChildFailed("ValueError: no such operator", ""), None),
    ],
)
def test_a_process_that_ended_at_a_limit_is_told_with_its_setting(
    fault: ChildFault, said: str | None
) -> None:
    refusal = LIMITS.refusal("X", fault, cores=2)
    assert said == (None if refusal is None else str(refusal))
    if refusal is not None:
        setting = "TUNA_MODEL_CPU_S" if "CPU" in str(said) else "TUNA_MODEL_MEMORY_MIB"
        assert refusal.hint.startswith(f"set {setting}")


@pytest.mark.parametrize(
    "reason", ["std::bad_alloc", "Arena alloc failed", "Failed to serialize proto"]
)
def test_an_operator_is_not_blamed_for_memory_that_ran_out(reason: str) -> None:
    @refusing
    def handle() -> dict[str, object]:
        try:
            raise RuntimeError(reason)
        except RuntimeError:
            raise limits.BadInput("net.onnx is not an ONNX model") from None

    with pytest.raises(MemoryError):
        handle()


def test_another_error_is_no_lack_of_memory() -> None:
    raise_memory_error(limits.BadInput("the operator Conv takes 3 inputs"))


@pytest.mark.parametrize(
    ("machine_gib", "variables", "mib"),
    [
        (23, {}, 11_776),
        (512, {}, 32_768),
        (23, {"SANDBOX_MEMORY_MIB": "500"}, 500),
        (23, {"SANDBOX_MEMORY_MIB": "500", "MODEL_MEMORY_MIB": "20000"}, 20_000),
    ],
)
def test_memory_is_half_of_the_machines_unless_a_setting_says_otherwise(
    machine_gib: int,
    variables: dict[str, str],
    mib: int,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "memory_bytes", lambda: machine_gib * GIB)
    for name, value in variables.items():
        monkeypatch.setenv(f"TUNA_{name}", value)
    limits.get_settings.cache_clear()
    assert ModelLimits.of_settings().resources == {"RLIMIT_DATA": mib << 20}


def test_the_core_knows_the_names_for_machines_without_the_package() -> None:
    assert set(OF_DISTRIBUTIONS["tuna-models"]) == ModelSettings.model_fields.keys()


@pytest.mark.parametrize(
    ("groups", "mount", "files", "limit"),
    [
        ("0::/", "cgroup2 cgroup2 rw", {"memory.max": "1073741824"}, GIB),
        ("0::/a/b", "cgroup2 cgroup2 rw", {"a/memory.max": "1024", "a/b/memory.max": "max"}, 1024),
        ("3:memory:/d", "cgroup cgroup rw,memory", {"d/memory.limit_in_bytes": "1024"}, 1024),
        ("3:memory:/", "cgroup cgroup rw,memory", {"memory.limit_in_bytes": str(2**63)}, None),
        ("3:memory:/", "cgroup cgroup rw,cpu", {"memory.limit_in_bytes": "1024"}, None),
        ("0::/", "cgroup2 cgroup2 rw", {}, None),
    ],
)
def test_a_containers_memory_counts_where_it_is_less(
    tmp_path: Path, groups: str, mount: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "groups").write_text(groups)
    (tmp_path / "mounts").write_text(f"0 0 0:1 / {tmp_path / 'root'} rw - {mount}")
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    found = control_groups.memory_bytes(tmp_path / "groups", tmp_path / "mounts")
    assert found == (limit or control_groups.memory_bytes(tmp_path, tmp_path))
