"""Winners of FlashInfer's autotuner, which programs report: its file, and its store of one entry
for each operation.

The file is that of `AutoTuner.save_configs` (version 1, which vLLM uses for several ranks):

    {"_metadata": {NAME: VERSION}, KEY: [RUNNER, TACTIC, POLICY, {"time_ms": ...}], "_generation": }

The store is that of `autotune_v2` (FlashInfer 0.7.4 and 0.7.2, `autotune_cache.py`):

    v2/<16 hex digits>/manifest.json      versions; the digits are of the SHA-256 of it
    v2/<16 hex digits>/entries/<24>.json  an entry; the digits are of the SHA-256 of its key

A tactic is a number or tuple that its runner alone understands, so no result of Tuna's can be one.
Entries of a store have no times, so they cannot be imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tuna.errors import BadInput
from tuna.exports.tuning_file import ReportedExporter, ReportedOptions, TuningFile, TuningRows
from tuna.libraries.exporter import Check, Entry, ExportTally
from tuna.libraries.results import NO_TIME, ReportedTime, ResultSource, is_time
from tuna_triton.flashinfer_check import check_winners
from tuna_triton.flashinfer_keys import (
    GENERATION,
    METADATA,
    RECORDS,
    SCHEMA,
    OperationKey,
    canonical,
    content_of,
    entry_name,
    environment_hash,
    parse_key,
)

_SOURCE = "flashinfer"


def _winners(
    rows: Iterable[ReportedTime], tally: ExportTally | None = None
) -> Iterator[tuple[str, str, Any, Any, float]]:
    """Key, runner, tactic, policy and time of each report, by key; of two policies the first."""
    found: dict[str, tuple[str, str, Any, Any, float]] = {}
    for row in rows:
        op, profile, extras, policy = json.loads(row.subject)
        runner, tactic = json.loads(row.implementation)
        key = OperationKey(op, runner, profile, extras).text
        winner = key, runner, tactic, policy, row.time_ms or 0.0
        if found.setdefault(key, winner) is not winner and tally is not None:
            tally.skipped["measured under another policy than what is written"] += 1
    yield from (found[key] for key in sorted(found))


class FlashInferFile(TuningFile):
    """A file for `flashinfer.autotune(cache=...)` and `AutoTuner.load_configs`."""

    form, title = "flashinfer-json", "file of FlashInfer's autotuner"
    endings = (".flashinfer.json", "autotune_configs.json")  #: the latter as vLLM has it
    layers = None
    source = _SOURCE

    def recognises(self, path: Path, head: bytes) -> bool:
        """By its first member."""
        return re.match(rb'\s*\{\s*"_metadata"\s*:', head) is not None

    def read_lines(self, lines: Iterable[tuple[int, str]], found: TuningRows) -> None:
        """Number entries from 1, for the file has no lines of its own."""
        content = content_of("\n".join(line for _, line in lines))
        versions = {name: str(text) for name, text in content.get(METADATA, {}).items()}
        entries = {key: value for key, value in content.items() if not key.startswith("_")}
        for number, (key, value) in enumerate(entries.items(), 1):
            parts = parse_key(key)
            listed = value if isinstance(value, list) else []
            runner, tactic, policy, selection = (*listed, *[None] * 4)[:4]
            time_ms = selection.get("time_ms") if isinstance(selection, dict) else None
            if parts is None or runner != parts.runner:
                found.bad["it is not an entry of FlashInfer's"].append(number)
            elif time_ms is None:
                found.bad["it has no time"].append(number)
            elif not isinstance(time_ms, int | float) or not is_time(float(time_ms)):
                found.bad[NO_TIME].append(number)
            else:
                subject = canonical([parts.op, parts.profile, parts.extras, policy])
                solution = canonical([runner, tactic])
                device = versions.get("gpu", "")
                found.rows.append(
                    ReportedTime(
                        _SOURCE, subject, solution, float(time_ms), device=device, versions=versions
                    )
                )
        if records := len(content.get(RECORDS, {})):
            found.bad["records of an operation's own tuning"] += [0] * records

    def write_rows(
        self, path: Path, rows: Iterable[ReportedTime], versions: Mapping[str, str]
    ) -> None:
        """Write as `save_configs` does: by key, the hash of it all last."""
        content: dict[str, Any] = {METADATA: dict(versions)}
        for key, runner, tactic, policy, time_ms in _winners(rows):
            content[key] = [runner, tactic, policy, {"time_ms": time_ms}]
        content[GENERATION] = hashlib.sha256(canonical(content).encode()).hexdigest()
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")

    def checker(self) -> Check:
        """One check for file and store."""
        return check_winners


class FlashInferStore(ReportedExporter):
    """A folder for FLASHINFER_AUTOTUNE_CACHE_DIR and VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR."""

    form, title = "flashinfer", "store of FlashInfer's autotuner"
    endings = (".flashinfer",)
    is_directory = True
    source = _SOURCE

    def recognises(self, path: Path, head: bytes) -> bool:
        """By the folders of a version."""
        return any(path.glob(f"{SCHEMA}/*/manifest.json")) or any(path.glob(f"{SCHEMA}/*/entries"))

    def write(
        self, path: Path, source: ResultSource, options: ReportedOptions, tally: ExportTally
    ) -> int:
        """One entry for each operation, which all ranks read."""
        rows = source.reports
        manifest = {**(rows[0].versions or {}), "cache_schema": SCHEMA}
        folder = path / SCHEMA / environment_hash(manifest)
        (folder / "entries").mkdir(parents=True)
        _write(folder / "manifest.json", manifest)
        for key, runner, tactic, policy, _ in _winners(rows, tally):
            entry = {"key": key, "runner": runner, "tactic": tactic}
            entry |= {"profiling_policy": policy} if policy is not None else {}
            parts = parse_key(key)
            fields = parts.fields() if parts is not None else None
            entry |= {"key_fields": fields} if fields is not None else {}
            _write(folder / "entries" / entry_name(key), entry)
            tally.configs += 1
        return tally.configs

    def entries(self, path: Path) -> Iterator[Entry]:
        """Runner and tactic of each key, with the environment."""
        for file in sorted(path.glob(f"{SCHEMA}/*/entries/*.json")):
            entry = content_of(file.read_text(encoding="utf-8"))
            try:
                value = canonical([entry["tactic"], entry.get("profiling_policy")])
                key = f"{file.parents[1].name} {entry['key']}"
                yield Entry(key, str(entry["runner"]), (value,))
            except KeyError as error:
                raise BadInput(f"{file} has no {error}.") from None

    def checker(self) -> Check:
        """One check for file and store."""
        return check_winners


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True), encoding="utf-8")
