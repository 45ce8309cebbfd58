"""Lends measuring cores to builds while nothing is measured on them, and stops builds for
measurements that need quiet.

Workers of one user on this machine know of each other by file locks (`ofd_locks`), which the kernel
releases with their holder:

    offered-N    shared, for the life of a worker that measures with core N by these rules: a build
    may borrow N
    measured-N   shared, for a chunk that is measured with core N, or is about to be
    quiet        shared, for a chunk during which this machine must build nothing
    waiting      shared: a build waits for the end of such a chunk
    build-K      exclusive, for a build on the cores that compile; K counts those
    build-cpuN   exclusive, for a build on core N

Each side takes its own lock before it looks at the other's, so that at least one of them sees the
other. A measurement comes first: a build that sees one leaves the core, or waits. A measurement
waits for no build on its core, but moves the processes of that build to the cores that compile,
where they go on: neither a long build nor a frozen worker holds it up. Only for quiet does it wait,
for the builds that run, and for none longer than that build's own time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tuna.files import own_folder
from tuna.sandbox import ofd_locks
from tuna.sandbox.cores import available_cpus
from tuna.sandbox.device_lock import folders
from tuna.sandbox.process_tree import descendants

_POLL_S = 0.005
#: Passes over the processes of a build that is moved, since one may start another meanwhile.
_PASSES = 20
#: Seconds within which a build that has its lock has written what it is.
_WRITTEN_S = 1.0
#: How long a measurement that needs quiet lets waiting builds go first.
FAIR_S = 10.0
#: How long a build waits for quiet measurements to end, should one of them be frozen.
QUIET_WAIT_S = 600.0


def _never() -> bool:
    return False


@dataclass(frozen=True)
class _Build:
    """What the file of a build's lock says, for measurements."""

    #: the build's time limit, by CLOCK_MONOTONIC, which all processes of a machine share
    until: float
    pid: int | None  #: the process that builds, on a borrowed core
    cpus: Sequence[int]  #: cores that it may use instead of that


@dataclass(frozen=True)
class BuildCores:
    """Where the builds of a worker run."""

    own: tuple[int, ...]  #: cores that compile

    @contextlib.contextmanager
    def build(
        self, limit_s: float, pid: int | None = None, cancelled: Callable[[], bool] = _never
    ) -> Iterator[int | None]:
        """For the duration of one build, which takes `limit_s` at most; gives the measuring core
        that it borrows, if any.

        `pid`: the process that is about to build, which is moved to a borrowed core while other
        builds use all of `own`; None: it borrows none. Waits while this machine measures with
        quiet, until `cancelled` returns True.
        """
        with contextlib.ExitStack() as stack:
            yield self._begin(stack, limit_s, pid, cancelled)

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
        """Take the lock of an own core that no build has, else of one that is lent, else any
        more."""
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

    def _borrow(self, borrowed: contextlib.ExitStack, core: int, pid: int | None) -> bool:
        """Move the process there, and back at the end; False if the core is measured with."""
        assert pid is not None
        borrowed.callback(move, pid, core, self.own)
        _pin(_threads(pid), [core])
        return not _is_held(f"measured-{core}")


def offer(stack: contextlib.ExitStack, cpus: Iterable[int]) -> None:
    """Let builds borrow these measuring cores until `stack` ends; what measures with them does so
    within `measuring`."""
    for cpu in cpus:
        stack.enter_context(_shared(f"offered-{cpu}"))


@contextlib.contextmanager
def measuring(
    cpus: Iterable[int], *, quiet: bool = False, cancelled: Callable[[], bool] = _never
) -> Iterator[None]:
    """Have these cores for a measurement; with `quiet` this machine builds nothing meanwhile.

    With `quiet` it waits for the builds that run, and lets those go first that an earlier
    measurement kept waiting.
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


def builds() -> int:
    """How many builds run now."""
    return sum(map(ofd_locks.is_held, _folder().glob("build-*")))


def move(pid: int, core: int, cpus: Sequence[int]) -> bool:
    """Move each thread of a process, and of all that it started, from a core to `cpus`; False if
    one remains there."""
    for _ in range(_PASSES):
        found = [thread for thread in _threads(pid, *descendants(pid)) if core in _affinity(thread)]
        if not found:
            return True
        _pin(found, cpus)
    return False


def _reclaim(core: int, cancelled: Callable[[], bool]) -> None:
    """Move the build on a core away, if there is one; one that cannot be moved is waited for."""

    def moved(build: _Build) -> bool:
        return build.pid is not None and move(build.pid, core, build.cpus)

    _wait_for_build(_folder() / f"build-cpu{core}", moved, cancelled)


def _wait_for_build(
    path: Path, harmless: Callable[[_Build], bool], cancelled: Callable[[], bool]
) -> None:
    """Wait until the build is `harmless`, has ended, or should have."""
    since = time.monotonic()

    def disturbs() -> bool:
        if not ofd_locks.is_held(path):
            return False
        build = _read(path)
        if build is None:  # not written yet, or cut off in the middle of it
            return time.monotonic() - since < _WRITTEN_S
        return time.monotonic() < build.until and not harmless(build)

    _wait(disturbs, float("inf"), cancelled)


def _wait(while_: Callable[[], bool], most_s: float, cancelled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + most_s
    while while_() and not cancelled() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _begun(stack: contextlib.ExitStack, name: str, build: _Build) -> bool:
    """Take the lock of a build and write what it is; False if another build has it."""
    with contextlib.ExitStack() as one:
        descriptor = one.enter_context(ofd_locks.held(_folder() / name))
        if descriptor is None:
            return False
        os.ftruncate(descriptor, 0)  # what it said of an earlier build
        os.pwrite(descriptor, json.dumps(asdict(build)).encode(), 0)
        stack.push(one.pop_all())
    return True


def _read(path: Path) -> _Build | None:
    try:
        return _Build(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _offered() -> set[int]:
    """Cores of this process that workers measure with and lend."""
    numbers = (
        int(path.name.rpartition("-")[2])
        for path in _folder().glob("offered-*")
        if ofd_locks.is_held(path)
    )
    return set(numbers) & set(available_cpus())


@contextlib.contextmanager
def _shared(name: str) -> Iterator[None]:
    with ofd_locks.held(_folder() / name, shared=True):  # never held exclusively
        yield


def _is_held(name: str) -> bool:
    return ofd_locks.is_held(_folder() / name)


def _folder() -> Path:
    """Of this PID namespace: the process ids in the files mean something to those alone who are in
    the same."""
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
