"""Whole results as JSON lines; docs/formats.md describes each field.

The first line is `{"format":"tuna-results","version":1}`, each line after it one result. Keys stand
in one order, numbers as Python's repr writes them (the shortest text that reads back), text in
ASCII with escapes: equal results give equal bytes, and a reader needs memory for one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuna.errors import BadInput
from tuna.exports.generic import VERSION, GenericExporter
from tuna.libraries import compressed
from tuna.libraries.results import ResultEnvironment, ResultRecord, Spread

FORMAT = "tuna-results"
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_HEADER = f"{_encode({'format': FORMAT, 'version': VERSION})}\n"
_Count = Annotated[int, Field(ge=0)]
_Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_MAX_SHOWN = 200


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_Model = TypeVar("_Model", bound=_Part)


class _Config(_Part):
    key: str
    kind: str
    text: str
    label: str


class _Spread(_Part):
    min_ms: _Time
    median_ms: _Time
    iqr_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    repeats: Annotated[int, Field(ge=1)]


class _Environment(_Part):
    key: str
    library: str
    library_version: str
    arch: str
    num_cu: int
    toolchain: str
    device: str
    target: str
    flags: dict[str, str]
    conditions: dict[str, str]


class _Provenance(_Part):
    session_id: _Count
    job_id: _Count | None
    trial_number: _Count | None
    worker: str
    device: str
    measured_at: str | None
    imported_from: str | None


class _Line(_Part):
    config: _Config
    solver: str
    algorithm: str
    family: str
    params: str
    time_ms: _Time | None
    spread: _Spread | None
    max_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    workspace_bytes: _Count
    simulated: bool
    noisy: bool
    clock: Annotated[str, Field(max_length=8)]
    environment: _Environment
    provenance: _Provenance


class _Header(_Part):
    format: Literal["tuna-results"]
    version: Literal[1]


class JsonExporter(GenericExporter):
    """One JSON object a line, for programs."""

    form = "json"
    title = "JSON file"
    extension = ".results.jsonl"
    endings = (extension,)

    def write_records(self, path: Path, records: Iterable[ResultRecord]) -> int:
        """One line each after the header."""
        count = 0
        with open(path, "w", encoding="ascii", newline="\n") as stream:
            stream.write(_HEADER)
            for record in records:
                stream.write(f"{_encode(to_json(record))}\n")
                count += 1
        return count

    def recognises(self, path: Path, head: bytes) -> bool:
        """By the header, whatever its version."""
        return head.startswith(f'{{"format":"{FORMAT}"'.encode())

    def read(self, path: Path) -> Iterator[ResultRecord]:
        """Line by line."""
        lines = compressed.lines(path, self.title)
        number, line = next(lines, (1, ""))
        _validated(_Header, line, f"{path}:{number}")
        for number, line in lines:
            yield _record(_validated(_Line, line, f"{path}:{number}"), f"{path}:{number}")


def to_json(record: ResultRecord) -> dict[str, Any]:
    """A record as the JSON line has it."""
    return {
        "config": {
            "key": record.config_key,
            "kind": record.kind,
            "text": record.config,
            "label": record.label,
        },
        "solver": record.solver,
        "algorithm": record.algorithm,
        "family": record.family,
        "params": record.params,
        "time_ms": record.time_ms,
        "spread": None if record.spread is None else record.spread._asdict(),
        "max_error": record.max_error,
        "workspace_bytes": record.workspace_bytes,
        "simulated": record.simulated,
        "noisy": record.noisy,
        "clock": record.clock,
        "environment": {
            **record.environment._asdict(),
            "flags": dict(sorted(record.environment.flags.items())),
            "conditions": dict(sorted(record.environment.conditions.items())),
        },
        "provenance": {
            "session_id": record.session_id,
            "job_id": record.job_id,
            "trial_number": record.trial_number,
            "worker": record.worker,
            "device": record.device,
            "measured_at": None if record.measured_at is None else record.measured_at.isoformat(),
            "imported_from": record.imported_from,
        },
    }


def from_json(value: Mapping[str, Any], where: str) -> ResultRecord:
    """The record that `to_json` wrote; raises BadInput that begins with `where`."""
    return _record(_validated(_Line, value, where), where)


def _validated(model: type[_Model], value: str | Mapping[str, Any], where: str) -> _Model:
    try:
        return (
            model.model_validate_json(value)
            if isinstance(value, str)
            else model.model_validate(value)
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"{where}: {f'{name}: ' if name else ''}{first['msg'][:_MAX_SHOWN].lower()}"
        ) from None


def _record(line: _Line, where: str) -> ResultRecord:
    config, provenance = line.config, line.provenance
    return ResultRecord(
        config.key,
        config.kind,
        config.text,
        config.label,
        line.solver,
        line.algorithm,
        line.family,
        line.params,
        line.time_ms,
        None if line.spread is None else Spread(**dict(line.spread)),
        line.max_error,
        line.workspace_bytes,
        line.simulated,
        line.noisy,
        line.clock,
        ResultEnvironment(**dict(line.environment)),
        provenance.session_id,
        provenance.job_id,
        provenance.trial_number,
        provenance.worker,
        provenance.device,
        _moment(provenance.measured_at, where),
        provenance.imported_from,
    )


def _moment(text: str | None, where: str) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise BadInput(f"{where}: measured_at {text[:40]!r} is no ISO 8601 time with its zone")
    return moment
