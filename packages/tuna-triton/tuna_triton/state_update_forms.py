"""State updates of Mamba models: times that programs report, and vLLM's folder of tiles.

Tuna cannot measure this kernel, for it overwrites its state. A file of times has lines of JSON, the
first of which says what they are:

    {"format": "vllm-ssu-times", "device": "NVIDIA H100 80GB HBM3", "triton": "3.8.0"}
    {"headdim": 64, "dstate": 128, "cache_dtype": "float16", "effective_batch": 512,
     "BLOCK_SIZE_M": 4, "num_warps": 1, "time_ms": 0.0131}
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tuna.errors import BadInput
from tuna.exports.tuning_file import ReportedExporter, ReportedOptions, TuningFile, TuningRows
from tuna.libraries.exporter import Check, Entry, ExportTally
from tuna.libraries.results import NO_TIME, ReportedTime, ResultSource, is_time
from tuna_triton.exporters import check_folders
from tuna_triton.state_updates import DTYPES, TILE, StateFileName, parse_state_name, read_states

_FORMAT = "vllm-ssu-times"
_SOURCE = "vllm-ssu"
_SIZES = ("headdim", "dstate", "effective_batch")


class StateUpdateTimes(TuningFile):
    """Times of state updates that a program measured, as lines of JSON."""

    form, title = "vllm-ssu-times", "file of times of state updates"
    endings = (".vllm-ssu-times.jsonl",)
    layers = None
    source = _SOURCE

    def recognises(self, path: Path, head: bytes) -> bool:
        """By its first line."""
        return re.match(rb'\s*\{\s*"format":\s*"vllm-ssu-times"', head) is not None

    def read_lines(self, lines: Iterable[tuple[int, str]], found: TuningRows) -> None:
        """The first line is about all others."""
        facts: dict[str, str] = {}
        for number, line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                found.bad["it is not JSON"].append(number)
            elif row.get("format") == _FORMAT:
                if facts:
                    raise BadInput(f"Line {number} begins another file.", hint="take them apart")
                facts = {name: str(value) for name, value in row.items() if name != "format"}
            elif why := _row_fault(row):
                found.bad[why].append(number)
            else:
                found.rows.append(_report(row, facts))

    def write_rows(
        self, path: Path, rows: Iterable[ReportedTime], versions: Mapping[str, str]
    ) -> None:
        """Write a line for each state update."""
        lines: list[dict[str, Any]] = [{"format": _FORMAT, **versions}]
        for row in rows:
            lines.append(
                {
                    **json.loads(row.subject),
                    **json.loads(row.implementation),
                    "time_ms": row.time_ms,
                }
            )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _row_fault(row: Mapping[str, Any]) -> str:
    whole = all(type(row.get(name)) is int and row[name] > 0 for name in (*_SIZES, *TILE))
    if not whole or row.get("cache_dtype") not in (*DTYPES, "bfloat16"):
        return "it is not a state update with its tile"
    time_ms = row.get("time_ms")
    if not isinstance(time_ms, int | float) or not is_time(float(time_ms)):
        return NO_TIME
    return ""


def _report(row: Mapping[str, Any], facts: Mapping[str, str]) -> ReportedTime:
    # as the reader does: the kernel only sees how wide the state is
    dtype = "float16" if row["cache_dtype"] == "bfloat16" else row["cache_dtype"]
    subject = {**{name: row[name] for name in _SIZES}, "cache_dtype": dtype}
    tile = {name: row[name] for name in TILE}
    return ReportedTime(
        _SOURCE,
        json.dumps(subject, sort_keys=True),
        json.dumps(tile),
        float(row["time_ms"]),
        device=facts.get("device", ""),
        versions=facts,
    )


class StateUpdateFolder(ReportedExporter):
    """Files for the folder that VLLM_TUNED_CONFIG_FOLDER names, beside those of experts."""

    form, title = "vllm-ssu", "folder of vLLM's state updates"
    endings = (".vllm-ssu",)
    is_directory = True
    source = _SOURCE

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether files of state updates lie in the folder itself."""
        return any(parse_state_name(one.name) for one in path.glob("headdim=*.json"))

    def write(
        self, path: Path, source: ResultSource, options: ReportedOptions, tally: ExportTally
    ) -> int:
        """The fastest tile of each batch, by batch; all ranks read the same files."""
        files: dict[StateFileName, dict[int, Any]] = defaultdict(dict)
        device = source.reports[0].device
        if not device:
            raise BadInput("The times name no device.", hint="give it with `import-db --arch`")
        versions = source.reports[0].versions or {}
        for row in source.reports:
            sizes = json.loads(row.subject)
            place = re.sub(r"[\s/]+", "_", device)
            name = StateFileName(sizes["headdim"], sizes["dstate"], place, sizes["cache_dtype"])
            files[name][sizes["effective_batch"]] = json.loads(row.implementation)
        for name, tiles in files.items():
            content = {"triton_version": versions.get("triton", "")}
            content |= {str(batch): tiles[batch] for batch in sorted(tiles)}
            (path / name.text).write_text(json.dumps(content, indent=4) + "\n")
        tally.configs = len(files)
        return sum(map(len, files.values()))

    def entries(self, path: Path) -> Iterator[Entry]:
        """Each key of each file."""
        for file in sorted(path.glob("*.json")):
            if parse_state_name(file.name) is not None:
                for batch, tile in sorted(read_states(file)[1].items()):
                    value = json.dumps(tile, sort_keys=True)
                    yield Entry(f"{file.name} {batch}", self.form, (value,))

    def checker(self) -> Check:
        """That of all folders of tiles."""
        return check_folders
