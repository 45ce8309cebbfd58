"""Devices of this machine, and the environment variables that show a process just one of them.

Sources: the vendor's management library (NVML, amdsmi) if it is here and works, else the vendor's
driver in /proc or /sys, else the measuring cores. Each takes its answers, module or root folder, so
that tests bring their own.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tuna.errors import BadInput
from tuna.sandbox import nvml
from tuna.settings import parse_cpus

SYS = Path("/sys")
PROC = Path("/proc")
_AMD_VENDOR = "4098"
#: Variables by which the runtimes of NVIDIA, AMD, OpenCL, Level Zero, SYCL and TPUs restrict a
#: process to some devices.
VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
    "TPU_VISIBLE_CHIPS",
)


class DeviceKind(str, Enum):
    """Vendor of a device, which decides how it is made visible."""

    NVIDIA = "nvidia"  #: CUDA_VISIBLE_DEVICES, by UUID
    AMD = "amd"  #: ROCR_VISIBLE_DEVICES, by index
    CPU = "cpu"  #: this machine's measuring cores; no variable


@dataclass(frozen=True)
class Device:
    """A device that one eval worker can have for itself."""

    kind: DeviceKind
    name: str  #: its marketing name
    index: int = 0  #: its runtime's number while all devices are visible
    uuid: str = ""  #: as its runtime's visibility variable takes it; empty: it has none
    node: int | None = None  #: NUMA node; None: unknown
    arch: str = ""  #: such as sm_90 or gfx942; empty: unknown
    units: int = 0  #: streaming multiprocessors or compute units; 0: unknown
    memory_bytes: int = 0  #: of the device; 0: unknown

    def variables(self) -> dict[str, str]:
        """Environment variables with which a process sees this device alone."""
        if self.kind is DeviceKind.NVIDIA:
            return {"CUDA_VISIBLE_DEVICES": self.uuid or str(self.index)}
        if self.kind is DeviceKind.AMD:
            # HIP numbers the devices that ROCR leaves, so HIP's own variable must name the first.
            return {"ROCR_VISIBLE_DEVICES": str(self.index), "HIP_VISIBLE_DEVICES": "0"}
        return {}


def discover(
    sys_root: Path = SYS, proc_root: Path = PROC, environ: Mapping[str, str] = os.environ
) -> list[Device]:
    """Return the devices that this process may use, in their runtimes' order, else the CPU."""
    nvidia = from_nvml(nvml.devices(), sys_root) or from_nvidia_driver(proc_root, sys_root)
    amd = from_amdsmi(_module("amdsmi")) or from_kfd(sys_root)
    nvidia = narrow(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    amd = narrow(
        narrow(amd, environ.get("ROCR_VISIBLE_DEVICES")), environ.get("HIP_VISIBLE_DEVICES")
    )
    return nvidia + amd or [Device(DeviceKind.CPU, "CPU")]


def choose(devices: Sequence[Device], text: str) -> list[int]:
    """Parse the positions of devices: `all`, or numbers such as `0,2`; raises BadInput."""
    if text.strip() == "all":
        return list(range(len(devices)))
    try:
        chosen = parse_cpus(text)
    except ValueError:
        chosen = ()
    if not chosen:
        raise BadInput(f"{text!r} names no devices.", hint="give all, or numbers such as 0,2")
    missing = [number for number in chosen if number >= len(devices)]
    if missing:
        there = ", ".join(f"{number} ({device.name})" for number, device in enumerate(devices))
        raise BadInput(f"There is no device {missing[0]} here.", hint=f"devices: {there}")
    return list(chosen)


def narrow(devices: Sequence[Device], visible: str | None) -> list[Device]:
    """Return the devices that a visibility variable leaves, in its order.

    As in the runtimes, the list ends at the first word that names none.
    """
    if visible is None:
        return list(devices)
    left: list[Device] = []
    for word in (part.strip() for part in visible.split(",")):
        found = [
            device
            for number, device in enumerate(devices)
            if word and word in (str(number), device.uuid)
        ]
        if not found:
            break
        left += found
    return left


def from_nvml(known: Iterable[nvml.NvmlDevice], sys_root: Path = SYS) -> list[Device]:
    """Return NVIDIA's devices from what NVML knows of them."""
    return [
        Device(
            DeviceKind.NVIDIA,
            one.name,
            index,
            one.uuid,
            # the domain has eight digits in NVML's bus ids, four in the kernel's
            _pci_node(sys_root, one.bus[-12:].lower()),
            one.arch,
            one.units,
            one.memory_bytes,
        )
        for index, one in enumerate(known)
    ]


def from_nvidia_driver(proc_root: Path = PROC, sys_root: Path = SYS) -> list[Device]:
    """Return NVIDIA's devices from its driver's folders, one per bus address of this container."""
    found: list[Device] = []
    for path in sorted(proc_root.glob("driver/nvidia/gpus/*/information")):
        pairs = (line.partition(":") for line in path.read_text().splitlines())
        facts = {name.strip(): value.strip() for name, _, value in pairs}
        uuid = facts.get("GPU UUID", "?")
        node = _pci_node(sys_root, path.parent.name)
        if "?" in uuid:  # the driver writes question marks until the device is first used
            uuid = ""
        name = facts.get("Model", "NVIDIA GPU")
        found.append(Device(DeviceKind.NVIDIA, name, len(found), uuid, node))
    return found


def from_amdsmi(smi: Any) -> list[Device]:
    """Return AMD's devices from `amdsmi` in HIP's order; none without that order (ROCm < 6.4)."""
    if smi is None or not hasattr(smi, "amdsmi_get_gpu_enumeration_info"):
        return []
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException:
        return []
    try:
        found = []
        for handle in smi.amdsmi_get_processor_handles():
            name = str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
            order = smi.amdsmi_get_gpu_enumeration_info(handle)
            index, uuid = int(order["hip_id"]), str(order.get("hip_uuid", ""))
            node = int(smi.amdsmi_topo_get_numa_node_number(handle))
            found.append(Device(DeviceKind.AMD, name, index, uuid, None if node < 0 else node))
        return sorted(found, key=lambda device: device.index)
    except (smi.AmdSmiException, KeyError, ValueError):
        return []
    finally:
        smi.amdsmi_shut_down()


def from_kfd(sys_root: Path = SYS) -> list[Device]:
    """Return AMD's devices from the kernel's compute topology, as far as it is readable."""
    found: list[Device] = []
    nodes = [
        path for path in sys_root.glob("class/kfd/kfd/topology/nodes/*") if path.name.isdigit()
    ]
    for path in sorted(nodes, key=lambda path: int(path.name)):
        facts = _properties(path / "properties")
        if facts.get("vendor_id") != _AMD_VENDOR or int(facts.get("simd_count", 0)) == 0:
            continue
        version, unique = int(facts.get("gfx_target_version", 0)), int(facts.get("unique_id", 0))
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        units = int(facts["simd_count"]) // max(1, int(facts.get("simd_per_cu", 1)))
        render = f"renderD{facts.get('drm_render_minor')}"
        node = _number(sys_root / "class" / "drm" / render / "device" / "numa_node")
        uuid = f"GPU-{unique:016x}" if unique else ""
        memory = sum(_bank_bytes(bank) for bank in path.glob("mem_banks/*/properties"))
        name = f"{arch} x {units}"
        found.append(Device(DeviceKind.AMD, name, len(found), uuid, node, arch, units, memory))
    return found


def _bank_bytes(path: Path) -> int:
    """Bytes of a bank of memory if it is the device's own (HSA_MEM_HEAP_TYPE_FB_PUBLIC or
    FB_PRIVATE)."""
    facts = _properties(path)
    return int(facts.get("size_in_bytes", 0)) if facts.get("heap_type") in ("1", "2") else 0


def _properties(path: Path) -> dict[str, str]:
    """Return the pairs of a topology file; none where the kernel answers EPERM to a container."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {words[0]: words[1] for words in (line.split() for line in lines) if len(words) == 2}


def _pci_node(sys_root: Path, address: str) -> int | None:
    return _number(sys_root / "bus" / "pci" / "devices" / address / "numa_node")


def _number(path: Path) -> int | None:
    """Return the number in a kernel's file; None if it is missing, or -1 for unknown."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return None if number < 0 else number


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # amdsmi raises various errors when its library is missing
        return None
