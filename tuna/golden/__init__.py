"""Numbered releases of a library's results: build, compare, promote, roll back, explain."""

from tuna.golden.build import BuildReport as BuildReport
from tuna.golden.build import build as build
from tuna.golden.compare import PromotionReport as PromotionReport
from tuna.golden.compare import report as report
from tuna.golden.compare import report_session as report_session
from tuna.golden.explain import Explanation as Explanation
from tuna.golden.explain import explain as explain
from tuna.golden.explain import explain_line as explain_line
from tuna.golden.release import check_gate as check_gate
from tuna.golden.release import promote as promote
from tuna.golden.release import rollback as rollback
from tuna.golden.versions import EntryFilter as EntryFilter
from tuna.golden.versions import GateViolated as GateViolated
from tuna.golden.versions import GoldenExists as GoldenExists
from tuna.golden.versions import GoldenFrozen as GoldenFrozen
from tuna.golden.versions import NotReleasable as NotReleasable
from tuna.golden.versions import ReleaseEntry as ReleaseEntry
from tuna.golden.versions import ResultsChanged as ResultsChanged
from tuna.golden.versions import SessionChanged as SessionChanged
from tuna.golden.versions import Version as Version
from tuna.golden.versions import current as current
from tuna.golden.versions import entry_page as entry_page
from tuna.golden.versions import versions as versions
