"""Whole layers tuned through real workers, from import to SQL, for `benchmarks.gpu`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tuna.configs import Config
from tuna.vocabulary import BASELINE
from tuna_triton import nvml

ROOT = Path(__file__).resolve().parents[1]
_TRIALS = (
    "SELECT config.json, solver.name, trial.params, trial.time_ms, trial.low_ms, trial.high_ms,"
    " trial.cause, trial.ended_early, trial.max_error, trial.build_s FROM trial"
    " JOIN job ON job.id = trial.job_id JOIN config ON config.id = job.config_id"
    " JOIN solver ON solver.id = job.solver_id ORDER BY trial.id"
)
_FOUND = (
    "SELECT config.json, solver.name, solver.algorithm = ?, find_db.params, find_db.time_ms"
    " FROM find_db JOIN config ON config.id = find_db.config_id"
    " JOIN solver ON solver.id = find_db.solver_id WHERE find_db.time_ms IS NOT NULL"
    " ORDER BY find_db.time_ms"
)
_RESULTS = (
    "SELECT config.json, solver.name, find_db.params, find_db.time_ms, trial.low_ms,"
    " trial.high_ms, find_db.noisy, find_db.final_job_id FROM find_db"
    " JOIN config ON config.id = find_db.config_id JOIN solver ON solver.id = find_db.solver_id"
    " LEFT JOIN trial ON trial.job_id = find_db.job_id AND trial.number = find_db.trial_number"
    " ORDER BY find_db.id"
)
_SAMPLE_S = 0.2


class Result(NamedTuple):
    """A result of a layer."""

    params: str
    time_ms: float
    solver: str


class Trial(dict[str, Any]):
    """One trial as a line of a file: fields under the names of the columns."""

    NAMES = (
        *("config", "solver", "params", "time_ms", "low_ms", "high_ms", "cause", "ended_early"),
        *("max_error", "build_s"),
    )


@dataclass
class Run:
    """A session of its own in a folder of its own, so that it learns nothing from others."""

    name: str
    home: Path
    figures: dict[str, float] = field(default_factory=dict)

    def tuna(self, *words: str, timeout_s: float = 600) -> str:
        """The output of a command; raises SystemExit where it fails."""
        self.home.mkdir(parents=True, exist_ok=True)
        paths = filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-m", "tuna", *words],
            cwd=self.home,
            env={
                **os.environ,
                "TUNA_HOME": str(self.home / "home"),
                "PYTHONPATH": os.pathsep.join(paths),
            },
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"tuna {' '.join(words)}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def tune(self, layers: Sequence[Config], options: Sequence[str], until: float) -> None:
        """Tune layers with these options of `load-jobs`, and ask for the report, by the moment
        `until`."""
        began = time.monotonic()
        text = "".join(f"{layer.text()}\n" for layer in layers)
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "layers.jsonl").write_text(text)
        self.tuna("init-session", "triton", "-l", self.name)
        self.tuna("import", "layers.jsonl", "-t", self.name)
        self.tuna("update-solvers", "triton")
        self.tuna("applicability", "--session-id", "1")
        self.tuna("load-jobs", "--session-id", "1", "-t", self.name, *options)
        started = time.monotonic()
        # a busy machine needs as long for the report as it needed for what came before
        limit_s = max(until - started - (started - began) / 2, 1)
        with _activity() as active:
            try:
                self.tuna("run", "--session-id", "1", timeout_s=limit_s)
            except subprocess.TimeoutExpired:
                self.figures["cut_off"] = 1.0
        seconds = time.monotonic() - started
        report = json.loads(self.tuna("report", "--session-id", "1", "--json"))
        idle = report["idle_share"]
        self.figures |= {"seconds": seconds, "idle_share": 1.0 if idle is None else idle}
        if active:  # a kernel ran, by NVML
            self.figures["active_share"] = statistics.fmean(active)
        self.figures |= self._summary() | {"wall_s": time.monotonic() - began}
        (self.home / "figures.json").write_text(json.dumps(self.figures))

    @property
    def is_done(self) -> bool:
        """Whether an earlier call has tuned it."""
        return (self.home / "figures.json").exists()

    def earlier(self) -> dict[str, float]:
        """Return the figures of the call that tuned it."""
        figures: dict[str, float] = json.loads((self.home / "figures.json").read_text())
        return figures

    def trials(self) -> list[Trial]:
        """Every trial, in the order of their numbers."""
        with self._database() as database:
            rows = database.execute(_TRIALS).fetchall()
        found = [Trial(zip(Trial.NAMES, row, strict=True)) for row in rows]
        return [Trial(one, config=json.loads(one["config"])) for one in found]

    def found(self) -> list[dict[str, Any]]:
        """The results as exporters see them."""
        names = ("config", "solver", "params", "time_ms", "low_ms", "high_ms", "noisy")
        with self._database() as database:
            rows = database.execute(_RESULTS).fetchall()
        return [dict(zip((*names, "final_job_id"), row, strict=True)) for row in rows]

    def environment(self) -> dict[str, Any]:
        """The device and the compiler."""
        names = ("library_version", "arch", "num_cu", "toolchain", "device", "target")
        with self._database() as database:
            query = f"SELECT {', '.join(names)} FROM environment"  # noqa: S608
            return dict(zip(names, database.execute(query).fetchone(), strict=True))

    def winners(self) -> dict[str, Result]:
        """The best tile of each layer that is not from the solver of the consumer's default."""
        return {config: best for config, (best, _) in self.results().items() if best is not None}

    def results(self) -> dict[str, tuple[Result | None, Result | None]]:
        """By layer: the best tuned result, and that of the default."""
        found: dict[str, list[Result | None]] = {}
        with self._database() as database:
            rows = database.execute(_FOUND, [BASELINE]).fetchall()
        for config, solver, is_default, params, time_ms in rows:
            pair = found.setdefault(config, [None, None])
            pair[bool(is_default)] = pair[bool(is_default)] or Result(params, time_ms, solver)
        return {config: (best, default) for config, (best, default) in found.items()}

    def times(self) -> dict[tuple[str, str], float]:
        """The time of each candidate that was measured, by its layer and params."""
        with self._database() as database:
            rows = database.execute(_TRIALS).fetchall()
        return {(row[0], row[2]): row[3] for row in rows if row[3] is not None}

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.home / "home" / "tuna.sqlite")) as made:
            yield made

    def _summary(self) -> dict[str, float]:
        with self._database() as database:
            counted = "SELECT count(*), count(cause), sum(cause = 'wrong_result') FROM trial"
            trials, failed, wrong = database.execute(counted).fetchone()
            (noisy,) = database.execute("SELECT count(*) FROM find_db WHERE noisy").fetchone()
            (building,) = database.execute("SELECT total(build_s) FROM trial").fetchone()
        results = self.results()
        gains = [
            default.time_ms / best.time_ms for best, default in results.values() if best and default
        ]
        compared = {"default_over_best": statistics.geometric_mean(gains)} if gains else {}
        return {
            **compared,
            "trials": float(trials),
            "failed": float(failed),
            "wrong": float(wrong or 0),
            "layers": float(len(results)),
            "noisy": float(noisy),
            "build_cpu_s": float(building),
        }


def add_trials(path: Path, run: Run, *, stand_in: bool) -> None:
    """Add a line that names the run, and one for each of its trials."""
    head: dict[str, Any] = {"run": run.name, "stand_in": stand_in, "figures": run.figures}
    head |= {"environment": run.environment(), "results": run.found()}
    add_lines(path, [head, *run.trials()])


def add_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add lines of JSON to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(one, separators=(",", ":")) + "\n" for one in lines)


def behind(searched: Run, exhaustive: Run) -> dict[str, float]:
    """How far the tiles that a search chose are behind the best of all, by times that were measured
    in one session."""
    times, best = exhaustive.times(), exhaustive.winners()
    found, missing = [], 0
    for config, one in searched.winners().items():
        if config in best and (config, one.params) in times:
            found.append(times[config, one.params] / best[config].time_ms)
        else:
            missing += 1
    if not found:
        return {"not_compared": float(missing)}
    return {
        "behind": statistics.geometric_mean(found) - 1,
        "behind_at_most": max(found) - 1,
        "not_compared": float(missing),
    }


def agreeing(one: Run, other: Run, times: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Layers whose winner is the same in both runs, or within 1 % of it by `times`."""
    first, second = one.winners(), other.winners()
    same = close = 0
    for config in first.keys() & second.keys():
        tiles = first[config], second[config]
        same += tiles[0].params == tiles[1].params
        known = [times.get((config, one.params), one.time_ms) for one in tiles]
        close += tiles[0].params == tiles[1].params or max(known) <= 1.01 * min(known)
    return {"same_winner": float(same), "same_or_close": float(close)}


@contextlib.contextmanager
def _activity() -> Iterator[list[float]]:
    """Samples of the share of time in which a kernel ran, by NVML; empty where it does not tell."""
    found: list[float] = []
    ended = threading.Event()
    thread = threading.Thread(target=_sample, args=(found, ended), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _sample(found: list[float], ended: threading.Event) -> None:
    class Utilization(ctypes.Structure):
        _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]

    value = Utilization()
    with contextlib.suppress(nvml.NvmlError):
        library = nvml.Nvml()
        device = library.handle("")
        while not ended.wait(_SAMPLE_S):
            library.call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(value))
            found.append(value.gpu / 100)
