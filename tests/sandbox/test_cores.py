"""The cores that measure are kept apart from those that compile."""

from __future__ import annotations

import math
import os
import runpy
from pathlib import Path

import pytest
from places import ROOT

from tuna.errors import BadInput
from tuna.sandbox import cores
from tuna.settings import Settings, get_settings


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cpus", lambda: (0, 1, 4, 5))


@pytest.mark.parametrize(
    ("chosen", "measuring", "compiling"),
    [
        ("", (5,), (0, 1, 4)),
        ("0", (0,), (1, 4, 5)),
        ("4-5,1", (1, 4, 5), (0,)),
        ("0,1,4,5", (0, 1, 4, 5), (0, 1, 4, 5)),
    ],
)
def test_what_does_not_measure_compiles(
    four: None, chosen: str, measuring: tuple[int, ...], compiling: tuple[int, ...]
) -> None:
    settings = Settings(eval_cpus=chosen)
    assert cores.eval_cpus(settings) == measuring
    assert cores.compile_cpus(settings) == compiling


def test_one_core_measures_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cpus", lambda: (3,))
    assert (
        cores.eval_cpus(Settings(eval_cpus=""))
        == cores.compile_cpus(Settings(eval_cpus=""))
        == (3,)
    )


def test_a_core_that_is_not_there_is_named_with_those_that_are(four: None) -> None:
    with pytest.raises(BadInput, match="core 2") as error:
        cores.eval_cpus(Settings(eval_cpus="2"))
    assert error.value.hint == "Choose from 0, 1, 4, 5."


def test_cores_to_measure_on_are_the_last_ones_and_first_those_of_other_physical_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = {cpu: cores.CpuTopology(0, (cpu & ~1, cpu | 1)) for cpu in range(6)}
    monkeypatch.setattr(cores, "available_cpus", lambda: tuple(pairs))
    monkeypatch.setattr(cores, "read_places", lambda cpus: {cpu: pairs[cpu] for cpu in cpus})
    settings = Settings(eval_cpus="")
    assert cores.some_cpus(1, settings) == (5,)
    assert cores.some_cpus(3, settings) == (1, 3, 5)
    assert cores.some_cpus(4, settings) == (1, 3, 4, 5)
    assert cores.some_cpus(6, settings) == tuple(pairs)
    assert cores.some_cpus(2, Settings(eval_cpus="0-2")) == (1, 2)
    with pytest.raises(BadInput, match="7 cores cannot measure: this process may use 6"):
        cores.some_cpus(7, settings)
    with pytest.raises(BadInput, match="4 cores cannot measure: TUNA_EVAL_CPUS names 3"):
        cores.some_cpus(4, Settings(eval_cpus="0-2"))


@pytest.mark.parametrize("before", [None, "0-2"])
def test_a_number_of_cores_is_that_setting_for_as_long_as_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.setattr(cores, "available_cpus", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(
        cores, "read_places", lambda cpus: {cpu: cores.CpuTopology() for cpu in cpus}
    )
    monkeypatch.delenv("TUNA_EVAL_CPUS", raising=False)
    if before:
        monkeypatch.setenv("TUNA_EVAL_CPUS", before)
    get_settings.cache_clear()
    with cores.measuring_with(2):
        assert os.environ["TUNA_EVAL_CPUS"] == ("1,2" if before else "2,3")
        assert len(cores.eval_cpus()) == 2
        assert cores.of_all() == "2 of 4 cores"
        with cores.measuring_with(None):
            assert len(cores.eval_cpus()) == 2
    assert os.environ.get("TUNA_EVAL_CPUS") == before
    with cores.measuring_with(None):
        assert len(cores.eval_cpus()) == (3 if before else 4)
    assert get_settings().eval_cpus == (before or "")


_V2 = "0 0 0:1 / {root} rw - cgroup2 cgroup2 rw,nsdelegate"
_V1 = "0 0 0:1 / {root}/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        ("0::/", _V2, {"cpu.max": "100000 100000"}, 1.0),  # a container: its group is the root
        ("0::/", _V2, {}, None),  # the machine's root has no such file
        ("0::/a/b", _V2, {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b", _V2, {"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/../b", _V2, {"cpu.max": "50000 100000"}, 0.5),  # a group beside the namespace's
        (
            "4:memory:/m\n1:cpu:/a\n0::/",
            f"0 0 0:2 / {{root}}/memory rw - cgroup cgroup rw,memory\n{_V1}\n{_V2}",
            {"cpu,cpuacct/a": "200000", "memory/m": "100000"},
            2.0,
        ),
        (  # a container of cgroup v1, which is told the host's path
            "3:cpu,cpuacct:/docker/1f",
            _V1.replace(" / ", " /docker/1f "),
            {"cpu,cpuacct": "300000"},
            3.0,
        ),
        # the folder has another order than the file, as on RHEL 7 and Amazon Linux 2
        ("4:cpuacct,cpu:/docker/x", _V1, {"cpu,cpuacct/docker/x": "100000"}, 1.0),
        # the mount shows a group that is neither the root nor the process's own
        ("4:cpuacct,cpu:/a/b/c", _V1.replace(" / ", " /a "), {"cpu,cpuacct/b/c": "50000"}, 0.5),
        ("1:cpu:/", _V1, {"cpu,cpuacct": "-1"}, None),
        ("1:name=systemd:/\n2:cpuset:/", _V1, {"cpu,cpuacct": "100000"}, None),
        ("", _V1, {"cpu,cpuacct": "100000"}, None),
        ("0::/", "", {"cpu.max": "100000 100000"}, None),
    ],
)
def test_the_cpu_quota_is_the_least_of_the_groups_of_the_process(
    tmp_path: Path, groups: str, mounts: str, files: dict[str, str], quota: float | None
) -> None:
    """`files` has the text of `cpu.max`, or the quota of a folder of cgroup v1."""
    (tmp_path / "groups").write_text(groups)
    (tmp_path / "mounts").write_text(mounts.format(root=tmp_path / "root"))
    for name, text in files.items():
        folder = tmp_path / "root" / name.removesuffix("cpu.max")
        folder.mkdir(parents=True, exist_ok=True)
        if name.endswith("cpu.max"):
            (folder / "cpu.max").write_text(f"{text}\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{text}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.cpu_quota(tmp_path / "groups", tmp_path / "mounts") == quota
    example = runpy.run_path(str(ROOT / "examples" / "run_model.py"))["cpu_quota"]
    assert example(tmp_path / "groups", tmp_path / "mounts") == (quota or math.inf)


@pytest.mark.parametrize(
    ("quota", "usable"), [(None, 4), (0.5, 1), (1.0, 1), (2.9, 2), (4.0, 4), (64.0, 4)]
)
def test_as_many_cores_are_usable_as_the_quota_pays_for(
    four: None, monkeypatch: pytest.MonkeyPatch, quota: float | None, usable: int
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.usable_count() == usable
    with cores.measuring_with(None):
        assert len(cores.eval_cpus()) == usable
        limit = "" if quota is None else f" under a CPU quota of {quota:g}"
        assert cores.of_all() == f"{usable} of 4 cores{limit}"
