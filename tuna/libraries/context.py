"""Context of a step: the artifacts, scratch, cores, device and cancellation that a worker provides
to a library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuna.sandbox.core_lending import BuildCores


class ArtifactStore(Protocol):
    """Store of compiled code, addressed by the SHA-256 of its bytes."""

    def put(self, data: bytes) -> str:
        """Store `data` and return its SHA-256; raises StorageFull without space, and leaves
        nothing behind."""

    def get(self, digest: str) -> bytes:
        """The verified bytes; raises KeyError if they are gone or differ from the hash."""

    def find_build(self, key: str) -> bytes | None:
        """The verified artifact that was recorded last for a build key (a SHA-256 in hex); None if
        there is none any more."""

    def record_build(self, key: str, digest: str) -> None:
        """Record an artifact for a build key, where the store accepts it from this process; raises
        what `put` does."""


@dataclass(frozen=True)
class DeviceHandle:
    """The device that a step on `Resource.DEVICE` may use, and how it is made visible to a child
    process alone."""

    id: str  #: name for logs and locks, such as `GPU-5d5ba0d6` or `cpu3`
    uuid: str = ""  #: name by its driver; empty for cores
    #: environment variables that select it, such as {"CUDA_VISIBLE_DEVICES": "GPU-5d5ba0d6"}
    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()  #: cores that measure with it, or that it consists of

    @property
    def cores_only(self) -> bool:
        """Whether it is nothing but measuring cores."""
        return not self.uuid and self.id.startswith("cpu")

    @property
    def locks(self) -> tuple[str, ...]:
        """Names of the locks of a measurement: a device with a driver by its identity, regardless
        of cores; else each core."""
        if not self.cores_only:
            return (self.uuid or self.id,)
        return tuple(f"cpu{cpu}" for cpu in self.cpus)


@dataclass(frozen=True)
class RunContext:
    """The resources that a worker provides to a library during a step."""

    artifacts: ArtifactStore
    scratch: Path  #: folder private to this chunk, removed with its contents when the chunk ends
    cpus: tuple[int, ...]  #: cores that the step may use
    device: DeviceHandle | None = None  #: device that the step uses; None for steps on a CPU
    #: function that returns true once results do not count any more: the chunk was canceled, or its
    #: lease lost. Pass it to every call of the sandbox, which kills the child and raises
    #: ChildCancelled; do not catch that.
    cancelled: Callable[[], bool] = lambda: False
    #: function that returns true once the worker is to end: a step may finish, and one that only
    #: waits for a device gives up
    ending: Callable[[], bool] = lambda: False
    #: called with the device that is measured on now, by a library that chooses among several
    uses: Callable[[str], None] = lambda _device: None
    #: working folder of children that outlive the chunk; None: `scratch`
    lasting: Path | None = None
    #: compiling cores of the worker; None: builds use `cpus`, whatever is measured meanwhile
    builds: BuildCores | None = None

    def build(
        self, limit_s: float, pid: int | None = None, *, wide: bool = False
    ) -> AbstractContextManager[int | None]:
        """Return a context to hold during one build of at most `limit_s`, so that it does not
        disturb a measurement: see `BuildCores.build`."""
        return (
            self.builds.build(limit_s, pid, self.cancelled, wide=wide)
            if self.builds
            else contextlib.nullcontext()
        )
