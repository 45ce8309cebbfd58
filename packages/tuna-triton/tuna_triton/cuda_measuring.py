"""The eval child of Triton's candidates: checks their answers on an NVIDIA device and times them.

A candidate's outputs and scratch are full of NaN before a run that is checked, and its answer is
checked again after it was timed. What is timed is a CUDA graph of many runs, by events. The runs of
a graph take turns with copies of the buffers that together are twice as large as the device's L2
cache, so that each run finds its inputs where a model would: in memory. Inputs stay on the device
for all candidates of a config.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuna.configs import Config, from_json
from tuna.libraries.probe import Probe
from tuna.libraries.repeats import HOPELESS, Repeat, Sampler, Timing, sample_until_done, timing
from tuna.sandbox import seccomp
from tuna_triton import nvml
from tuna_triton.artifact import ELEMENT_BYTES, Artifact, Buffer, from_bytes
from tuna_triton.device_problems import DeviceProblem, OutputSample, poison_byte
from tuna_triton.driver import Cuda, DeviceMemory, scratch

#: Milliseconds of a graph at least, and runs at most.
_GRAPH_MS, _MAX_RUNS = 2.0, 2048
#: The copies of the buffers that runs take turns with are so many times the L2 cache in all.
_ROTATED = 2
#: Configs whose right answers are kept: those of a search take turns.
_KEPT = 64
#: Bytes of a copy in the probe, tries, and seconds until the clock has risen.
_COPY_BYTES, _TRIES, _SPIN_S = 64 << 20, 4, 0.1
_RISEN = 0.98


def prepare(loader: str, job: dict[str, Any] | None = None) -> dict[str, Any]:
    """Open the device; returns nothing."""
    _device(loader)
    return {}


def measure(
    loader: str, job: dict[str, Any], path: str, budget_s: float, best_ms: float | None = None
) -> dict[str, Any]:
    """Check the answer of the candidate at `path`, time it for up to `budget_s`, and check it once
    more; `timing` is None when an answer is wrong.

    A candidate that is `HOPELESS` times slower than `best_ms` is not measured: `ended_early`.
    """
    bench = _bench(loader, job)
    with bench.placed(path) as candidate:
        error, tolerance = candidate.error()
        if not error <= tolerance:  # unless a candidate before this one wrote where it must not
            bench.refill()
            error, tolerance = candidate.error()
        if not error <= tolerance:
            return _wrong(error, tolerance)
        once_ms = candidate.once_ms()
        ended_early = best_ms is not None and once_ms > HOPELESS * best_ms
        if ended_early:
            timed = timing([once_ms], "own")
        else:
            (timed,) = _timed([(candidate, once_ms)], budget_s)
        later, _ = candidate.error()
        if not later <= tolerance:
            return _wrong(later, tolerance)
    return {
        "error": max(error, later),
        "tolerance": tolerance,
        "timing": timed.as_json(),
        "ended_early": ended_early,
    }


def save_inputs(loader: str, job: dict[str, Any], path: str) -> dict[str, Any]:
    """Write nothing: each process makes the same inputs by itself."""
    return {"arrays": []}


def again(
    loader: str,
    jobs: Sequence[dict[str, Any]],
    paths: Sequence[str],
    times_ms: Sequence[float],
    inputs: str,
    arrays: Sequence[Any],
    budget_s: float,
) -> dict[str, Any]:
    """Time candidates of one config whose answers are known to be right, in turn, each for up to
    `budget_s`; `times_ms` is what they took."""
    bench = _bench(loader, jobs[0])
    with contextlib.ExitStack() as stack:
        candidates = [stack.enter_context(bench.placed(path)) for path in paths]
        for candidate in candidates:
            candidate.run()
        found = _timed(list(zip(candidates, times_ms, strict=True)), budget_s)
    return {"timings": [one.as_json() for one in found]}


def probe(loader: str) -> dict[str, Any]:
    """Measure the device's clock, as its peak in fp32, and a copy within its memory; nothing where
    NVML does not tell the clock."""
    cuda = _device(loader)
    with DeviceMemory(cuda) as memory:
        source, target = memory.allocate(_COPY_BYTES), memory.allocate(_COPY_BYTES)

        def copy_s() -> float:
            return cuda.time_ms(lambda: cuda.copy(target, source, _COPY_BYTES)) / 1e3

        device = _visible()
        try:
            until = time.monotonic() + _SPIN_S
            while _nvml().sm_mhz(device) < _risen_mhz(device) and time.monotonic() < until:
                copy_s()
            fastest_s = min(copy_s() for _ in range(_TRIES))
            mhz = _nvml().sm_mhz(device)
            if time.monotonic() >= until:  # it does not rise further, and is not waited for again
                _most_mhz[device] = mhz
        except nvml.NvmlError:
            return {}
    cores = cuda.facts.units * nvml.unit_cores(cuda.facts.arch)
    return Probe(2 * cores * mhz / 1e3, "device", max(fastest_s, 1e-9)).as_json()


@functools.cache
def _nvml() -> nvml.Nvml:
    return nvml.Nvml()


_most_mhz: dict[str, int] = {}  #: the clock that a device was seen to rise to


def _risen_mhz(device: str) -> float:
    """The clock that counts as risen."""
    if device not in _most_mhz:
        _most_mhz[device] = _nvml().sm_mhz(device, highest=True)
    return _RISEN * _most_mhz[device]


def _visible() -> str:
    """The device as NVML takes it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]


class DeviceBench:
    """A config's inputs on the device, which its candidates share, and its right answers, which
    stay known after it was closed."""

    def __init__(self, cuda: Cuda, config: Config) -> None:
        self.cuda, self._config = cuda, config
        self._memory = DeviceMemory(cuda)
        self._inputs: dict[tuple[Buffer, int], tuple[DeviceProblem, list[int]]] = {}
        self._places = 0  #: sets of buffers that runs take turns with; 0: not known yet
        self._samples: dict[Buffer, OutputSample] = {}

    def close(self) -> None:
        """Free the inputs; they are made anew for the next candidate."""
        self._memory.close()
        self._inputs.clear()

    @contextlib.contextmanager
    def placed(self, path: str) -> Iterator[PlacedCandidate]:
        """A candidate, ready to run until the context ends."""
        artifact = from_bytes(Path(path).read_bytes())
        arch = self.cuda.facts.arch
        if artifact.arch != arch:
            raise ValueError(f"the candidate is built for {artifact.arch}, and this is an {arch}")
        buffers = {one.name: one for one in artifact.buffers}
        problem = DeviceProblem(self._config, buffers, artifact.answers)
        if not self._places:
            wanted = math.ceil(_ROTATED * self.cuda.facts.l2_bytes / problem.touched_bytes)
            self._places = min(wanted, _MAX_RUNS)
        with DeviceMemory(self.cuda) as memory, contextlib.ExitStack() as stack:
            yield PlacedCandidate(self, artifact, problem, memory, stack)

    def addresses(self, problem: DeviceProblem, buffer: Buffer, memory: DeviceMemory) -> list[int]:
        """Where each set has a buffer; inputs are shared by candidates, and the others in `memory`.

        A buffer is the same in all sets if what one run reads of it pushes all else out of the
        cache, or if no run reads it before it wrote it.
        """
        if buffer.role != "input":
            return self._allocated(buffer, memory)
        key = buffer, problem.tile_rows(buffer.name)
        if key not in self._inputs:
            self._inputs[key] = problem, self._allocated(buffer, self._memory)
            self._fill(*key)
        return self._inputs[key][1]

    def _allocated(self, buffer: Buffer, memory: DeviceMemory) -> list[int]:
        is_large = buffer.bytes >= _ROTATED * self.cuda.facts.l2_bytes
        copies = 1 if is_large or buffer.role == "scratch" else self._places
        stride = -(-buffer.bytes // 256) * 256
        start = memory.allocate(copies * stride)
        return [start + place % copies * stride for place in range(self._places)]

    def refill(self) -> None:
        """Fill all inputs as they were."""
        for key in self._inputs:
            self._fill(*key)

    def _fill(self, buffer: Buffer, tile_rows: int) -> None:
        problem, addresses = self._inputs[buffer, tile_rows]
        for place, address in enumerate(dict.fromkeys(addresses)):
            block = np.ascontiguousarray(problem.rotated(buffer.name, place, self._places))
            self.cuda.upload(address, block)
            done = block.nbytes
            while done < buffer.bytes:
                size = min(done, buffer.bytes - done)
                self.cuda.copy(address + done, address, size)
                done += size
        self.cuda.synchronize()

    def sample(self, output: Buffer, problem: DeviceProblem) -> OutputSample:
        """Where an output is checked, the same for all candidates."""
        if output not in self._samples:
            self._samples[output] = OutputSample(output, problem)
        return self._samples[output]


class PlacedCandidate:
    """A candidate with its code and buffers on the device."""

    def __init__(
        self,
        bench: DeviceBench,
        artifact: Artifact,
        problem: DeviceProblem,
        memory: DeviceMemory,
        stack: contextlib.ExitStack,
    ) -> None:
        self._bench, self._cuda, self._problem = bench, bench.cuda, problem
        self._buffers = artifact.buffers
        at = {buffer.name: bench.addresses(problem, buffer, memory) for buffer in artifact.buffers}
        self._places = len(next(iter(at.values())))
        modules = []
        for binary in artifact.binaries:
            modules.append(self._cuda.load(binary))
            stack.callback(self._cuda.unload, modules[-1])
        self._at = {name: addresses[0] for name, addresses in at.items()}
        #: Launches on each set of buffers, in order.
        self._runs: list[list[Callable[[], None]]] = [[] for _ in range(self._places)]
        for launch in artifact.launches:
            own = scratch(launch, memory)
            kernel = self._cuda.kernel(modules[launch.binary], launch)
            for place, run in enumerate(self._runs):
                addresses = {name: some[place] for name, some in at.items()}
                run.append(self._cuda.prepared(kernel, launch, {**own, **addresses}))

    def run(self, place: int = 0) -> None:
        """Launch all of it with one set of buffers."""
        for launch in self._runs[place % self._places]:
            launch()

    def error(self) -> tuple[float, float]:
        """Run once on outputs full of NaN; the largest error of the answer, relative to its largest
        magnitude, and the largest that is rounding. It is infinite where the answer was not
        written."""
        for buffer in self._buffers:
            if buffer.role != "input":
                self._cuda.fill(self._at[buffer.name], poison_byte(buffer.element), buffer.bytes)
        self.run()
        self._cuda.synchronize()
        worst, allowed = 0.0, math.inf
        for buffer in self._buffers:
            if buffer.role == "output":
                sample = self._bench.sample(buffer, self._problem)
                worst = max(worst, sample.error(self.read(buffer)))
                allowed = min(allowed, sample.tolerance)
        return worst, allowed

    def read(self, output: Buffer) -> NDArray[np.uint8]:
        """The bytes of the sampled rows of an output, as the run with the first set left them."""
        sample = self._bench.sample(output, self._problem)
        size = ELEMENT_BYTES[output.element] * output.shape[-1]
        rows = np.empty((len(sample.rows), size), np.uint8)
        first = self._at[output.name] + int(sample.rows[0]) * size
        self._cuda.download(first, sample.step * size, rows)
        return rows

    def once_ms(self) -> float:
        """The shorter one of two runs."""
        return min(self._cuda.time_ms(functools.partial(self.run, place)) for place in (1, 2))

    @contextlib.contextmanager
    def graph(self, once_ms: float) -> Iterator[tuple[ctypes.c_void_p, int]]:
        """A graph of runs that lasts long enough to be timed, and their number; `once_ms`: about
        how long one takes."""
        wanted = max(self._places, math.ceil(_GRAPH_MS / max(once_ms, 1e-6)))
        runs = min(wanted, _MAX_RUNS)

        def work() -> None:
            for place in range(runs):
                self.run(place)

        graph = self._cuda.graph(work)
        try:
            self._cuda.launch_graph(graph)  # the first launch uploads it
            self._cuda.synchronize()
            yield graph, runs
        finally:
            self._cuda.destroy(graph)

    @contextlib.contextmanager
    def repeats(self, once_ms: float) -> Iterator[Callable[[], Repeat]]:
        """A function that measures one run, as the mean of a graph of them."""
        with self.graph(once_ms) as (graph, runs):
            yield lambda: Repeat(
                self._cuda.time_ms(lambda: self._cuda.launch_graph(graph)) / runs, None, False
            )


def _timed(candidates: Sequence[tuple[PlacedCandidate, float]], budget_s: float) -> list[Timing]:
    """Time candidates in turn, each until the interval is narrow or the budget is spent."""
    with contextlib.ExitStack() as stack:
        samplers = [
            Sampler(stack.enter_context(one.repeats(once_ms)), budget_s, clock="own")
            for one, once_ms in candidates
        ]
        slowed = _is_slowed()
        sample_until_done(samplers)
        slowed = _is_slowed() or slowed
    found = [sampler.timing() for sampler in samplers]
    return [replace(one, noisy=True) for one in found] if slowed else found


def _is_slowed() -> bool:
    """Whether heat or a failing power supply slows the device down; False where NVML does not
    tell."""
    try:
        return _nvml().is_slowed(_visible())
    except nvml.NvmlError:
        return False


def _wrong(error: float, tolerance: float) -> dict[str, Any]:
    found = error if math.isfinite(error) else None
    return {"error": found, "tolerance": tolerance, "timing": None}


_benches: dict[str, DeviceBench] = {}


def _bench(loader: str, job: Mapping[str, Any]) -> DeviceBench:
    """The bench of a job's config; the memory of others is freed."""
    _seal()
    key = json.dumps(job["config"], sort_keys=True)
    found = _benches.pop(key, None) or DeviceBench(_device(loader), from_json(job["config"]))
    for other in _benches.values():
        other.close()
    if len(_benches) >= _KEPT:
        del _benches[next(iter(_benches))]  # the one that was not used for longest
    _benches[key] = found
    return found


@functools.cache
def _seal() -> None:
    """Before the first candidate: from now on no process can be started."""
    seccomp.forbid_processes()


@functools.cache
def _device(loader: str) -> Cuda:
    made: Cuda = pkgutil.resolve_name(loader)()
    return made


HANDLERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "prepare": prepare,
    "measure": measure,
    "save_inputs": save_inputs,
    "again": again,
    "probe": probe,
}
