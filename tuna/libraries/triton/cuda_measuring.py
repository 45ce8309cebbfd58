"""The eval child of Triton's candidates: checks their answers on an NVIDIA device and times them.

A candidate's outputs and scratch are full of NaN before a run that is checked, and its answer is
checked again after it was timed. What is timed is a CUDA graph of many runs, by events. The runs of
a graph take turns with copies of the buffers that together are twice as large as the device's L2
cache, so that each run finds its inputs where a model would: in memory. Inputs stay on the device
for all candidates of a config.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tuna.configs import Config, from_json
from tuna.libraries.probe import Probe
from tuna.libraries.repeats import HOPELESS, Repeat, Sampler, Timing, sample_until_done, timing
from tuna.libraries.triton.artifact import ELEMENT_BYTES, Artifact, Buffer, from_bytes
from tuna.libraries.triton.device_problems import (
    DeviceProblem,
    Floats,
    decode,
    poison_byte,
)
from tuna.libraries.triton.driver import Cuda, DeviceMemory, scratch
from tuna.sandbox import nvml, seccomp

#: Milliseconds of a graph at least, and runs at most.
_GRAPH_MS, _MOST_RUNS = 2.0, 2048
#: The copies of the buffers that runs take turns with are so many times the L2 cache in all.
_ROTATED = 2
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
            found = timing([once_ms], "own")
        else:
            (found,) = _timed([(candidate, once_ms)], budget_s)
        later, _ = candidate.error()
        if not later <= tolerance:
            return _wrong(later, tolerance)
    return {
        "error": max(error, later),
        "tolerance": tolerance,
        "timing": found.as_json(),
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

        device = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
        try:
            risen, until = _RISEN * _nvml().sm_mhz(device, highest=True), time.monotonic() + _SPIN_S
            while _nvml().sm_mhz(device) < risen and time.monotonic() < until:
                copy_s()
            fastest_s = min(copy_s() for _ in range(_TRIES))
            mhz = _nvml().sm_mhz(device)
        except nvml.NvmlError:
            return {}
    cores = cuda.facts.units * nvml.unit_cores(cuda.facts.arch)
    return Probe(2 * cores * mhz / 1e3, "device", max(fastest_s, 1e-9)).as_json()


@functools.cache
def _nvml() -> nvml.Nvml:
    return nvml.Nvml()


class _Sample:
    """The right answer in some places of an output."""

    def __init__(self, output: Buffer, problem: DeviceProblem) -> None:
        self.places = places = problem.places(output.name)
        self._expected = problem.expected(output.name, places.checked_rows, places.columns)
        self._scale = float(np.max(np.abs(self._expected))) or 1.0
        self._first: Floats | None = None  #: what the first right candidate wrote in all rows
        self.tolerance = problem.tolerance(output.name)

    def error(self, found: Floats) -> float:
        """The largest error relative to the largest magnitude; infinite where a row was not
        written.

        Beside the right answer in some places, `found` is compared with the first right candidate
        in all: of that difference half counts, since each of the two may be off by the tolerance.
        """
        if not np.all(np.isfinite(found)):
            return math.inf
        error = float(np.max(np.abs(found[self.places.checked] - self._expected))) / self._scale
        if self._first is not None:
            return max(error, float(np.max(np.abs(found - self._first))) / self._scale / 2)
        if error <= self.tolerance:
            self._first = found
        return error


class _Bench:
    """A config's inputs on the device, which its candidates share."""

    def __init__(self, cuda: Cuda, config: Config) -> None:
        self.cuda, self._config = cuda, config
        self._memory = DeviceMemory(cuda)
        self._inputs: dict[tuple[Buffer, int], tuple[DeviceProblem, list[int]]] = {}
        self._places = 0  #: sets of buffers that runs take turns with; 0: not known yet
        self._samples: dict[Buffer, _Sample] = {}

    def close(self) -> None:
        """Free the inputs."""
        self._memory.close()

    @contextlib.contextmanager
    def placed(self, path: str) -> Iterator[_Placed]:
        """A candidate, ready to run until the context ends."""
        artifact = from_bytes(Path(path).read_bytes())
        arch = self.cuda.facts.arch
        if artifact.arch != arch:
            raise ValueError(f"the candidate is built for {artifact.arch}, and this is an {arch}")
        buffers = {one.name: one for one in artifact.buffers}
        problem = DeviceProblem(self._config, buffers, artifact.answers)
        if not self._places:
            wanted = math.ceil(_ROTATED * self.cuda.facts.l2_bytes / problem.touched_bytes)
            self._places = min(wanted, _MOST_RUNS)
        with DeviceMemory(self.cuda) as memory, contextlib.ExitStack() as stack:
            yield _Placed(self, artifact, problem, memory, stack)

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

    def sample(self, output: Buffer, problem: DeviceProblem) -> _Sample:
        """Where an output is checked, the same for all candidates."""
        if output not in self._samples:
            self._samples[output] = _Sample(output, problem)
        return self._samples[output]


class _Placed:
    """A candidate with its code and buffers on the device."""

    def __init__(
        self,
        bench: _Bench,
        artifact: Artifact,
        problem: DeviceProblem,
        memory: DeviceMemory,
        stack: contextlib.ExitStack,
    ) -> None:
        self._bench, self._cuda, self._problem = bench, bench.cuda, problem
        self._buffers = artifact.buffers
        at = {one.name: bench.addresses(problem, one, memory) for one in artifact.buffers}
        self._places = len(next(iter(at.values())))
        modules = []
        for binary in artifact.binaries:
            modules.append(self._cuda.load(binary))
            stack.callback(self._cuda.unload, modules[-1])
        self._launches = []
        for launch in artifact.launches:
            own = scratch(launch, memory)
            kernel = self._cuda.kernel(modules[launch.binary], launch)
            sets = [
                {**own, **{name: addresses[place] for name, addresses in at.items()}}
                for place in range(self._places)
            ]
            self._launches.append((kernel, launch, sets))

    def run(self, place: int = 0) -> None:
        """Launch all of it with one set of buffers."""
        for kernel, launch, sets in self._launches:
            self._cuda.launch(kernel, launch, sets[place % self._places])

    def error(self) -> tuple[float, float]:
        """Run once on outputs full of NaN; the largest error of the answer, relative to its largest
        magnitude, and the largest that is rounding. It is infinite where the answer was not
        written."""
        _, _, sets = self._launches[0]
        for buffer in self._buffers:
            if buffer.role != "input":
                self._cuda.fill(sets[0][buffer.name], poison_byte(buffer.element), buffer.bytes)
        self.run()
        self._cuda.synchronize()
        worst, allowed = 0.0, math.inf
        for buffer in self._buffers:
            if buffer.role == "output":
                sample = self._bench.sample(buffer, self._problem)
                found = self._read(buffer, sets[0][buffer.name], sample)
                worst = max(worst, sample.error(found))
                allowed = min(allowed, sample.tolerance)
        return worst, allowed

    def _read(self, output: Buffer, address: int, sample: _Sample) -> Floats:
        """The values of the sampled rows."""
        width = output.shape[-1]
        size = ELEMENT_BYTES[output.element] * width
        places = sample.places
        raw = np.empty((len(places.rows), size), np.uint8)
        self._cuda.download(address + int(places.rows[0]) * size, places.step * size, raw)
        return decode(output.element, raw).reshape(len(raw), width)

    def once_ms(self) -> float:
        """The shorter one of two runs."""
        return min(self._cuda.time_ms(functools.partial(self.run, place)) for place in (1, 2))

    @contextlib.contextmanager
    def repeats(self, once_ms: float) -> Iterator[Callable[[], Repeat]]:
        """A function that measures one run, as the mean of a graph of them; `once_ms`: about how
        long one takes."""
        wanted = max(self._places, math.ceil(_GRAPH_MS / max(once_ms, 1e-6)))
        runs = min(wanted, _MOST_RUNS)

        def work() -> None:
            for place in range(runs):
                self.run(place)

        graph = self._cuda.graph(work)
        try:
            self._cuda.launch_graph(graph)  # the first launch uploads it
            self._cuda.synchronize()
            yield lambda: Repeat(
                self._cuda.time_ms(lambda: self._cuda.launch_graph(graph)) / runs, None, False
            )
        finally:
            self._cuda.destroy(graph)


def _timed(candidates: Sequence[tuple[_Placed, float]], budget_s: float) -> list[Timing]:
    """Time candidates in turn, each until the interval is narrow or the budget is spent."""
    with contextlib.ExitStack() as stack:
        samplers = [
            Sampler(stack.enter_context(one.repeats(once_ms)), budget_s, clock="own")
            for one, once_ms in candidates
        ]
        sample_until_done(samplers)
    return [sampler.timing() for sampler in samplers]


def _wrong(error: float, tolerance: float) -> dict[str, Any]:
    found = error if math.isfinite(error) else None
    return {"error": found, "tolerance": tolerance, "timing": None}


_benches: dict[str, _Bench] = {}


def _bench(loader: str, job: Mapping[str, Any]) -> _Bench:
    """The bench of a job's config; that of another config is closed."""
    _seal()
    key = json.dumps(job["config"], sort_keys=True)
    if key not in _benches:
        for other in _benches.values():
            other.close()
        _benches.clear()
        _benches[key] = _Bench(_device(loader), from_json(job["config"]))
    return _benches[key]


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
