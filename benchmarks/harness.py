"""The output of every benchmark: one JSON object, with a baseline measured in the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import dataclass, field
from typing import Any


def command_line(about: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Make a parser with an option for each of these numbers; `--json` has no effect."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="no effect: the output is always JSON")
    for name, default in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}"
        )
    return parser


@dataclass
class Outcome:
    """Figures of one benchmark; `ok` if all reach their `budget` and stay in their `limits`."""

    bench: str
    figures: dict[str, float]
    baseline: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    budget: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def missed(self) -> set[str]:
        """Names of the figures that do not reach their budget or exceed their limit."""
        all_figures = self.figures | self.ratios
        missed = {name for name, least in self.budget.items() if all_figures[name] < least}
        return missed | {name for name, most in self.limits.items() if all_figures[name] > most}

    def print(self) -> int:
        """Print the object; return 0 if the budget is met."""
        missed = self.missed
        document: dict[str, Any] = {
            "bench": self.bench,
            "figures": _rounded(self.figures),
            "baseline": _rounded(self.baseline),
            "ratios": _rounded(self.ratios),
            "budget": self.budget,
            "limits": self.limits,
            "ok": not missed,
            "machine": {
                "cores": len(os.sched_getaffinity(0)),
                "cpu": _cpu(),
                "python": platform.python_version(),
                "load": os.getloadavg()[0],
            },
        }
        print(json.dumps(document, indent=1))
        return 1 if missed else 0


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {
        name: round(value, 4 if abs(value) < 10 else 1) or float(f"{value:.2g}")
        for name, value in values.items()
    }


def _cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        return next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            "unknown",
        )
