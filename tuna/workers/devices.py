"""The device that a worker measures on: the first that is visible, by `tuna worker --devices` or
the parent's variables.

A measurement has it alone, and its cores too.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

from tuna.libraries.base import Library
from tuna.libraries.context import DeviceHandle
from tuna.sandbox import discovery
from tuna.sandbox.core_lending import measuring
from tuna.sandbox.cores import eval_cpus
from tuna.sandbox.device_lock import device_lock
from tuna.sandbox.discovery import CPU, Device, visibility
from tuna.settings import Settings, get_settings


def device_for(
    library: Library,
    settings: Settings,
    environ: Mapping[str, str] = os.environ,
    devices: Sequence[Device] | None = None,
) -> DeviceHandle:
    """The handle of the first device of the library's kind that is visible; `devices` stands in for
    `discovery.discover`."""
    if elsewhere := library.device.own_device():
        return elsewhere
    cpus, kind = eval_cpus(settings), library.device.kind
    cores = DeviceHandle(f"cpu{','.join(map(str, cpus))}", cpus=cpus)
    if kind == CPU:
        return cores
    here = discovery.discover(environ=environ) if devices is None else devices
    usable = [device for device in here if device.kind != CPU and kind in (None, device.kind)]
    chosen = {name: environ[name] for name in visibility() if name in environ}
    if usable:
        device = usable[0]
        identity = device.uuid or f"{device.kind}{device.index}"
        return DeviceHandle(identity, device.uuid, chosen or device.variables, cpus)
    # A device that discovery cannot see: an unknown driver, or a stand-in.
    names = ",".join(f"{name}={value}" for name, value in sorted(chosen.items()) if value)
    if not names and kind is None:
        return cores
    return DeviceHandle(names or f"{kind or 'device'}0", "", chosen, cpus)


def place_of(worker: str, device: DeviceHandle | None, node: str = "") -> str:
    """A device of a machine, or else a worker with its toolchain: what may be at fault for failures
    there.

    `worker`: see `runner.Runner`; `node`: distinguishes the Celery nodes of one machine, which may
    have different toolchains.
    """
    machine = worker or socket.gethostname()
    return (f"{machine}/{device.id}" if device else worker or node or machine)[:255]


@contextlib.contextmanager
def measuring_on(
    device: DeviceHandle,
    wait_s: float = float("inf"),
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Have the device and its cores for a measurement; this machine builds nothing meanwhile where
    TUNA_QUIET says so.

    Raises DeviceBusy as `device_lock` does. Builds on the cores are moved away, and with quiet are
    waited for.
    """
    quiet = bool(device.cpus) and get_settings().quiet == "yes"
    with (
        device_lock(device.locks, wait_s, cancelled),
        measuring(device.cpus, quiet=quiet, cancelled=cancelled),
    ):
        yield
