"""Recorded seconds of each test file, by which those that take longest are begun first.

`pytest --record-durations` renews `durations.json` for the files that it runs.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_RECORD = Path(__file__).with_suffix(".json")
#: The order of shorter files makes no difference.
_MIN_S = 1.0


class Durations:
    """A plug-in that puts the longest files first: begun last, one of them would keep a single core
    busy at the end."""

    def __init__(self, record: bool) -> None:
        """`record`: write the durations of this run at its end."""
        self._record = record
        self._seconds: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)  # after `-m` and `-k`
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seconds = _recorded()
        items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_file(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._record and not hasattr(session.config, "workerinput"):
            _RECORD.write_text(_text({**_recorded(), **self._seconds}))


def _recorded() -> dict[str, float]:
    """Seconds by file, whose path begins at the root of the repository."""
    seconds: dict[str, float] = json.loads(_RECORD.read_text())
    return seconds


def _text(seconds: dict[str, float]) -> str:
    rounded = {file: round(value, 1) for file, value in sorted(seconds.items())}
    kept = {
        file: value
        for file, value in rounded.items()
        if value >= _MIN_S and (_ROOT / file).exists()
    }
    return json.dumps(kept, indent=0) + "\n"


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
