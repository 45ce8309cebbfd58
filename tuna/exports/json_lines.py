"""Whole results of every library and kind as JSON lines, and the base of such forms;
docs/formats.md describes each field.

The first line is `{"format":"tuna-results","version":1}`, each line after it one result. Keys stand
in one order, numbers as Python's repr writes them (the shortest text that reads back), text in
ASCII with escapes: equal results give equal bytes, and a reader needs memory for one line.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.exporter import (
    Entry,
    Exporter,
    ExportTally,
    FileOptions,
    LineNames,
    base_name,
)
from tuna.libraries.imported_records import ImportedResult
from tuna.libraries.results import (
    NO_TIME,
    ResultEnvironment,
    ResultRecord,
    ResultSource,
    Spread,
    is_time,
)

#: Version of both forms; a reader refuses another one
VERSION = 1
_FORMAT = "tuna-results"
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_HEADER = f"{_encode({'format': _FORMAT, 'version': VERSION})}\n"
_IMPORTED = [name for name in ImportedResult._fields if name in ResultRecord._fields]
_Count = Annotated[int, Field(ge=0)]
_Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_MAX_SHOWN = 200


class GenericOptions(FileOptions):
    """Options of an export of whole results."""

    top: int | None = Field(
        None, ge=1, description="solvers kept for a config and environment; default: all"
    )
    n_best: int = Field(1, ge=1, description="trials kept for a config, solver and environment")


class GenericExporter(Exporter[GenericOptions]):
    """Whole results; a subclass says how a file of them looks."""

    timed = True
    options = GenericOptions
    names_library = True

    @abstractmethod
    def write_records(self, path: Path, records: Iterable[ResultRecord]) -> int:
        """Write the records in the order given; returns their number."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[ResultRecord]:
        """The records of a file, packed or not, one at a time; raises BadInput with the line of one
        that is none."""

    def write(
        self, path: Path, source: ResultSource, options: GenericOptions, tally: ExportTally
    ) -> int:
        """By config key, environment key, time, solver, params."""
        return self.write_records(path, _kept(source.records(options.n_best), options.top, tally))

    def entries(self, path: Path) -> Iterator[Entry]:
        """Time, workspace and params by config on a device and solver; without a time it is
        infinite."""
        for record in self.read(path):
            where = record.environment
            key = f"{record.config} on {where.arch} with {where.num_cu} CUs"
            time_ms = math.inf if record.time_ms is None else record.time_ms
            yield Entry(key, record.solver, (time_ms, record.workspace_bytes, record.params))

    def imported(self, path: Path) -> Iterator[ImportedResult]:
        """The part of a record that any library can import."""
        for record in self.read(path):
            fields = record._asdict()
            yield ImportedResult(**{name: fields[name] for name in _IMPORTED})


def _kept(
    records: Iterable[ResultRecord], top: int | None, tally: ExportTally
) -> Iterator[ResultRecord]:
    config, group, solvers = "", ("", ""), set[str]()
    for record in records:
        if record.time_ms is not None and not is_time(record.time_ms):
            tally.skipped[NO_TIME] += 1
            continue
        before, group = group, (record.config_key, record.environment.key)
        solvers = solvers if group == before else set()
        if top is not None and record.solver not in solvers and len(solvers) >= top:
            tally.skipped[f"slower than the {top} fastest of its config"] += 1
            continue
        solvers.add(record.solver)
        if record.config_key != config:
            config = record.config_key
            tally.configs += 1
        yield record


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


def _moment(value: object) -> object:
    """A time from ISO 8601 text; pydantic alone takes a text of seconds too, and in a mapping no
    text."""
    if not isinstance(value, str):
        return value
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(f"{value[:40]!r} is not an ISO 8601 time with its zone") from None


def _named(value: object) -> object:
    """The fields of an environment by their names; pydantic alone takes them in their order too."""
    if not isinstance(value, Mapping):
        raise ValueError("it is not an object")
    return value


class _Provenance(_Part):
    session_id: _Count
    job_id: _Count | None
    trial_number: _Count | None
    worker: str
    device: str
    measured_at: Annotated[AwareDatetime | None, BeforeValidator(_moment)]
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
    environment: Annotated[ResultEnvironment, BeforeValidator(_named)]
    provenance: _Provenance


_PROVENANCE, _LINE = tuple(_Provenance.model_fields), tuple(_Line.model_fields)


class _Header(_Part):
    format: Literal["tuna-results"]
    version: Literal[1]


class JsonExporter(GenericExporter):
    """One JSON object a line, for programs."""

    form = "json"
    title = "JSON file"
    endings = (".results.jsonl",)

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
        return head.startswith(f'{{"format":"{_FORMAT}"'.encode())

    def names_at(self, path: Path, number: int) -> LineNames:
        """The layer, solver and device of the result in a line."""
        if number == 1:
            raise BadInput(f"{path}:1 is the header; each line after it has a result.")
        found = from_json(compressed.line(path, number, self.title), f"{path}:{number}")
        where = base_name(found.environment.arch, found.environment.num_cu)
        return LineNames((found.solver,), where, config_key=found.config_key)

    def read(self, path: Path) -> Iterator[ResultRecord]:
        """Line by line."""
        lines = compressed.lines(path, self.title)
        number, line = next(lines, (1, ""))
        _validated(_Header, line, f"{path}:{number}")
        for number, line in lines:
            yield from_json(line, f"{path}:{number}")


def to_json(record: ResultRecord) -> dict[str, Any]:
    """A record as the JSON line has it."""
    fields, where, moment = record._asdict(), record.environment, record.measured_at
    parts = {
        "config": {
            "key": record.config_key,
            "kind": record.kind,
            "text": record.config,
            "label": record.label,
        },
        "spread": None if record.spread is None else record.spread._asdict(),
        "environment": {
            **where._asdict(),
            "flags": dict(sorted(where.flags.items())),
            "conditions": dict(sorted(where.conditions.items())),
        },
        "provenance": {
            **{name: fields[name] for name in _PROVENANCE},
            "measured_at": None if moment is None else moment.isoformat(),
        },
    }
    fields |= parts
    return {name: fields[name] for name in _LINE}


def from_json(value: str | Mapping[str, Any], where: str) -> ResultRecord:
    """The record that `to_json` wrote, or its text; raises BadInput that begins with `where`."""
    line = _validated(_Line, value, where)
    fields = {**vars(line), **vars(line.provenance)}
    del fields["provenance"]
    return ResultRecord(
        **fields
        | {
            "config_key": line.config.key,
            "kind": line.config.kind,
            "config": line.config.text,
            "label": line.config.label,
            "spread": None if line.spread is None else Spread(**vars(line.spread)),
        }
    )


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
