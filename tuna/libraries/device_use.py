"""Use of a device by a library's steps: which one, whether it answers, and what is started beside
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuna.libraries.context import DeviceHandle, RunContext


@dataclass(frozen=True)
class DeviceUse:
    """The device of a library's device steps. The defaults are those of a library that starts
    nothing there."""

    #: vendor of the devices; None: the first GPU that the worker may use, else its measuring cores
    kind: str | None = None
    #: true if builds use measuring cores while nothing is measured there (`RunContext.build` with a
    #: `pid`)
    borrows_cores: bool = False
    #: function that returns why a device does not answer, empty when it does. Called before a
    #: worker's first chunk, after each failed attempt, and before a worker that was put aside comes
    #: back. Takes seconds at most: use a separate child with a time limit. The default assumes a
    #: healthy device.
    probe: Callable[[DeviceHandle], str] = lambda _: ""
    #: function that returns the device if it does not belong to this machine; None: it does
    own_device: Callable[[], DeviceHandle | None] = lambda: None
    #: function that starts what is slow to start, without waiting for it; called once by a worker
    #: that will run steps of the library
    warm_up: Callable[[RunContext], None] = lambda _: None
