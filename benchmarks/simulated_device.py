"""A library whose search stages sleep for given times instead of using a device.

Its stages are those of a batch in the thesis that docs/scheduling.md compares with. Workers find it
by the entry point that `install` writes, and the durations in a file of JSON: for each session, by
its id, the seconds of each round's stages. A result says that its stage took `SCALE` times as long,
so that the coordinator decides as where stages take their real time.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuna.libraries.base import RoundsOutcome, SearchRules, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, Trial, WorkItem, result_of
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Resource

#: The file with the durations.
DURATIONS = "SIMULATED_DEVICE_DURATIONS"
#: Seconds of a real stage in one of a simulated one.
SCALE = "SIMULATED_DEVICE_SCALE"
STAGES = ("search", "build", "profile", "update")
_TRIALS = 8
_ROOT = Path(__file__).resolve().parents[1]


class SimulatedRounds(SearchRules):
    """Every solver searches."""

    step = Step("search", Resource.CPU)

    def solvers(self, names: Iterable[str], options: Mapping[str, Any]) -> Collection[str]:
        """All of them."""
        return list(names)

    def ends(self, options: Mapping[str, Any], outcome: RoundsOutcome) -> str | None:
        """When all rounds were opened that have durations."""
        rounds = min(map(len, _durations(os.environ[DURATIONS]).values()))
        return f"{rounds} rounds" if outcome.opened >= rounds else None


class SimulatedDevice(NoopLibrary):
    """Every solver searches; a round has one batch of candidates, which pass through all stages."""

    name = "simulated-device"
    kinds = ("gemm",)
    search = SimulatedRounds()
    steps = (
        Step("build", Resource.CPU),
        Step("profile", Resource.DEVICE),
        Step("update", Resource.CPU),
    )

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        """Sleep; propose, build and measure candidates of a few bytes."""
        for item in items:
            begun, due = time.time(), time.monotonic()
            seconds = _durations(os.environ[DURATIONS])[str(item.session_id)][item.round][
                STAGES.index(step.name)
            ]
            due += seconds
            trials = self._trials(step, item, context)
            time.sleep(max(0.0, due - time.monotonic()))
            facts = {"simulated": True, "started_at": begun, "ended_at": time.time()}
            yield result_of(
                item, ok=True, trials=trials, busy_s=seconds * float(os.environ[SCALE]), **facts
            )

    def _trials(self, step: Step, item: WorkItem, context: RunContext) -> tuple[Trial, ...]:
        if step is self.search.step:
            return tuple(
                Trial(index=index, params=f"{item.round}/{index}") for index in range(_TRIALS)
            )
        candidates = item.candidates
        if step.name == "build":
            return tuple(
                Trial(
                    index=one.index,
                    params=one.params,
                    artifact=context.artifacts.put((one.params or "").encode()),
                )
                for one in candidates
            )
        if step.name == "profile":
            times_ms = ((one.index, 1.0 + one.index / (1 + item.round)) for one in candidates)
            return tuple(Trial(index=index, times_ms=(ms,), time_ms=ms) for index, ms in times_ms)
        return ()


@functools.cache
def _durations(path: str) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = json.loads(Path(path).read_text())
    return found


def install(
    folder: Path, durations: Sequence[Sequence[Sequence[float]]], scale: float
) -> dict[str, str]:
    """Write durations and an entry point into `folder`; return variables with which both are found.

    `durations`: seconds of each stage of each round, of the sessions from the first one on.
    """
    about = folder / "plugin" / "simulated_device-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-device\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[tuna.libraries.simulated]\n{SimulatedDevice.name} ="
        " benchmarks.simulated_device:SimulatedDevice\n"
    )
    given = folder / "durations.json"
    given.write_text(json.dumps(dict(enumerate(durations, 1))))
    places = [str(folder / "plugin"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(places),
        "TUNA_SIMULATED": "1",
        DURATIONS: str(given),
        SCALE: str(scale),
    }
