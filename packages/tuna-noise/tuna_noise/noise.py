"""Effect of builds on other cores on the times of fixed kernels on a measuring core: for `tuna
doctor --noise` and `scripts/bench noise`.

The builds are real ones: compile steps of a library that is installed here, as many concurrently as
cores compile. The kernels are timed in pairs, beside the builds and while these wait
(`core_lending.measuring` with quiet), so that what else changes on the machine changes both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tuna.api import Settings
from tuna.artifacts.files import folder_url
from tuna.artifacts.store import Artifacts
from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.errors import TunaError
from tuna.libraries.base import Library
from tuna.libraries.context import RunContext
from tuna.libraries.items import WorkItem
from tuna.libraries.noise_records import NoiseRecord, machine_identity
from tuna.libraries.registry import find_library, names
from tuna.sandbox import core_lending
from tuna.sandbox.core_lending import BuildCores, measuring
from tuna.sandbox.cores import compile_cpus, eval_cpus
from tuna.sandbox.process_tree import session_cpu_s, tree_cpu_s
from tuna.sandbox.processes import Child, ChildCancelled, child_env
from tuna.vocabulary import Resource

#: Seconds for one kernel in a turn, enough for a median with some 5 ms for a repeat
_TURN_S = 0.1
_KERNEL_LIMIT_S = 60.0
#: Seconds until the builds are at work: the first ones start their compiler
_START_S, _RESUME_S = 90.0, 10.0
_LAYERS: tuple[Config, ...] = (
    ConvConfig(
        batchsize=1,
        in_channels=64,
        in_h=56,
        in_w=56,
        out_channels=64,
        fil_h=3,
        fil_w=3,
        pad_h=1,
        pad_w=1,
    ),
    GemmConfig(m=128, n=768, k=768),
)

Times = Mapping[str, Mapping[str, float]]  #: milliseconds by kernel and clock


@dataclass(frozen=True)
class TurnPair:
    """One turn beside builds and one without."""

    beside: Times
    alone: Times
    busy_beside: float  #: number of cores that the builds used meanwhile
    busy_alone: float


@dataclass(frozen=True)
class _Work:
    """Jobs of a library that are built."""

    library: Library
    items: Sequence[WorkItem]


class BuildLoad:
    """Runs a build on each core that compiles, until the block ends."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Raises TunaError where no library here builds anything."""
        self._work = _work()
        self._cores = compile_cpus(settings)
        self._folder = folder
        self._stop = threading.Event()
        self._fault = ""
        self.library = self._work.library.name
        self.processes = len(self._cores)
        self._threads = [
            threading.Thread(target=self._build, args=(number,), daemon=True)
            for number in range(self.processes)
        ]

    def __enter__(self) -> BuildLoad:
        for thread in self._threads:
            thread.start()
        try:
            self.wait(_START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait(self, most_s: float = _RESUME_S) -> None:
        """Until all of them build; raises TunaError with the reason why they do not."""
        deadline = time.monotonic() + most_s
        while core_lending.builds() < self.processes and not self._fault:
            if time.monotonic() >= deadline:
                raise TunaError(f"The builds of {self.library} did not start within {most_s:g} s.")
            time.sleep(0.005)
        if self._fault:
            raise TunaError(f"The builds of {self.library} failed: {self._fault}")

    def _build(self, number: int) -> None:
        library = type(self._work.library)()
        folder = self._folder / str(number)
        folder.mkdir()
        store = Artifacts(folder_url(folder / "artifacts"), folder / "cache")
        builds = BuildCores(self._cores)
        context = RunContext(store, folder, self._cores, cancelled=self._stop.is_set, builds=builds)
        step = library.steps[0]
        try:
            for turn in itertools.count(number):
                item = self._work.items[turn % len(self._work.items)]
                for result in library.run(step, [item.model_copy(update={"seed": turn})], context):
                    if not result.ok:
                        self._fault = (result.output_tail.strip().splitlines() or ["no output"])[-1]
                        return
        except ChildCancelled:
            pass  # as `_stop` asks for
        except Exception as error:  # of a plug-in: said where it is waited for
            self._fault = f"{type(error).__name__}: {error}"
        finally:
            library.close()


class FixedKernels:
    """The fixed kernels, in a process on the last measuring core."""

    def __init__(self, settings: Settings) -> None:
        self.cpus = eval_cpus(settings)
        env = child_env(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
        self._child = Child("tuna_noise.noise_kernels", env=env, cpus=self.cpus[-1:])
        self._names: list[str] = []

    def __enter__(self) -> FixedKernels:
        self._names = self._child.call({"op": "names"}, _KERNEL_LIMIT_S)["names"]
        self.times()  # caches and clock frequency
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def times(self) -> Times:
        """Measure each kernel; return the medians."""
        request = {"op": "time", "budget_s": _TURN_S}
        return {
            name: self._child.call({**request, "name": name}, _KERNEL_LIMIT_S)
            for name in self._names
        }

    def turn(self, *, quiet: bool, load: BuildLoad | None = None) -> tuple[Times, float]:
        """The times, and how many cores other children of this process used; `load`: wait until it
        builds."""
        with measuring(self.cpus, quiet=quiet):
            if load is not None:
                load.wait()
            started, before = time.monotonic(), self._others_s()
            found = self.times()
            return found, (self._others_s() - before) / (time.monotonic() - started)

    def _others_s(self) -> float:
        assert self._child.pid is not None
        return tree_cpu_s(os.getpid()) - session_cpu_s(self._child.pid)


def pairs(settings: Settings, count: int, *, quiet: bool = False) -> Iterator[TurnPair]:
    """`count` pairs of turns; with `quiet` the turn beside builds is what TUNA_QUIET=yes makes of
    it.

    Raises TunaError where nothing can be built.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tuna-noise-", ignore_cleanup_errors=True) as folder,
        BuildLoad(settings, Path(folder)) as load,
        FixedKernels(settings) as kernels,
    ):
        for number in range(count):
            before = kernels.turn(quiet=True) if number % 2 else None
            beside, busy_beside = kernels.turn(quiet=quiet, load=None if quiet else load)
            alone, busy_alone = before or kernels.turn(quiet=True)
            yield TurnPair(beside, alone, busy_beside, busy_alone)


def differences(found: Sequence[TurnPair]) -> dict[str, dict[str, float]]:
    """Return by kernel and clock the median over the pairs of time beside builds / time without -
    1."""
    each: dict[str, dict[str, list[float]]] = {}
    for pair in found:
        for kernel, clocks in pair.beside.items():
            for clock in clocks.keys() & pair.alone[kernel].keys():
                changes = each.setdefault(kernel, {}).setdefault(clock, [])
                changes.append(clocks[clock] / pair.alone[kernel][clock] - 1)
    most = len(found) / 2  # a clock that is known in fewer pairs says nothing
    return {
        kernel: {
            clock: statistics.median(changes)
            for clock, changes in sorted(clocks.items())
            if len(changes) > most
        }
        for kernel, clocks in each.items()
    }


def measure(
    settings: Settings, count: int, on_pair: Callable[[int], None] = lambda _: None
) -> NoiseRecord:
    """Measure `count` pairs and return the record of their differences; `on_pair` is called with
    the number of each pair."""
    found = []
    for number, pair in enumerate(pairs(settings, count), 1):
        found.append(pair)
        on_pair(number)
    return record(settings, found)


def record(settings: Settings, found: Sequence[TurnPair]) -> NoiseRecord:
    """Return the record of these pairs, for `noise_records.store`."""
    return NoiseRecord(
        at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine_identity(settings),
        library=_work().library.name,
        builds=len(compile_cpus(settings)),
        pairs=len(found),
        differences=differences(found),
    )


def _work() -> _Work:
    libraries = [library for library in map(find_library, names()) if library is not None]
    for library in sorted(libraries, key=lambda library: not library.device.borrows_cores):
        if library.steps[0].resource is Resource.CPU:
            with contextlib.suppress(TunaError):  # it is not installed here
                items = list(_items(library))
                if items:
                    return _Work(library, items)
    raise TunaError(
        "No library on this machine builds anything.",
        hint="then builds disturb no measurement either",
    )


def _items(library: Library) -> Iterator[WorkItem]:
    environment = library.environment()
    tunable = {solver.name for solver in library.solvers() if solver.tunable}
    for config, solvers in library.applicable(_LAYERS, environment):
        for solver in sorted(tunable.intersection(solvers or ())):
            yield WorkItem(
                job_id=1,
                attempt=1,
                session_id=0,
                library=library.name,
                step=library.steps[0].name,
                solver=solver,
                config=config.to_json(),
                target=environment.target,
            )
