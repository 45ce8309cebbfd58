"""Numbered releases of a library's results: build, compare, promote, roll back, explain."""

from tuna.golden.build import BuildReport, build
from tuna.golden.compare import PromotionReport, check_gate, report
from tuna.golden.errors import GateViolated, GoldenExists, GoldenFrozen, NotReleasable, SessionChanged
from tuna.golden.explain import Explanation, explain
from tuna.golden.release import promote, rollback
from tuna.golden.versions import Version, versions

__all__ = [
    "BuildReport",
    "Explanation",
    "GateViolated",
    "GoldenExists",
    "GoldenFrozen",
    "NotReleasable",
    "PromotionReport",
    "SessionChanged",
    "Version",
    "build",
    "check_gate",
    "explain",
    "promote",
    "report",
    "rollback",
    "versions",
]
