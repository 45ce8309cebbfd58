"""JSON and CSV of the API's answers: the same for `--json`, `--csv` and the service."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tuna import api


def overview_documents(sessions: Sequence[api.Overview]) -> list[dict[str, Any]]:
    """Return sessions as `tuna status --json` has them."""
    in_flight = [session.session_id for session in sessions if session.in_flight]
    waits = api.waits(in_flight) if in_flight else {}
    return [_overview(session, waits.get(session.session_id, "")) for session in sessions]


def _overview(session: api.Overview, waits_for: str) -> dict[str, Any]:
    def named(*names: str) -> dict[str, Any]:
        return {name: getattr(session, name) for name in names}

    outlook = api.outlook(session.session_id) if session.options.deadline else None
    searches = dataclasses.asdict(session.searches)
    return {
        "session": session.session_id,
        **named("library", "reason", "environment", "arch", "jobs", "without_solver"),
        "searches": {**searches, "total": session.searches.total},
        **named("in_flight", "simulated", "noisy"),
        **session.options.model_dump(mode="json"),
        "outlook": _outlook(outlook),
        **named("undrained", "fault", "failures"),
        "waits_for": waits_for,
    }


def size_document(session: api.SessionSize) -> dict[str, Any]:
    """Return a session as `tuna session show --json` has it."""
    warm_starts = [
        start._asdict() | {"siblings": [one._asdict() for one in start.siblings]}
        for start in api.warm_starts(session.id)
    ]
    outlook = _outlook(api.outlook(session.id))
    return {**vars(session), "warm_starts": warm_starts, "outlook": outlook}


def _outlook(one: api.Outlook | None) -> dict[str, Any]:
    return {} if one is None else dataclasses.asdict(one) | {"can_be_kept": one.can_be_kept}


def live_document(live: api.LiveSession) -> dict[str, Any]:
    """Return a session as `tuna status --watch --json` has it."""
    document = dataclasses.asdict(live)
    options = document["overview"].pop("options")
    document["overview"] |= options.model_dump(mode="json")
    if live.totals is not None:
        document["totals"] |= {
            name: getattr(live.totals, name) for name in ("efficiency", "lower_bound_s")
        }
    return document


def snapshot_document(snapshot: api.LiveSnapshot) -> dict[str, Any]:
    """Return a line of `tuna status --watch --json`."""
    return {
        "at": snapshot.at.isoformat(),
        "sessions": [live_document(live) for live in snapshot.sessions],
        "workers": snapshot.workers,
        "read_share": snapshot.read_share,
    }


def json_text(document: Any, indent: int | None = None) -> str:
    """Return a document as JSON: of JSON's types, dataclasses, models, times and paths."""
    return json.dumps(document, indent=indent, default=_as_json)


def _as_json(value: Any) -> Any:
    if hasattr(value, "as_json"):
        return value.as_json()
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    return value.model_dump(mode="json")  # pydantic's, which takes long to import


def csv_lines(rows: Iterable[Any], *, head: bool = True) -> Iterator[str]:
    """Yield rows, which JSON has as objects, as CSV: a line of the names of all fields, unless
    `head` is false, then one for each row."""
    for row in rows:
        document: Any = row
        while not isinstance(document, Mapping):
            document = _as_json(document)
        if head:
            yield _csv_line(document)
            head = False
        yield _csv_line(map(_cell, document.values()))


def _csv_line(cells: Iterable[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return api.text_cell(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime | Path):
        return str(_as_json(value))
    return json_text(value)
