"""NVIDIA's devices are found in what its driver and its library say, recorded here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuna.sandbox import discovery
from tuna.sandbox.discovery import Device
from tuna.sandbox.processes import child_env
from tuna_triton import nvml
from tuna_triton.devices import NVIDIA, VENDOR, from_nvidia_driver, from_nvml
from tuna_triton.nvml import NvmlDevice


@pytest.fixture()
def sys_root(tmp_path: Path) -> Path:
    """A /sys that knows the NUMA node of the first of two cards."""
    _write(tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node", "0\n")
    _write(tmp_path / "bus/pci/devices/0000:d8:00.0/numa_node", "-1\n")
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


#: What NVIDIA's library says on a machine with two cards.
NVML = (
    NvmlDevice("NVIDIA H200", "GPU-0", "00000000:3B:00.0", "sm_90", 132, 141 << 30),
    NvmlDevice("NVIDIA L40S", "GPU-1", "00000000:D8:00.0", "sm_89", 142, 48 << 30),
)


def visible(words: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": words}


def test_nvidias_library_names_devices_by_uuid(sys_root: Path) -> None:
    assert from_nvml(NVML, sys_root) == [
        Device(NVIDIA, "NVIDIA H200", 0, "GPU-0", 0, "sm_90", 132, 141 << 30, visible("GPU-0")),
        Device(NVIDIA, "NVIDIA L40S", 1, "GPU-1", None, "sm_89", 142, 48 << 30, visible("GPU-1")),
    ]


def test_without_its_driver_nothing_is_found() -> None:
    # of libraries that are not there, and that have no such functions
    assert nvml.devices("libnone.so.1") == nvml.devices("libc.so.6") == []


def test_nvidias_driver_is_asked_where_its_library_is_missing(sys_root: Path) -> None:
    text = (
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 64\nGPU UUID: \t {}\nBus Type: \t PCIe\nBus Location:"
        " \t {}\n"
    )
    _write(
        sys_root / "driver/nvidia/gpus/0000:3b:00.0/information",
        text.format("GPU-5d5b0d45", "0000:3b:00.0"),
    )
    _write(
        sys_root / "driver/nvidia/gpus/0000:d8:00.0/information",
        text.format("GPU-????????", "0000:d8:00.0"),
    )
    found = from_nvidia_driver(sys_root, sys_root)
    assert found == [
        Device(NVIDIA, "NVIDIA H200", 0, "GPU-5d5b0d45", 0, variables=visible("GPU-5d5b0d45")),
        Device(NVIDIA, "NVIDIA H200", 1, variables=visible("1")),
    ]


def test_a_device_that_the_scheduler_hides_stays_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "devices", lambda: list(NVML))
    assert discovery.VENDORS.get(NVIDIA) is VENDOR
    (found,) = discovery.discover(tmp_path, tmp_path, visible("GPU-1"))
    assert (found.kind, found.index) == (NVIDIA, 1)


@pytest.mark.parametrize("name", VENDOR.visibility)
def test_a_child_sees_the_device_that_its_worker_was_given(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("3", ""):
        monkeypatch.setenv(name, value)
        assert child_env()[name] == value
