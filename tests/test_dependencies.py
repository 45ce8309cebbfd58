"""What a worker imports comes with the installation: the tests' own packages could hide that something is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

#: Imported where it happens to be installed, by kombu (a serialiser), rich and tenacity, for what Tuna does not use.
OPTIONAL = {"yaml", "attr", "tornado"}
#: Loads what workers, coordinators, exports and reports use. The transport is loaded by name when a worker starts.
PROGRAM = """
import sys
import kombu.transport.redis, celery.bin.worker, celery.concurrency.prefork
import tuna.celery_app, tuna.workers.session_run, tuna.workers.serve, tuna.exports, tuna.reports.html
import tuna.reports.prometheus, tuna.golden, tuna.doctor, tuna.cli.main, tuna.libraries.measuring
from tuna.exports.registry import exporters
exporters()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def _installed_with(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The distributions that installing `name` brings, itself included, by normalised name."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(name, extras)]
    while todo:
        current, wanted = todo.pop()
        key = (re.sub(r"[-_.]+", "-", current).lower(), wanted)
        if key in seen:
            continue
        seen.add(key)
        try:
            lines = metadata.requires(current) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        for line in lines:
            requirement, _, marker = line.partition(";")
            extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker)
            if extra and extra[1] not in wanted:
                continue
            match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", requirement)
            assert match is not None
            todo.append((match[1], frozenset(filter(None, (match[2] or "").replace(" ", "").split(",")))))
    return {name for name, _ in seen}


def test_what_is_imported_is_required() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    owners = metadata.packages_distributions()
    there = {name for owner in set(owners["tuna"]) for name in _installed_with(owner)}
    assert {"celery", "kombu", "redis", "packaging"} <= there, "the search finds what is required"
    missing = {
        module: owners[module]
        for module in modules
        if module in owners and not {re.sub(r"[-_.]+", "-", name).lower() for name in owners[module]} & there
    }
    assert missing.keys() <= OPTIONAL
