"""NVIDIA's devices of this machine, by its management library (NVML) where that works, else by its
driver in /proc."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tuna.sandbox.discovery import PROC, SYS, Device, Vendor, narrow, pci_node
from tuna_triton import nvml

NVIDIA = "nvidia"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _find(sys_root: Path, proc_root: Path, environ: Mapping[str, str]) -> list[Device]:
    found = from_nvml(nvml.devices(), sys_root) or from_nvidia_driver(proc_root, sys_root)
    return narrow(found, environ.get(_VISIBLE))


#: Among its nodes are nvidiactl, nvidia-uvm and nvidia-caps.
VENDOR = Vendor(_find, (_VISIBLE, "CUDA_DEVICE_ORDER"), ("nvidia*",))


def from_nvml(known: Iterable[nvml.NvmlDevice], sys_root: Path = SYS) -> list[Device]:
    """Return NVIDIA's devices from what NVML knows of them."""
    return [
        Device(
            NVIDIA,
            one.name,
            index,
            one.uuid,
            # the domain has eight digits in NVML's bus ids, four in the kernel's
            pci_node(sys_root, one.bus[-12:].lower()),
            one.arch,
            one.units,
            one.memory_bytes,
            _variables(one.uuid, index),
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
        node = pci_node(sys_root, path.parent.name)
        if "?" in uuid:  # the driver writes question marks until the device is first used
            uuid = ""
        name = facts.get("Model", "NVIDIA GPU")
        variables = _variables(uuid, len(found))
        found.append(Device(NVIDIA, name, len(found), uuid, node, variables=variables))
    return found


def _variables(uuid: str, index: int) -> Mapping[str, str]:
    return {_VISIBLE: uuid or str(index)}
