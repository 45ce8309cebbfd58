"""The pipeline's benchmark in this checkout and in another one, in turn."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path

from benchmarks.harness import Outcome

#: Least ratio of throughputs.
_BUDGET_VS_BASELINE = {"mariadb": 1.5, "sqlite": 1.0}


def compare(baseline: Path, db: str, count: int, steps: list[str], rounds: int) -> int:
    """Interleave runs of this checkout and of `baseline`; ratios are ours to the baseline's."""
    here = Path(__file__).parent.parent
    runs: dict[Path, list[dict[str, float]]] = {here: [], baseline: []}
    for _ in range(rounds):
        for folder, figures in runs.items():
            figures.append(_figures_of(folder, db, count, steps))
    ours, theirs = (
        {name: statistics.median(f[name] for f in figures_of_runs) for name in figures_of_runs[0]}
        for figures_of_runs in runs.values()
    )
    ratios = {
        name: ours[name] / theirs[name]
        for name in (
            "end_to_end_per_s",
            "steps_per_s",
            "jobs_per_cpu_s",
            "cpu_coordinator_s",
            "cpu_mariadbd_s",
        )
        if theirs.get(name)
    }
    budget = {"steps_per_s_ratio": _BUDGET_VS_BASELINE[db]}
    ratios = {f"{name}_ratio": ratio for name, ratio in ratios.items()}
    return Outcome(f"pipeline {db} vs baseline", ours, theirs, ratios, budget).print()


def _figures_of(folder: Path, db: str, count: int, steps: list[str]) -> dict[str, float]:
    """The figures of one run of a checkout; those of the first release by their present names."""
    command = [
        str(folder / ".venv/bin/python"),
        "-m",
        "benchmarks.pipeline",
        "--db",
        db,
        "--jobs",
        str(count),
    ]
    result = subprocess.run(
        [*command, "--steps", ",".join(steps)],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not result.stdout:
        raise SystemExit(f"The benchmark in {folder} failed with exit code {result.returncode}.")
    figures: dict[str, float] = json.loads(result.stdout)["figures"]
    return {name.replace("enqueuer", "coordinator"): value for name, value in figures.items()}
