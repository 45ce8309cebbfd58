"""Lends idle measuring cores to builds, and pauses builds for measurements that need quiet.

Workers of one user on this machine find each other by file locks, which the kernel releases with
their holder:

    offered-N    shared, for the life of a worker that measures with core N and lends it to builds
    measured-N   shared, for a chunk that is measured with core N, or is about to be
    quiet        shared, for a chunk during which this machine must build nothing
    waiting      shared, while a build waits for the end of such a chunk
    build-K      exclusive, for a build on the compiling cores; K counts those builds
    build-cpuN   exclusive, for a build on core N

Each side takes its own lock before it looks at the other's, so that at least one of them sees the
other. A measurement comes first: a build that sees one leaves the core, or waits. A measurement
waits for no build on its core, but moves the processes of that build to the cores that compile,
where they go on: neither a long build nor a frozen worker holds it up. Only for quiet does it wait,
for the builds that run, and for none longer than that build's own time limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tuna.common.files import own_folder
from tuna.sandbox.cores import available_cpus
from tuna.sandbox.device_lock import folders, opened
from tuna.sandbox.process_tree import descendants

_POLL_S = 0.005
#: Maximum of passes over the processes of a build that is moved, since one may start another
#: meanwhile
_PASSES = 20
#: Seconds within which a build writes its description after it has taken its lock.
_WRITTEN_S = 1.0
#: Seconds for which a measurement that needs quiet lets waiting builds go first.
FAIR_S = 10.0
#: Seconds for which a build waits for quiet measurements to end; one of them may be frozen.
QUIET_WAIT_S = 600.0
#: `struct flock` of 64-bit Linux: type, whence, start, length (0: to the end), process, padding.
_FLOCK = "hhqqi4x"


@dataclass(frozen=True)
class _Build:
    """Content of a build's lock file, for measurements."""

    #: time limit of the build by CLOCK_MONOTONIC, which all processes of a machine share
    until: float
    pid: int | None  #: id of the process that builds, on a borrowed core
    cpus: Sequence[int]  #: cores that it may use instead of the borrowed one


@dataclass(frozen=True)
class BuildCores:
    """The cores on which a worker's builds run."""

    own: tuple[int, ...]  #: compiling cores of this worker

    @contextlib.contextmanager
    def build(
        self,
        limit_s: float,
        pid: int | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        wide: bool = False,
    ) -> Iterator[int | None]:
        """Announce a build of at most `limit_s`; gives the measuring core that it borrows, if any.

        `pid`: the process that is about to build, which is moved to a borrowed core while other
        builds use all of `own`; None: it borrows none. `wide`: it starts processes of its own, and
        may use all of `own` and what it can borrow beside them. Waits while this machine measures
        with quiet, until `cancelled` returns True.
        """
        with contextlib.ExitStack() as stack:
            if not wide or pid is None:
                yield self._begin(stack, limit_s, pid, cancelled)
                return
            self._begin(stack, limit_s, None, cancelled)
            self._widen(stack, limit_s, pid)
            yield None

    def _begin(
        self,
        stack: contextlib.ExitStack,
        limit_s: float,
        pid: int | None,
        cancelled: Callable[[], bool],
    ) -> int | None:
        deadline = time.monotonic() + QUIET_WAIT_S

        def may_go() -> bool:
            return not _is_held("quiet") or cancelled() or time.monotonic() >= deadline

        with contextlib.ExitStack() as waiting:
            while True:
                with contextlib.ExitStack() as turn:
                    core = self._take(turn, limit_s, pid)
                    if may_go():
                        stack.push(turn.pop_all())
                        return core
                # until it builds: the next measurement lets it go first
                waiting.enter_context(_shared("waiting"))
                while not may_go():
                    time.sleep(_POLL_S)

    def _take(self, turn: contextlib.ExitStack, limit_s: float, pid: int | None) -> int | None:
        """Lock an own core without a build, else borrow an offered one, else share an own one."""
        build = _Build(time.monotonic() + limit_s, pid, self.own)
        if any(_begun(turn, f"build-{number}", build) for number in range(len(self.own))):
            return None
        for core in _offered().difference(self.own) if pid is not None else ():
            with contextlib.ExitStack() as borrowed:
                if _begun(borrowed, f"build-cpu{core}", build) and self._borrow(
                    borrowed, core, pid
                ):
                    turn.push(borrowed.pop_all())
                    return core
        number = len(self.own)
        while not _begun(turn, f"build-{number}", build):
            number += 1
        return None

    def _widen(self, stack: contextlib.ExitStack, limit_s: float, pid: int) -> None:
        """Let the process use the offered cores beside its own, as long as they do not measure."""
        build, cores = _Build(time.monotonic() + limit_s, pid, self.own), set(self.own)
        for core in _offered().difference(self.own):
            with contextlib.ExitStack() as borrowed:
                if not _begun(borrowed, f"build-cpu{core}", build):
                    continue
                borrowed.callback(move, pid, core, self.own)
                _pin(_threads(pid), [*cores, core])
                if not _is_held(f"measured-{core}"):
                    cores.add(core)
                    stack.push(borrowed.pop_all())

    def _borrow(self, borrowed: contextlib.ExitStack, core: int, pid: int | None) -> bool:
        """Move the process to the core, and back at the end; False if the core is measuring."""
        assert pid is not None
        borrowed.callback(move, pid, core, self.own)
        _pin(_threads(pid), [core])
        return not _is_held(f"measured-{core}")


def offer(stack: contextlib.ExitStack, cpus: Iterable[int]) -> None:
    """Let builds borrow these measuring cores until `stack` ends.

    Measurements on them run within `measuring`.
    """
    for cpu in cpus:
        stack.enter_context(_shared(f"offered-{cpu}"))


@contextlib.contextmanager
def measuring(
    cpus: Iterable[int], *, quiet: bool = False, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Reserve these cores for a measurement; with `quiet` this machine builds nothing meanwhile.

    With `quiet` it waits for running builds, and first for those that an earlier measurement
    delayed.
    """
    cores = sorted(set(cpus))
    if quiet:
        _wait(lambda: _is_held("waiting"), FAIR_S, cancelled)
    with contextlib.ExitStack() as stack:
        for core in cores:
            stack.enter_context(_shared(f"measured-{core}"))
        if quiet:
            stack.enter_context(_shared("quiet"))
        for core in cores:
            _reclaim(core, cancelled)
        if quiet:
            for path in sorted(_folder().glob("build-*")):
                _wait_for_build(path, lambda build: False, cancelled)
        yield


def move(pid: int, core: int, cpus: Sequence[int]) -> bool:
    """Move all threads below `pid` from `core` to `cpus`; False if one remains there."""
    for _ in range(_PASSES):
        found = [thread for thread in _threads(pid, *descendants(pid)) if core in _affinity(thread)]
        if not found:
            return True
        _pin(found, cpus)
    return False


def _reclaim(core: int, cancelled: Callable[[], bool]) -> None:
    """Move the build on a core away, if there is one; wait for it if it cannot be moved."""

    def moved(build: _Build) -> bool:
        return build.pid is not None and move(build.pid, core, build.cpus)

    _wait_for_build(_folder() / f"build-cpu{core}", moved, cancelled)


def _wait_for_build(
    path: Path, harmless: Callable[[_Build], bool], cancelled: Callable[[], bool]
) -> None:
    """Wait until the build is `harmless`, has ended, or should have."""
    since = time.monotonic()

    def disturbs() -> bool:
        if not _is_locked(path):
            return False
        build = _read(path)
        if build is None:  # not written yet, or only in part
            return time.monotonic() - since < _WRITTEN_S
        return time.monotonic() < build.until and not harmless(build)

    _wait(disturbs, float("inf"), cancelled)


def _wait(while_: Callable[[], bool], most_s: float, cancelled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + most_s
    while while_() and not cancelled() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _begun(stack: contextlib.ExitStack, name: str, build: _Build) -> bool:
    """Take the lock of a build and describe the build in it; False if another build has it."""
    with contextlib.ExitStack() as one:
        descriptor = one.enter_context(_locked(_folder() / name))
        if descriptor is None:
            return False
        os.ftruncate(descriptor, 0)  # the description of an earlier build
        os.pwrite(descriptor, json.dumps(asdict(build)).encode(), 0)
        stack.push(one.pop_all())
    return True


def _read(path: Path) -> _Build | None:
    try:
        return _Build(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _offered() -> set[int]:
    """Return the cores of this process that measuring workers lend."""
    paths = filter(_is_locked, _folder().glob("offered-*"))
    return {int(path.name.rpartition("-")[2]) for path in paths} & set(available_cpus())


@contextlib.contextmanager
def _shared(name: str) -> Iterator[None]:
    with _locked(_folder() / name, shared=True):  # never held exclusively
        yield


def _is_held(name: str) -> bool:
    return _is_locked(_folder() / name)


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool = False) -> Iterator[int | None]:
    """Hold the lock on `path`; gives its descriptor, or None where it is held already.

    It is an open file description lock (fcntl(2), Linux 3.15 and later), which F_OFD_GETLK shows
    without taking it, unlike one of flock(2).
    """
    with opened(path) as descriptor:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(shared=shared))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES
            yield None
        else:
            yield descriptor


def _is_locked(path: Path) -> bool:
    """Whether anybody holds the lock, shared or not, another part of this process included."""
    try:
        with opened(path, create=False) as descriptor:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(shared=False))
    except FileNotFoundError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _request(*, shared: bool) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def _folder() -> Path:
    """Return the folder of this PID namespace, in which the process ids of the files are valid."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return own_folder(folders()[-1] / f"cores-{namespace}")


def _threads(*pids: int) -> list[int]:
    found = set(pids)  # the first thread of each, should /proc hide the others
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            found.update(int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir())
    return sorted(found)


def _affinity(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except OSError:
        return set()


def _pin(threads: Iterable[int], cpus: Sequence[int]) -> None:
    for thread in threads:
        with contextlib.suppress(OSError):  # it has just ended
            os.sched_setaffinity(thread, cpus)
