"""Makes a corpus of the trials that `scripts/bench gpu --trials TRIALS` kept, and answers from it
without a GPU: searches, and exporters.

    scripts/bench gpu_corpus TRIALS CORPUS

A corpus is gzip of lines in JSON, 2 MB at most: for each run its facts and results, then for each
of its layers and solvers the candidates with their times.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuna.configs import from_json, from_json_text
from tuna.libraries.kernels import Past
from tuna.libraries.results import ResultEnvironment, ResultRecord
from tuna.testing.exporter_contract import sample_record

MAX_BYTES = 2_000_000
_DIGITS = 6  #: of a time


@dataclass
class Table:
    """The candidates of one solver for one layer."""

    config: dict[str, Any]
    solver: str
    #: params, then milliseconds and the ends of the interval, or the cause of a failure
    trials: list[tuple[str, float | None, float | None, float | None, str | None]]

    @property
    def best_ms(self) -> float:
        """The time of the fastest candidate."""
        return min(ms for _, ms, *_ in self.trials if ms is not None)

    def searched(
        self, propose: Callable[[Sequence[Past], int], Sequence[str]], count: int, batch: int
    ) -> float:
        """How many times slower than the best is what a search finds in `count` trials, which
        `propose` chooses from the trials before; a candidate that is not here fails."""
        known = {params: (ms, cause) for params, ms, _, _, cause in self.trials}
        history: list[Past] = []
        while len(history) < count:
            chosen = propose(history, min(batch, count - len(history)))
            if not chosen:
                break
            for params in chosen:
                time_ms, cause = known.get(params, (None, "not_applicable"))
                history.append(Past(params, time_ms, cause))
        found = [one.time_ms for one in history if one.time_ms is not None]
        return min(found, default=float("inf")) / self.best_ms


@dataclass
class RecordedRun:
    """A run of the benchmark."""

    run: str
    stand_in: bool  #: beside a stand-in of the driver: its times are made up
    figures: dict[str, float]
    environment: dict[str, Any]
    results: list[dict[str, Any]]
    tables: list[Table] = field(default_factory=list)

    def records(self) -> Iterator[ResultRecord]:
        """The results, as exporters are given them."""
        facts = self.environment
        environment = ResultEnvironment(
            **{"key": "0" * 16, "library": "triton", "flags": {}, "conditions": {}, **facts}
        )
        for one in self.results:
            config = from_json_text(one["config"])
            told = {
                **{"kind": config.kind, "label": config.label, "environment": environment},
                **{name: one[name] for name in one.keys() & set(ResultRecord._fields)},
            }
            told |= {"config": config.canonical(), "noisy": bool(one["noisy"])}
            solver, time_ms = told.pop("solver"), told.pop("time_ms")
            yield sample_record(told.pop("config"), solver, time_ms, **told)


def of_trials(path: Path) -> list[RecordedRun]:
    """The runs in a file of trials; a run that was repeated counts as it was last."""
    runs: dict[str, RecordedRun] = {}
    tables: dict[tuple[str, str], Table] = {}
    for line in path.read_text().splitlines():
        facts = json.loads(line)
        if "run" in facts:
            run = runs[facts["run"]] = RecordedRun(**facts)
            tables = {}
            continue
        key = json.dumps(facts["config"], sort_keys=True), facts["solver"]
        if key not in tables:
            tables[key] = Table(facts["config"], facts["solver"], [])
            run.tables.append(tables[key])
        times = (_short(facts[name]) for name in ("time_ms", "low_ms", "high_ms"))
        tables[key].trials.append((facts["params"], *times, facts["cause"]))
    return list(runs.values())


def _short(time_ms: float | None) -> float | None:
    return None if time_ms is None else float(f"{time_ms:.{_DIGITS}g}")


def write(path: Path, runs: Sequence[RecordedRun]) -> None:
    """Write a corpus; raises SystemExit where it is too large to be kept."""
    lines = []
    for run in runs:
        facts = asdict(run)
        lines += [facts, *facts.pop("tables")]
    text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines)
    data = gzip.compress(text.encode(), mtime=0)
    if len(data) > MAX_BYTES:
        raise SystemExit(f"The corpus would have {len(data)} bytes, more than {MAX_BYTES}.")
    path.write_bytes(data)


def read(path: Path) -> list[RecordedRun]:
    """The runs of a corpus."""
    runs: list[RecordedRun] = []
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        facts = json.loads(line)
        if "run" in facts:
            runs.append(RecordedRun(**facts))
        else:
            trials = [tuple(one) for one in facts.pop("trials")]
            runs[-1].tables.append(Table(**facts, trials=trials))
    return runs


def main() -> int:
    """Run it; the options say what for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trials", type=Path)
    parser.add_argument("corpus", type=Path)
    asked = parser.parse_args()
    runs = of_trials(asked.trials)
    write(asked.corpus, runs)
    for run in runs:
        count = sum(len(table.trials) for table in run.tables)
        layers = {from_json(table.config).label for table in run.tables}
        made_up = ", made up by the stand-in" if run.stand_in else ""
        print(f"{run.run}: {count} trials of {len(layers)} layers{made_up}", file=sys.stderr)
    print(json.dumps({"bytes": asked.corpus.stat().st_size, "runs": len(runs)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
