"""Devices of this machine, and the environment variables that show a process just one of them.

Sources: those of the vendors whose packages are installed; for AMD's its management library
(amdsmi) if it is here and works, else the driver in /sys; else the measuring cores. Each takes its
answers, module or root folder, so that tests bring their own. A vendor is an entry point:

    [project.entry-points."tuna.devices"]
    name = "my_package.devices:VENDOR"
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuna.common.setting_values import parse_cpus
from tuna.errors import BadInput
from tuna.plugins import Plugins

SYS = Path("/sys")
PROC = Path("/proc")
_AMD_VENDOR = "4098"
#: Kinds of devices: AMD's, and this machine's measuring cores. Packages bring others.
AMD, CPU = "amd", "cpu"
#: Variables by which the runtimes of OpenCL, Level Zero, SYCL and TPUs restrict a process to some
#: devices
_VISIBILITY = (
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
    "TPU_VISIBLE_CHIPS",
)


@dataclass(frozen=True)
class Device:
    """A device that one eval worker can have for itself."""

    kind: str  #: kind of device, as `DeviceUse.kind`
    name: str  #: marketing name
    index: int = 0  #: number by the runtime's count while all devices are visible
    uuid: str = ""  #: name in the runtime's visibility variable; empty: none
    node: int | None = None  #: NUMA node; None: unknown
    arch: str = ""  #: architecture, such as sm_90 or gfx942; empty: unknown
    units: int = 0  #: streaming multiprocessors or compute units; 0: unknown
    memory_bytes: int = 0  #: bytes of the device's memory; 0: unknown
    #: environment variables with which a process sees this device alone
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Vendor:
    """The devices of a vendor: how they are found, and what a process needs that uses one."""

    #: function that returns the devices in their runtime's order, as the variables of an
    #: environment leave them; its arguments are the folders /sys and /proc and the environment
    find: Callable[[Path, Path, Mapping[str, str]], list[Device]]
    #: variables by which its runtimes restrict a process to some devices
    visibility: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  #: patterns of the device nodes' names in /dev


VENDORS: Plugins[Vendor] = Plugins("tuna.devices", "vendor of devices", Vendor)


def vendors() -> list[Vendor]:
    """Return those of installed packages, and AMD."""
    return [*VENDORS.all().values(), _AMD]


def visibility() -> tuple[str, ...]:
    """Return the variables that restrict a process to some devices."""
    return (*(name for vendor in vendors() for name in vendor.visibility), *_VISIBILITY)


def discover(
    sys_root: Path = SYS, proc_root: Path = PROC, environ: Mapping[str, str] = os.environ
) -> list[Device]:
    """Return the devices that this process may use, in their runtimes' order, else the CPU."""
    found = [one for vendor in vendors() for one in vendor.find(sys_root, proc_root, environ)]
    return found or [Device(CPU, "CPU")]


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
        raise BadInput(f"This machine has no device {missing[0]}.", hint=f"devices: {there}")
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


def _find_amd(sys_root: Path, _: Path, environ: Mapping[str, str]) -> list[Device]:
    found = from_amdsmi(_module("amdsmi")) or from_kfd(sys_root)
    left = narrow(found, environ.get("ROCR_VISIBLE_DEVICES"))
    return narrow(left, environ.get("HIP_VISIBLE_DEVICES"))


_AMD = Vendor(_find_amd, ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), ("kfd", "dri"))


def from_amdsmi(smi: Any) -> list[Device]:
    """Return AMD's devices from `amdsmi` in HIP's order; none without that order (ROCm < 6.4)."""
    if smi is None or not hasattr(smi, "amdsmi_get_gpu_enumeration_info"):
        return []
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException:
        return []
    try:
        devices = []
        for handle in smi.amdsmi_get_processor_handles():
            name = str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
            order = smi.amdsmi_get_gpu_enumeration_info(handle)
            index, uuid = int(order["hip_id"]), str(order.get("hip_uuid", ""))
            number = int(smi.amdsmi_topo_get_numa_node_number(handle))
            node = None if number < 0 else number
            devices.append(Device(AMD, name, index, uuid, node, variables=_amd_variables(index)))
        return sorted(devices, key=lambda device: device.index)
    except (smi.AmdSmiException, KeyError, ValueError):
        return []
    finally:
        smi.amdsmi_shut_down()


def from_kfd(sys_root: Path = SYS) -> list[Device]:
    """Return AMD's devices from the kernel's compute topology, as far as it is readable."""
    devices: list[Device] = []
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
        variables = _amd_variables(len(devices))
        devices.append(Device(AMD, name, len(devices), uuid, node, arch, units, memory, variables))
    return devices


def _amd_variables(index: int) -> Mapping[str, str]:
    # HIP numbers the devices that ROCR leaves, so HIP's own variable must name the first.
    return {"ROCR_VISIBLE_DEVICES": str(index), "HIP_VISIBLE_DEVICES": "0"}


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


def pci_node(sys_root: Path, address: str) -> int | None:
    """Return the NUMA node of a device by its bus address, such as `0000:3b:00.0`."""
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
