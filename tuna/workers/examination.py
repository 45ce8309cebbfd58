"""Examination of a worker's machine: its folders, its device by the library's own probe, and errors
that are the machine's whatever the job."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tuna.errors import LibraryMissing
from tuna.libraries.base import Library
from tuna.libraries.context import DeviceHandle
from tuna.libraries.items import StepResult, tail
from tuna.sandbox.processes import ChildNotStarted
from tuna.vocabulary import Cause

#: Seconds for `DeviceUse.probe`
PROBE_S = 60.0
_TEST_BYTES = 1 << 20
_TICK_S = 0.5
#: Free bytes above which a candidate's "no space left" is blamed on the candidate, not on the disk
_ROOM_BYTES = 1 << 28
#: Errors of the machine, whatever the job: no space, quota, read-only or broken disk, no memory, no
#: processes or files left
_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
    }
)
#: Messages of a foreign program without space. Its files are gone with it, so that the disk may
#: have space again.
NO_SPACE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


class Fault(NamedTuple):
    """Why a failure is not charged to the job."""

    cause: Cause
    text: str
    is_unfit: bool = True  #: true if the worker must not go on

    def charged_to_worker(self, result: StepResult) -> StepResult:
        """The result as a failure of this worker's; what it measured does not count."""
        text = f"{result.output_tail}\n{self.text}".strip()
        facts = {
            "ok": False,
            "cause": self.cause,
            "uncharged": True,
            "trials": (),
            "output_tail": tail(text),
        }
        return result.model_copy(update=facts)


def examined(
    folders: Sequence[Path],
    device: DeviceHandle | None,
    library: Library,
    ending: Callable[[], bool],
) -> Fault | None:
    """Return the fault of the folders or, by the library's own word, of the device; `ending`:
    whether the worker is to end, and waits for no answer."""
    for folder in folders:
        try:
            _write_to(folder)
        except OSError as error:
            return Fault(Cause.INFRA, f"{folder} cannot be written: {error.strerror}")
    words = _probe(library, device, ending) if device else ""
    return Fault(Cause.DEVICE_LOST, f"{device.id if device else ''}: {words}") if words else None


def lack_of_room(folders: Sequence[Path]) -> Fault | None:
    """Return the fault of a folder in which no large file fits."""
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            if error.errno in _ERRNOS:
                text = f"{folder} has less than {_ROOM_BYTES >> 20} MiB left: {error.strerror}"
                return Fault(Cause.INFRA, text)
    return None


def machine_error(error: BaseException) -> Fault | None:
    """Return the fault behind an error that the library raised, if the machine's."""
    for one in _chain(error):
        if isinstance(one, ChildNotStarted | LibraryMissing) or (
            isinstance(one, OSError) and one.errno in _ERRNOS
        ):
            return Fault(Cause.INFRA, f"{type(one).__name__}: {one}")
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _write_to(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(_TEST_BYTES))


def _probe(library: Library, device: DeviceHandle, ending: Callable[[], bool]) -> str:
    """Return the answer of `DeviceUse.probe`; one that raises or does not answer, also by the time
    of `ending`, is as good as a bad one."""
    said: list[str] = []

    def ask() -> None:
        try:
            said.append(library.device.probe(device))
        except Exception as error:  # the library's own code
            said.append(f"{type(error).__name__}: {error}")

    asking = threading.Thread(target=ask, name="probe", daemon=True)
    asking.start()
    until = time.monotonic() + PROBE_S
    while asking.is_alive() and (left_s := until - time.monotonic()) > 0 and not ending():
        asking.join(min(left_s, _TICK_S))
    return (
        said[0]
        if said
        else f"no answer to a probe within {PROBE_S:g} s, or before this worker was to end"
    )
