"""TVM's own tuning database, read, written and as an export: `database_workload.json`,
`database_tuning_record.json`, and which layer is which.

Each line of the first file is a workload, `[structural hash, module in base64]`; each line of the
second is a record, `[index of its workload, [trace, [seconds], target, arguments]]`. TVM's
`JSONDatabase(work_dir=...)` reads both. It takes no notice of a record's target, so that one
directory is for one environment; an import takes the records of one target, also those that TVM
added later, and from a directory that TVM wrote alone. `layers.json` is Tuna's own:

    {"version": 1, "environment": KEY, "layers": [
    {"key": CONFIG KEY, "driver": COMMAND, "solver": NAME, "time_ms": BEST, "workload": LINE,
    "records": [LINE, ...]},
    ...]}

with lines counted from 0 and the fastest record first. A layer has `"noisy": true` if the device
was not quiet while its best record was measured, and `"packing"` if its kernel takes packed weights
or tensors in blocks of channels: for each argument null or the steps of `kernels/packing.py`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from tuna.configs import read_one
from tuna.errors import BadInput
from tuna.libraries.exporter import (
    Entry,
    Exporter,
    ExportOptions,
    ExportTally,
    sort_rows,
)
from tuna.libraries.imported_records import ImportedResult
from tuna.libraries.results import NO_TIME, ResultSource, is_time
from tuna.libraries.tvm import kernels, toolchain
from tuna.libraries.tvm.kernels.signature import packing_for
from tuna.libraries.tvm.solvers import BY_NAME, FUNCTION

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
LAYERS = "layers.json"
VERSION = 1
#: Maximum of bytes of a file that is read: what it describes takes some times its size in memory
LIMIT_BYTES = 1 << 28


@dataclass(frozen=True)
class TunedRecord:
    """One schedule of a workload with its time."""

    schedule: str  #: JSON text `[trace, null, target, arguments]`, compact
    seconds: float


@dataclass(frozen=True)
class TunedLayer:
    """A layer in the form that one solver gave it, with its best records, fastest first."""

    key: str  #: key of the config
    driver: str
    solver: str
    workload: str  #: JSON text `[structural hash, base64]`, compact
    records: tuple[TunedRecord, ...]
    #: steps that pack each argument of the kernel; None: as the layer says
    packing: list[dict[str, Any] | None] | None = None
    noisy: bool = False  #: true if the device was not quiet while the best was measured


def tuned_record(params: str, seconds: float, target: str) -> TunedRecord:
    """The record of a trial whose params are a whole TVM record, or a trace alone, as JSON text;
    raises BadInput.

    `target` is the session's target as JSON text or a plain string; it completes a trace.
    """
    value = _json(params, "the params")
    if isinstance(value, dict) and "trace" in value:
        value = value["trace"]
    if isinstance(value, list) and len(value) == 2:
        value = [value, None, _target(target), []]
    if not isinstance(value, list) or len(value) != 4:
        raise BadInput("the params are not a TVM record")
    return TunedRecord(_compact([value[0], None, value[2], value[3]]), seconds)


def workload_text(data: bytes) -> str:
    """The workload of an artifact; raises BadInput."""
    try:
        value = _json(data.decode(), "the workload")
    except UnicodeDecodeError:
        raise BadInput("the workload cannot be read as JSON") from None
    pair = isinstance(value, list) and len(value) == 2
    if not pair or not all(isinstance(part, str) for part in value):
        raise BadInput("the workload is not a TVM workload")
    return _compact(value)


def _target(target: str) -> Any:
    try:
        return json.loads(target)
    except (ValueError, RecursionError):
        return target


def write(directory: Path, environment: str, layers: Iterable[TunedLayer]) -> int:
    """Write the three files into the directory; returns the number of records. Equal workloads are
    written once."""
    index_of: dict[str, int] = {}
    count = 0
    with (
        open(directory / WORKLOADS, "w", encoding="utf-8", newline="\n") as workloads,
        open(directory / RECORDS, "w", encoding="utf-8", newline="\n") as records,
        open(directory / LAYERS, "w", encoding="utf-8", newline="\n") as listing,
    ):
        listing.write(
            f'{{"version": {VERSION}, "environment": {json.dumps(environment)}, "layers": ['
        )
        separator = "\n"
        for layer in layers:
            if layer.workload not in index_of:
                index_of[layer.workload] = len(index_of)
                workloads.write(f"{layer.workload}\n")
            index = index_of[layer.workload]
            for record in layer.records:
                trace, _, target, arguments = json.loads(record.schedule)
                records.write(
                    f"{_compact([index, [trace, [record.seconds], target, arguments]])}\n"
                )
            lines = list(range(count, count + len(layer.records)))
            count += len(lines)
            listing.write(separator + json.dumps(_listed(layer, index, lines)))
            separator = ",\n"
        listing.write("\n]}\n")
    return count


def _listed(layer: TunedLayer, index: int, lines: list[int]) -> dict[str, Any]:
    return {
        "key": layer.key,
        "driver": layer.driver,
        "solver": layer.solver,
        "time_ms": layer.records[0].seconds * 1000,
        "workload": index,
        "records": lines,
        **({"packing": layer.packing} if layer.packing else {}),
        **({"noisy": True} if layer.noisy else {}),
    }


def read(directory: Path) -> Iterator[TunedLayer]:
    """The layers of an exported database; raises BadInput if a file is missing or does not fit the
    others."""
    workloads = _lines(directory / WORKLOADS)
    records = [_json(line, RECORDS) for line in _lines(directory / RECORDS)]
    listing = _json("".join(_lines(directory / LAYERS)), LAYERS)
    if not isinstance(listing, dict) or listing.get("version") != VERSION:
        raise BadInput(f"{directory / LAYERS} is not of version {VERSION}.")
    try:
        for item in listing["layers"]:
            tuned = tuple(_record(records[line], item["workload"]) for line in item["records"])
            workload, packing = workloads[item["workload"]], item.get("packing")
            noisy = bool(item.get("noisy", False))
            names = (item["key"], item["driver"], item["solver"])
            yield TunedLayer(*names, workload, tuned, packing, noisy)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadInput(
            f"{directory} is damaged: its files do not fit each other ({error})."
        ) from error


def _record(line: Any, workload: int) -> TunedRecord:
    index, (trace, (seconds,), target, arguments) = line
    if index != workload:
        raise ValueError("a record of another workload")
    return TunedRecord(_compact([trace, None, target, arguments]), seconds)


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > LIMIT_BYTES:
            raise BadInput(f"{path} has more than {LIMIT_BYTES} bytes.")
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}.") from error


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{what} cannot be read as JSON") from None


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


#: Notes on who can use a record: TVM finds it by the function, which an imported model has or not
_FUNCTIONS = (
    "functions of models, which TVM's MetaScheduleApplyDatabase finds in the imported model"
)
_OWN_KERNELS = (
    "kernels of Tuna's own: `tuna model build` puts them into a model, and layers.json says how"
    " they want their weights"
)


class TvmOptions(ExportOptions):
    """How to write a TVM database, which is a directory."""

    top: int = Field(4, ge=1, description="records kept for a layer and solver")


class _Row(NamedTuple):
    driver: str
    time_ms: float | None
    solver_id: int
    job_id: int | None
    trial_number: int | None
    workload: str | None
    params: str
    config_key: str
    noisy: bool


class _Winner(NamedTuple):
    """A result as a TVM database takes it, sorted by its first three fields."""

    driver: str
    time_ms: float
    solver: str
    job_id: int
    trial_number: int
    workload: str
    params: str
    config_key: str
    noisy: bool


class TvmDatabaseExporter(Exporter[TvmOptions]):
    """A directory that TVM's `JSONDatabase` loads."""

    form = "tvm"
    title = "TVM database"
    endings = (".tvm",)
    is_directory = True
    timed = True
    options = TvmOptions

    def accepts(self, source: ResultSource) -> None:
        """Refuse a source with several environments: TVM ignores a record's target."""
        if source.library != "tvm" or not source.environment_key:
            raise BadInput(
                f"{source.title} is for {source.library}: only a tvm session has a TVM database."
            )

    def write(
        self, path: Path, source: ResultSource, options: TvmOptions, tally: ExportTally
    ) -> int:
        """Write the layers by driver command, time, solver."""
        return write(path, source.environment_key, _layers(source, options.top, tally))

    def recognises(self, path: Path, head: bytes) -> bool:
        """A directory with TVM's two files."""
        return all((path / name).is_file() for name in (WORKLOADS, RECORDS))

    def entries(self, path: Path) -> Iterator[Entry]:
        """The best record of each layer and solver: time, schedule, workload."""
        for layer in read(path):
            best = layer.records[0]
            facts = (best.seconds * 1000, best.schedule, layer.workload)
            yield Entry(layer.driver, layer.solver, facts)

    def imported(self, path: Path) -> Iterator[ImportedResult]:
        """Every record; the layers are those of the listing, where there is one."""
        workloads = [_workload(line) for line in _lines(path / WORKLOADS)]
        listed = read(path) if (path / LAYERS).is_file() else ()
        layers = {workload_text(layer.workload.encode()): layer for layer in listed}
        for number, line in enumerate(_lines(path / RECORDS), 1):
            try:
                index, (trace, seconds, target, arguments) = json.loads(line)
                workload = workloads[index]
                time_ms = 1000 * math.fsum(seconds) / len(seconds) if seconds else 0.0
                name = _target_name(target)
            except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
                where = f"{path / RECORDS}:{number}"
                raise BadInput(f"{where} is not a TVM record: {error}.") from error
            layer = layers.get(workload)
            yield ImportedResult(
                config=layer.driver if layer else "",
                kind=read_one(layer.driver).kind if layer else "",
                solver=layer.solver if layer else "",
                algorithm="",
                family="",
                workspace_bytes=0,
                simulated=False,
                params=_compact([trace, None, target, arguments]),
                time_ms=time_ms,
                config_key=layer.key if layer else "",
                target=name,
                workload=workload,
            )

    def target_name(self, target: str) -> str:
        """Return the target in the words of older releases, without what TVM adds to it."""
        return _target_name(toolchain.parse(target))


#: Attributes of a target that choose the code; TVM adds others to a record's
_CHOSEN = ("kind", "arch", "mattr", "mcpu", "num-cores")


def _target_name(target: Mapping[str, Any]) -> str:
    """One text for equal targets: the CPU is this machine's where a target does not say."""
    chosen = {name: target[name] for name in _CHOSEN if name in target}
    if chosen.get("kind") == "llvm":
        chosen["mtriple"] = toolchain.architecture(target)
    return toolchain.to_words(chosen)


def _workload(line: str) -> str:
    return workload_text(line.encode())


def _layers(source: ResultSource, top: int, tally: ExportTally) -> Iterator[TunedLayer]:
    """Layers that somebody can use. How a family's kernel wants its tensors may have changed since
    another version of the kernels."""
    stale = not source.toolchain.endswith(f"-kernels-{kernels.VERSION}")
    ordered = sort_rows(_winners(source, tally), width=len(_Winner._fields), by=3)
    for driver, group in groupby(ordered, key=itemgetter(0)):
        written, notes = False, set()
        for entry in map(_Winner._make, group):
            row = BY_NAME.get(entry.solver)
            family = row.family if row is not None else ""
            if family and stale:
                tally.skipped["it is of another version of Tuna's kernels; tune it again"] += 1
                continue
            if not entry.workload:
                tally.skipped["its workload was not kept"] += 1
                continue
            try:
                workload = workload_text(source.blob(entry.workload))
                records = _records(source, top, entry)
                packing = _packing(driver, family, records[0])
            except BadInput as error:
                tally.skipped[str(error)] += 1
                continue
            written = True
            if family or row is FUNCTION:
                notes.add(_OWN_KERNELS if family else _FUNCTIONS)
            key, solver, noisy = entry.config_key, entry.solver, bool(entry.noisy)
            yield TunedLayer(key, driver, solver, workload, records, packing, noisy)
        tally.configs += written
        tally.notes.update(notes)


def _packing(driver: str, family: str, record: TunedRecord) -> list[dict[str, Any] | None] | None:
    """Return the packing of the kernel's tensors; None for a solver that takes the layer's own."""
    if not family:
        return None
    return packing_for(read_one(driver), family, json.loads(record.schedule)[3])


def _winners(source: ResultSource, tally: ExportTally) -> Iterator[tuple[Any, ...]]:
    for row in source.results(_Row):
        if is_time(row.time_ms):
            solver = source.solvers[row.solver_id].name
            yield row.driver, row.time_ms, solver, *row[3:]
        else:
            tally.skipped[NO_TIME] += 1


def _records(source: ResultSource, top: int, winner: _Winner) -> tuple[TunedRecord, ...]:
    """The checked winner, then what was slower. Whatever seemed faster lost when it was measured
    again."""
    records = [tuned_record(winner.params, winner.time_ms / 1000, source.target)]
    for _, time_ms, params in source.good_trials(winner.job_id, winner.time_ms, top):
        if params != winner.params and len(records) < top:
            with contextlib.suppress(BadInput):
                records.append(tuned_record(params, time_ms / 1000, source.target))
    return tuple(records)
