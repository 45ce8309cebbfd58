"""MetaSchedule's space of a module, as TVM generates it and as `tuna.libraries.search` varies it,
and candidates as text. Imports TVM.

The params of a candidate are TVM's TuningRecord of its schedule. It holds the trace, which is the
whole schedule: a candidate is built from its params and the problem's module alone.
"""

from __future__ import annotations

import importlib
import json
import math
import platform
import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from tuna.configs import Config
from tuna.errors import BadInput
from tuna.libraries.search.proposal import Point, Space
from tuna.libraries.tvm.decisions import (
    Design,
    built_in_prior,
    features_of,
    key_of,
    own_decisions,
    trace_of,
    values_of,
)

#: Number of samples of each design, by which it is known where its blocks can be computed
_SAMPLES = 4
_SEED = 1
#: Number of statements of an unrolled nest beyond which LLVM is slow, and factor of that, on
#: 3D convolutions (measured)
_MANY, _SLOWER = 64, 2.2
#: Architecture of the CPUs that the prior was trained on: `benchmarks/train_prior.py`
_OF_PRIOR = "x86_64"


_PACKAGE = "tvm.s_tir.tensor_intrin"
_BY_MACHINE = {
    **dict.fromkeys(("x86_64", "amd64"), ("x86",)),
    **dict.fromkeys(("aarch64", "arm64"), ("arm_cpu",)),
}


class ScheduleSpace(Space):
    """Points are (design, decisions)."""

    def __init__(self, module: Any, target: Any, *, architecture: str) -> None:
        """`architecture` is that of the CPU that the target compiles for."""
        self._module, self._target = module, target
        self.prior = built_in_prior() if architecture == _OF_PRIOR else None
        context = tune_context(module, target, architecture, _SEED)
        generated = context.generate_design_space()
        self._postprocs: Sequence[Any] = list(context.space_generator.postprocs)
        self.designs: list[Design] = [self._design(schedule.trace) for schedule in generated]
        self._by_key = {
            key_of([design.instructions, []]): index for index, design in enumerate(self.designs)
        }

    def points(self) -> Iterator[Point]:
        """Yield the points, design after design."""
        for index, design in enumerate(self.designs):
            for values in design.values():
                yield (index, *values)

    def size(self) -> int:
        """Count points, with combinations that are no valid schedule."""
        return sum(design.size() for design in self.designs)

    def point_of(self, params: str) -> Point | None:
        """Find the design by the instructions of the record's trace."""
        trace = trace_of(params)
        design = self._by_key.get(key_of(trace)) if trace else None
        return None if trace is None or design is None else (design, *values_of(trace))

    def params_of(self, point: Point) -> str | None:
        """The record of the schedule, after postprocessing; TVM moves a compute location that is
        not there to the next one."""
        design, *values = point
        schedule = self._applied(self.designs[design].trace(tuple(values)))
        return schedule and to_params(self._module, self._target, schedule)

    def features(self, point: Point) -> Mapping[str, float]:
        """Return the features of the design's decisions."""
        design, *values = point
        return self.designs[design].features(tuple(values))

    def features_of(self, params: str, config: Config | None = None) -> Mapping[str, float] | None:
        """Return the features of the record's own trace."""
        return features_of(params)

    def effort(self, point: Point) -> float:
        """LLVM takes about twice as long for nests that are unrolled to hundreds of statements."""
        design, *values = point
        unrolled = self.designs[design].unrolling(tuple(values)) > _MANY
        return math.log(_SLOWER) if unrolled else 0.0

    def random(self, chance: Random) -> Point:
        """A design, then each decision, each as likely as the others of its kind."""
        index = chance.randrange(len(self.designs))
        values: list[int] = []
        for decision in self.designs[index].decisions:
            values += chance.choice(decision.options)
        return (index, *values)

    def mutated(self, point: Point, chance: Random) -> Point:
        """One decision that has alternatives."""
        design = self.designs[point[0]]
        parts = design.split(point[1:])
        free = [at for at, decision in enumerate(design.decisions) if len(decision.options) > 1]
        if free:
            index = chance.choice(free)
            parts[index] = design.decisions[index].mutated(parts[index], chance)
        return (point[0], *(number for part in parts for number in part))

    def crossed(self, one: Point, other: Point, chance: Random) -> Point:
        """Take each decision from one or the other, within a design."""
        if one[0] != other[0]:
            return one
        design = self.designs[one[0]]
        pairs = zip(design.split(one[1:]), design.split(other[1:]), strict=True)
        parts = [chance.choice(pair) for pair in pairs]
        return (one[0], *(number for part in parts for number in part))

    def _design(self, trace: Any) -> Design:
        """The design of a generated trace, with the compute locations that samples of it have."""
        locations: dict[int, set[int]] = defaultdict(set)
        first = self._json(trace)
        for seed in range(_SEED, _SEED + _SAMPLES):
            schedule = Schedule(self._module, seed=seed, error_render_level="none")
            try:
                Trace(trace.insts, {}).apply_to_schedule(schedule, remove_postproc=True)
            except Exception:  # noqa: S112  # an invalid sample: TVM's primitives fail in many ways
                continue
            for place, value in own_decisions(self._json(schedule.trace)):
                if first[0][place][0] == "SampleComputeLocation":
                    locations[place].add(int(value))
        return Design.read(first, {place: sorted(found) for place, found in locations.items()})

    def _applied(self, trace: Any) -> Schedule | None:
        schedule = Schedule(self._module, seed=_SEED, error_render_level="none")
        try:
            Trace.apply_json_to_schedule(trace, schedule)
            schedule.enter_postproc()
            valid = all(postproc.apply(schedule) for postproc in self._postprocs)
            return schedule if valid else None
        except Exception:  # an invalid combination of decisions: primitives fail in many ways
            return None

    def _json(self, trace: Any) -> Any:
        return json.loads(_record(self._module, self._target, trace, []))[0]


def tune_context(module: Any, target: Any, architecture: str, seed: int) -> Any:
    """Return TVM's context of MetaSchedule's space of a module, for a CPU of this architecture."""
    import_intrinsics(architecture)
    return ms.TuneContext(
        mod=module,
        target=target,
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        num_threads=1,
        rand_state=seed,
        task_name="tuna",
    )


def import_intrinsics(architecture: str = "") -> bool:
    """Import TVM's tensor intrinsics of one architecture (default: the host's); return whether that
    was possible.

    `tvm.s_tir.tensor_intrin` parses the intrinsics of every device when it is first imported, which
    each TuneContext does: 23 seconds. Here an empty package takes its place, and only the modules
    for one architecture are imported. That depends on the layout of the package in the pinned
    version; where it differs the plain import is used, which is slow and right.
    """
    names = _BY_MACHINE.get(architecture or platform.machine().lower(), ())
    loaded = sys.modules.get(_PACKAGE)
    if loaded is not None and getattr(loaded, "__file__", None) is not None:
        return False  # the whole package is there
    import tvm.s_tir

    if loaded is None:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(Path(str(tvm.s_tir.__file__)).parent / "tensor_intrin")]
        sys.modules[_PACKAGE] = package
    else:
        package = loaded
    try:
        if not names:
            raise ImportError("no list of intrinsics for this machine")
        for name in names:
            importlib.import_module(f"{_PACKAGE}.{name}")
    except Exception:  # with any changed package the plain import below is the fallback
        for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
            del sys.modules[name]
        importlib.import_module(_PACKAGE)
        return False
    tvm.s_tir.tensor_intrin = package
    return True


def to_params(module: Any, target: Any, schedule: Schedule) -> str:
    """The params of a schedule of `module`; the same text in every process."""
    arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
    return _record(module, target, schedule.trace, arguments)


def _record(module: Any, target: Any, trace: Any, arguments: Any) -> str:
    workload = ms.database.Workload(module)
    return to_text(ms.database.TuningRecord(trace, workload, None, target, arguments).as_json())


def schedule_of(module: Any, params: str) -> Schedule:
    """The schedule with these params; raises BadInput unless the text is a record of a schedule
    of `module`."""
    try:
        record = ms.database.TuningRecord.from_json(
            json.loads(params), ms.database.Workload(module)
        )
        schedule = Schedule(module)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
    except Exception as error:  # TVM's reader and its primitives have many ways to fail
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
        raise BadInput(f"The params are not a schedule of this problem: {reason}") from error
    return schedule


def to_text(value: Any) -> str:
    """TVM's containers and numbers as JSON."""
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: Any) -> Any:
    """TVM's containers and numbers as Python's."""
    if value is None or isinstance(value, bool | float | int):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return int(value)
