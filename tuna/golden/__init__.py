"""Numbered releases of a library's results: build, compare, promote, roll back, explain."""

from tuna.golden.build import BuildReport, build
from tuna.golden.compare import PromotionReport, report, report_session
from tuna.golden.explain import Explanation, explain, explain_line
from tuna.golden.markdown import to_markdown
from tuna.golden.release import check_gate, promote, rollback
from tuna.golden.versions import (
    GateViolated,
    GoldenExists,
    GoldenFrozen,
    NotReleasable,
    ResultsChanged,
    SessionChanged,
    Version,
    current,
    versions,
)

__all__ = [
    "BuildReport",
    "Explanation",
    "GateViolated",
    "GoldenExists",
    "GoldenFrozen",
    "NotReleasable",
    "PromotionReport",
    "ResultsChanged",
    "SessionChanged",
    "Version",
    "build",
    "check_gate",
    "current",
    "explain",
    "explain_line",
    "promote",
    "report",
    "report_session",
    "rollback",
    "to_markdown",
    "versions",
]
