"""Devices are found in what drivers and libraries say, recorded here as small trees and modules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuna.errors import BadInput
from tuna.sandbox import discovery
from tuna.sandbox.discovery import (
    AMD,
    CPU,
    Device,
    Vendor,
    choose,
    from_amdsmi,
    from_kfd,
    narrow,
)

#: A vendor of two devices, one of which its variable may leave.
OTHERS = Vendor(
    lambda sys_root, proc_root, environ: narrow(
        [Device("other", "o", index) for index in range(2)], environ.get("OTHERS")
    ),
    ("OTHERS",),
)
# What the kernel shows of a machine with two sockets and two MI300X, in its own order of lines.
_CPU = (
    "cpu_cores_count 96\nsimd_count 0\nmem_banks_count 1\nsimd_per_cu 0\ngfx_target_version"
    " 0\nvendor_id 0\n"
)
_GPU = """cpu_cores_count 0
simd_count 1216
mem_banks_count 1
caches_count 513
io_links_count 1
simd_arrays_count 32
cu_per_simd_array 10
simd_per_cu 4
gfx_target_version 90402
vendor_id 4098
device_id 29857
location_id {location}
domain 0
drm_render_minor {minor}
unique_id {unique}
"""


@pytest.fixture()
def sys_root(tmp_path: Path) -> Path:
    """A /sys with two CPU nodes and two MI300X, the first card on the second socket."""
    for number in (0, 1):
        _write(tmp_path / f"class/kfd/kfd/topology/nodes/{number}/properties", _CPU)
    for number, minor, unique, node in (
        (2, 128, 0x1A2B3C4D5E6F7081, 1),
        (10, 136, 0x8C6B86D6DDCE53AC, 0),
    ):
        text = _GPU.format(location=number << 8, minor=minor, unique=unique)
        node_folder = tmp_path / f"class/kfd/kfd/topology/nodes/{number}"
        _write(node_folder / "properties", text)
        for bank, heap_type, size in ((0, 1, 192 << 30), (1, 0, 64 << 10)):
            words = f"heap_type {heap_type}\nsize_in_bytes {size}\nflags 0\n"
            _write(node_folder / f"mem_banks/{bank}/properties", words)
        _write(tmp_path / f"class/drm/renderD{minor}/device/numa_node", f"{node}\n")
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class _SmiError(Exception):
    pass


def _smi(**changes: Any) -> Any:
    """The module amdsmi, whose order is not HIP's."""
    facts = {
        "AmdSmiException": _SmiError,
        "amdsmi_init": lambda: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: ["first", "second"],
        "amdsmi_get_gpu_asic_info": lambda handle: {"market_name": f"AMD Instinct MI300X {handle}"},
        "amdsmi_get_gpu_enumeration_info": lambda handle: {
            "drm_render": 128,
            "drm_card": 1,
            "hsa_id": 3,
            "hip_id": ["second", "first"].index(handle),
            "hip_uuid": f"GPU-{handle}",
        },
        "amdsmi_topo_get_numa_node_number": lambda handle: {"first": 1, "second": -1}[handle],
    }
    return SimpleNamespace(**(facts | changes))


def variables(index: int) -> dict[str, str]:
    """Those with which a process sees one of AMD's devices alone."""
    return {"ROCR_VISIBLE_DEVICES": str(index), "HIP_VISIBLE_DEVICES": "0"}


def test_amd_devices_are_the_topologys_nodes_with_simds_in_its_order(sys_root: Path) -> None:
    facts = "gfx942", 304, 192 << 30
    assert from_kfd(sys_root) == [
        Device(AMD, "gfx942 x 304", 0, "GPU-1a2b3c4d5e6f7081", 1, *facts, variables(0)),
        Device(AMD, "gfx942 x 304", 1, "GPU-8c6b86d6ddce53ac", 0, *facts, variables(1)),
    ]


def test_a_device_that_the_container_was_not_given_does_not_count(sys_root: Path) -> None:
    # The kernel answers EPERM; a test that runs as root cannot have that, but a folder is as
    # unreadable.
    (sys_root / "class/kfd/kfd/topology/nodes/2/properties").unlink()
    (sys_root / "class/kfd/kfd/topology/nodes/2/properties").mkdir()
    assert [(device.index, device.uuid) for device in from_kfd(sys_root)] == [
        (0, "GPU-8c6b86d6ddce53ac")
    ]


@pytest.mark.parametrize(
    ("version", "arch"), [(90010, "gfx90a"), (100300, "gfx1030"), (110003, "gfx1103")]
)
def test_an_architecture_has_its_usual_name(sys_root: Path, version: int, arch: str) -> None:
    text = _GPU.format(location=0, minor=128, unique=0).replace("90402", str(version))
    _write(sys_root / "class/kfd/kfd/topology/nodes/2/properties", text)
    first = from_kfd(sys_root)[0]
    assert (first.name, first.uuid) == (f"{arch} x 304", "")


def test_a_machine_without_amds_driver_has_none(tmp_path: Path) -> None:
    assert from_kfd(tmp_path) == []


def test_a_library_without_its_driver_finds_nothing(sys_root: Path) -> None:
    def fail(*_: Any) -> None:
        raise _SmiError

    assert from_amdsmi(None) == from_amdsmi(_smi(amdsmi_init=fail)) == []
    assert from_amdsmi(_smi(amdsmi_get_gpu_asic_info=fail)) == []


def test_amds_library_gives_hips_order() -> None:
    assert from_amdsmi(_smi()) == [
        Device(AMD, "AMD Instinct MI300X second", 0, "GPU-second", variables=variables(0)),
        Device(AMD, "AMD Instinct MI300X first", 1, "GPU-first", 1, variables=variables(1)),
    ]


def test_an_amdsmi_that_does_not_know_hips_order_is_not_asked() -> None:
    old = _smi()
    del old.amdsmi_get_gpu_enumeration_info
    assert from_amdsmi(old) == []


def test_what_the_scheduler_hides_stays_hidden(
    sys_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_module", lambda _: None)
    environ = {"OTHERS": "1", "ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}
    with discovery.VENDORS.adding("others", OTHERS):
        found = discovery.discover(sys_root, sys_root, environ)
        assert "OTHERS" in discovery.visibility()
    assert [(device.kind, device.index) for device in found] == [("other", 1), (AMD, 1)]


def test_a_machine_without_devices_has_its_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_module", lambda _: None)
    assert discovery.discover(tmp_path, tmp_path, {}) == [Device(CPU, "CPU")]


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("", []), ("-1,0", []), ("0,7,1", [0])],
)
def test_a_visibility_variable_ends_at_the_first_unknown_word(
    visible: str | None, left: list[int]
) -> None:
    devices = [Device(AMD, "a", 0), Device(AMD, "a", 1)]
    assert [device.index for device in narrow(devices, visible)] == left


def test_devices_are_chosen_by_number() -> None:
    devices = [Device(AMD, name) for name in "abc"]
    assert choose(devices, "all") == [0, 1, 2]
    assert choose(devices, "2,0") == [0, 2]
    assert choose(devices, "0-1") == [0, 1]
    for text in ("", "x", "-1"):
        with pytest.raises(BadInput, match="names no devices"):
            choose(devices, text)
    with pytest.raises(BadInput, match="no device 3") as error:
        choose(devices, "1,3")
    assert error.value.hint == "devices: 0 (a), 1 (b), 2 (c)"
