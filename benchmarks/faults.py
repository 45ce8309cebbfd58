"""Fault injection: 2,000 jobs on a cluster of real processes, for several seeds of faults.

`ok` if the checker finds no violation in the history of any seed; the times show the cost of the
faults. A failed seed is reported on stderr, with its events, its log directory and the command that
repeats it.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Outcome, command_line

_TESTS = Path(__file__).resolve().parents[1] / "tests"


def main() -> int:
    """Command line: which seeds, how many jobs."""
    options = command_line(__doc__, seeds=20, first_seed=1, jobs=2000).parse_args()
    sys.path[:0] = [str(_TESTS), str(_TESTS / "faults")]
    # exits through the `with` blocks, which stop the cluster
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in [name for name in os.environ if name.startswith(("TUNA_", "CELERY_"))]:
        del os.environ[name]
    os.environ["TUNA_SIMULATED"] = "1"  # needed by the library of the drill
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    return _measure(seeds, options.jobs)


def _measure(seeds: range, jobs: int) -> int:
    import drill

    reports = []
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="tuna-faults-"))
        report = drill.run(seed, folder, jobs)
        reports.append(report)
        if report.ok:
            shutil.rmtree(folder)
        else:
            lines = [
                *report.happened,
                *report.objections[:20],
                f"logs: {folder}",
                f"repeat: {drill.repeat(seed)}",
            ]
            print(f"seed {seed} failed", *lines, sep="\n  ", file=sys.stderr)
        print(
            f"seed {seed}: {'ok' if report.ok else 'FAILED'} in {report.seconds:.1f} s",
            file=sys.stderr,
        )
    figures = {
        "seeds": float(len(reports)),
        "seeds_failed": float(sum(not report.ok for report in reports)),
        "objections": float(sum(len(report.objections) for report in reports)),
        "jobs_per_seed": float(jobs),
        "faults": float(sum(report.faults for report in reports)),
        "items_begun": float(sum(report.runs for report in reports)),
        "attempts_lost_with_worker": float(sum(report.lost for report in reports)),
        "drill_median_s": statistics.median(report.seconds for report in reports),
        "drill_longest_s": max(report.seconds for report in reports),
    }
    ratios = {"items_begun_vs_needed": figures["items_begun"] / (2 * jobs * len(reports))}
    return Outcome("faults", figures, ratios=ratios, limits={"seeds_failed": 0.0}).print()


if __name__ == "__main__":
    raise SystemExit(main())
