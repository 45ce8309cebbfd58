"""NVIDIA's management library (NVML) by ctypes: the devices of this machine, and their clocks.

It belongs to the driver and opens no context on a device. Source: NVIDIA's "NVML API Reference".
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK = 1
#: nvmlClocksEventReason*: slowdown by hardware, by software for heat, by hardware for heat, and by
#: the power supply. A power cap is none of them: what runs always meets it at the same clock.
_SLOWED = 0x08 | 0x20 | 0x40 | 0x80
#: Its name since driver 535, and before.
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
#: Architectures whose streaming multiprocessor has 64 cores for fp32; later ones have 128.
_OF_64_CORES = ("sm_70", "sm_72", "sm_75", "sm_80")


class NvmlError(Exception):
    """The library is not here, or a call of it failed."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "id", "subsystem")),
        ("bus_id", ctypes.c_char * 32),
    ]


@dataclass(frozen=True)
class NvmlDevice:
    """A device as NVML knows it."""

    name: str
    uuid: str
    bus: str  #: such as 00000000:3B:00.0
    arch: str  #: such as sm_90
    units: int  #: streaming multiprocessors
    memory_bytes: int


class Nvml:
    """The library, initialised; raises NvmlError where there is none."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(str(error)) from error
        self.call("nvmlInit_v2")

    def close(self) -> None:
        """Release the library."""
        self.call("nvmlShutdown")

    def devices(self) -> list[NvmlDevice]:
        """All devices, in the order of their numbers."""
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", byref(count))
        return [self._device(index) for index in range(count.value)]

    def sm_mhz(self, device: str, *, highest: bool = False) -> int:
        """The momentary clock of the multiprocessors of a device, or the highest that it can have.

        `device` is its UUID or number; empty: the first.
        """
        found = ctypes.c_uint()
        clock = "nvmlDeviceGetMaxClockInfo" if highest else "nvmlDeviceGetClockInfo"
        self.call(clock, self.handle(device), _SM_CLOCK, byref(found))
        return found.value

    def is_slowed(self, device: str) -> bool:
        """Whether the device protects itself from heat or a failing power supply."""
        found, handle = ctypes.c_ulonglong(), self.handle(device)
        try:
            self.call(_REASONS[0], handle, byref(found))
        except NvmlError:
            self.call(_REASONS[1], handle, byref(found))
        return bool(found.value & _SLOWED)

    def handle(self, device: str) -> ctypes.c_void_p:
        """A device by its UUID or number; empty: the first."""
        handle = ctypes.c_void_p()
        if device and not device.isdigit():
            self.call("nvmlDeviceGetHandleByUUID", device.encode(), byref(handle))
        else:
            self.call("nvmlDeviceGetHandleByIndex_v2", int(device or 0), byref(handle))
        return handle

    def _device(self, index: int) -> NvmlDevice:
        device, pci, memory = ctypes.c_void_p(), _Pci(), _Memory()
        major, minor, cores = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
        self.call("nvmlDeviceGetHandleByIndex_v2", index, byref(device))
        self.call("nvmlDeviceGetPciInfo_v3", device, byref(pci))
        self.call("nvmlDeviceGetMemoryInfo", device, byref(memory))
        self.call("nvmlDeviceGetCudaComputeCapability", device, byref(major), byref(minor))
        self.call("nvmlDeviceGetNumGpuCores", device, byref(cores))
        arch = f"sm_{major.value}{minor.value}"
        return NvmlDevice(
            name=self._text("nvmlDeviceGetName", device),
            uuid=self._text("nvmlDeviceGetUUID", device),
            bus=pci.bus_id.decode(),
            arch=arch,
            units=cores.value // unit_cores(arch),
            memory_bytes=memory.total,
        )

    def _text(self, name: str, device: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(128)
        self.call(name, device, text, len(text))
        return text.value.decode(errors="replace")

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library; raises NvmlError."""
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as error:  # an older driver
            raise NvmlError(f"{name} is missing") from error
        if code:
            raise NvmlError(f"{name} failed with code {code}")


def unit_cores(arch: str) -> int:
    """Return the number of cores for fp32 in a streaming multiprocessor (NVIDIA's "CUDA C++
    Programming Guide", table of arithmetic instructions)."""
    return 64 if arch in _OF_64_CORES else 128


def devices(library: str = LIBRARY) -> list[NvmlDevice]:
    """All devices; none where the library or its driver is not here."""
    try:
        nvml = Nvml(library)
        try:
            return nvml.devices()
        finally:
            nvml.close()
    except NvmlError:
        return []
