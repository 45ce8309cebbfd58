"""Numbered releases of a library's results: build, compare, promote, roll back, explain."""

from tuna.golden.build import BuildReport, build
from tuna.golden.compare import PromotionReport, report, report_session
from tuna.golden.explain import Explanation, explain, explain_line
from tuna.golden.release import check_gate, promote, rollback
from tuna.golden.versions import (
    EntryFilter,
    GateViolated,
    GoldenExists,
    GoldenFrozen,
    NotReleasable,
    ReleaseEntry,
    ResultsChanged,
    SessionChanged,
    Version,
    current,
    entry_page,
    versions,
)

__all__ = [
    "BuildReport",
    "EntryFilter",
    "Explanation",
    "GateViolated",
    "GoldenExists",
    "GoldenFrozen",
    "NotReleasable",
    "PromotionReport",
    "ReleaseEntry",
    "ResultsChanged",
    "SessionChanged",
    "Version",
    "build",
    "check_gate",
    "current",
    "entry_page",
    "explain",
    "explain_line",
    "promote",
    "report",
    "report_session",
    "rollback",
    "versions",
]
