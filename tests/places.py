"""The folders of the distributions: the core's package, and those in `packages/`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "tuna"
#: Import packages of the distributions beside the core, such as packages/tuna-serve/tuna_serve.
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/tuna_*/__init__.py"))
#: Folders of tests.
TESTS = [ROOT / "tests", *(path.parent / "tests" for path in PACKAGES)]
