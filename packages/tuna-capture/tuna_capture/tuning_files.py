"""Tuning files of other programs: PyTorch's TunableOp and hipBLASLt.

TunableOp's results (`aten/src/ATen/cuda/tunable/Tunable.cpp` of PyTorch 2.3 and later) are lines

    Validator,NAME,VALUE
    OPERATOR,PARAMS,SOLUTION,MILLISECONDS[,...]

PyTorch takes a file whose validators are exactly its own, and of rows with one operator and PARAMS
the first. A hipBLASLt tuning file, as `hipblaslt-bench` writes it (HIPBLASLT_TUNING_FILE) and the
library reads it (HIPBLASLT_TUNING_OVERRIDE_FILE), begins with `Git Version: COMMIT`; then each row
of values stands below a header (`UserDrivenTuningParser.cpp` of rocm-libraries, and the page on
offline tuning). Older releases have no headers but 37 columns in a fixed order. hipBLASLt takes a
file of its own commit, and compares the columns of `_COMPARED` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuna.errors import BadInput
from tuna.exports.tuning_file import TuningFile, TuningRows
from tuna.libraries.exporter import ExportTally
from tuna.libraries.results import NO_TIME, ReportedTime, is_time
from tuna_capture.blas_logs import HIPBLASLT, TUNABLEOP

_MAX_CHARS = 4000
_NUMBER = re.compile(r"[0-9.]{1,30}(e[+-]?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)


class _BadRow(Exception):
    """Raised for a row that is not a report, with the reason."""


class TunableOpExporter(TuningFile):
    """Results of PyTorch's TunableOp: `torch.cuda.tunable.read_file`."""

    form = "tunableop"
    title = "TunableOp file"
    endings = (".tunableop.csv",)
    layers = TUNABLEOP

    def recognises(self, path: Path, head: bytes) -> bool:
        """By its first line."""
        return re.match(rb"\s*(Validator,|[A-Za-z]*TunableOp_[^,\s]+,)", head) is not None

    def read_lines(self, lines: Iterable[tuple[int, str]], found: TuningRows) -> None:
        """The validators are those of the whole file."""
        versions: dict[str, str] = {}
        for number, line in lines:
            name, *rest = line.split(",", 4)
            if name != "Validator":
                try:
                    found.rows.append(_tunableop_row(line, name, rest))
                except _BadRow as why:
                    found.bad[str(why)].append(number)
            elif len(rest) < 2 or not _is_text(line):
                found.bad["its validator has no value"].append(number)
            elif versions.setdefault(rest[0], rest[1]) != rest[1]:
                raise BadInput(
                    f"Line {number} has another {rest[0]} than a line before: the file mixes"
                    " releases.",
                    hint="take the files apart",
                )
        device = versions.get("GCN_ARCH_NAME", "")
        found.rows = [replace(row, device=device, versions=versions) for row in found.rows]

    def write_rows(
        self, path: Path, rows: Iterable[ReportedTime], versions: Mapping[str, str]
    ) -> None:
        """Validators by name, then rows."""
        with open(path, "w", encoding="utf-8", newline="\n") as stream:
            for name, text in sorted(versions.items()):
                stream.write(f"Validator,{name},{text}\n")
            for row in rows:
                stream.write(f"{row.subject},{row.implementation},{row.time_ms!r}\n")


def _tunableop_row(line: str, operator: str, rest: Sequence[str]) -> ReportedTime:
    if not re.fullmatch(r"[A-Za-z]*TunableOp_\S+", operator) or not _is_text(line):
        raise _BadRow("it is not a row of TunableOp")
    if len(rest) < 3 or not rest[0] or not rest[1]:
        raise _BadRow("it has no solution and time")
    return ReportedTime("tunableop", f"{operator},{rest[0]}", rest[1], _time(rest[2]))


def _is_text(line: str) -> bool:
    return line.isprintable() and len(line) <= _MAX_CHARS


def _time(text: str, in_one_ms: int = 1) -> float:
    """The number, in milliseconds."""
    try:
        time_ms = float(text) / in_one_ms if _NUMBER.fullmatch(text.strip()) else 0.0
    except ValueError:
        time_ms = 0.0
    if not is_time(time_ms):
        raise _BadRow(NO_TIME)
    return time_ms


_COMPARED = (
    *("transA", "transB", "batch_count", "m", "n", "k"),
    *("a_type", "b_type", "c_type", "compute_type"),
)
#: Columns of a problem in releases without headers, in their order; later releases have `aux_type`
#: behind `bias_type`
_PROBLEM = (
    *("transA", "transB", "grouped_gemm", "batch_count", "m", "n", "k", "alpha", "lda"),
    *("stride_a", "beta", "ldb", "stride_b", "ldc", "stride_c", "ldd", "stride_d", "a_type"),
    *("b_type", "c_type", "d_type", "compute_type", "scaleA", "scaleB", "scaleC", "scaleD"),
    *("amaxD", "activation_type", "bias_vector", "bias_type"),
)
_MEASURED = ("rotating_buffer", "hipblaslt-Gflops", "hipblaslt-GB/s", "us")
_DEVICE = ("gcnArchName", "CUs")
_KERNEL = ("kernel_name", "solution_name")
_OLD_HEADER = (*_PROBLEM, *_MEASURED, "solution_index", *_DEVICE)
#: Columns that are not part of the problem
_BESIDE = {
    *(*_MEASURED, *_DEVICE, *_KERNEL, "solution_index", "CPU-Gflops", "CPU-us", "norm_error"),
    *("atol", "rtol"),
}
_GIT = "Git Version"


class HipblasltExporter(TuningFile):
    """A file for HIPBLASLT_TUNING_OVERRIDE_FILE."""

    form = "hipblaslt"
    title = "hipBLASLt tuning file"
    endings = (".hipblaslt.txt",)
    layers = HIPBLASLT

    def recognises(self, path: Path, head: bytes) -> bool:
        """By its first line."""
        return re.match(rb"\s*(Git Version: |transA,transB,)", head) is not None

    def read_lines(self, lines: Iterable[tuple[int, str]], found: TuningRows) -> None:
        """Rows under each header have its columns."""
        header: Sequence[str] = _OLD_HEADER
        commit: dict[str, str] = {}
        for number, text in lines:
            line = text.strip()
            if line.startswith(f"{_GIT}:"):
                name = line.partition(":")[2].strip()[:_MAX_CHARS]
                if commit.setdefault(_GIT, name) != name:
                    raise BadInput(
                        f"Line {number} has another {_GIT} than a line before: the file mixes"
                        " releases.",
                        hint="take the files apart",
                    )
            elif line.startswith("transA,"):
                header = line.split(",")
            else:
                try:
                    found.rows.append(_hipblaslt_row(line, header, commit))
                except _BadRow as why:
                    found.bad[str(why)].append(number)

    def written(self, rows: Sequence[ReportedTime], tally: ExportTally) -> Sequence[ReportedTime]:
        """The first of those that hipBLASLt cannot tell apart."""
        kept: dict[tuple[str | None, ...], ReportedTime] = {}
        for row in rows:
            columns = _columns(row.subject)
            if kept.setdefault(tuple(map(columns.get, _COMPARED)), row) is not row:
                tally.skipped["hipBLASLt takes its layer for one that is written"] += 1
        return list(kept.values())

    def write_rows(
        self, path: Path, rows: Iterable[ReportedTime], versions: Mapping[str, str]
    ) -> None:
        """Write a header for each row, with columns where releases without headers have them."""
        with open(path, "w", encoding="utf-8", newline="\n") as stream:
            if _GIT in versions:
                stream.write(f"{_GIT}: {versions[_GIT]}\n")
            for row in rows:
                columns = _columns(row.subject)
                first = columns
                if columns.keys() <= {*_PROBLEM, "aux_type"}:
                    aux = ["aux_type"] if "aux_type" in columns else []
                    first = {name: columns.get(name, "0") for name in (*_PROBLEM, *aux)}
                index, *names = row.implementation.split()
                all_columns = {
                    **first,
                    **dict.fromkeys(_MEASURED, ""),
                    "us": f"{(row.time_ms or 0.0) * 1000:.9g}",
                    "solution_index": index,
                    **dict(zip(names[::2], names[1::2], strict=True)),
                    **{name: versions[name] for name in _DEVICE if name in versions},
                }
                stream.write(f"    {','.join(all_columns)}\n    {','.join(all_columns.values())}\n")


def _hipblaslt_row(line: str, header: Sequence[str], commit: Mapping[str, str]) -> ReportedTime:
    values = line.split(",")
    if len(values) == len(_OLD_HEADER) + 1 and header is _OLD_HEADER:
        header = (*_PROBLEM, "aux_type", *_OLD_HEADER[len(_PROBLEM) :])
    if len(values) != len(header) or len({*header}) != len(header):
        raise _BadRow("it does not have the columns of its header")
    if not _is_text(line) or any(re.search(r"\s", word) for word in (*header, *values)):
        raise _BadRow("it is not a row of hipBLASLt")
    columns = {name: value for name, value in zip(header, values, strict=True) if value}
    index = columns.get("solution_index", "")
    lacking = [name for name in (*_COMPARED, "us") if name not in columns]
    if lacking or not re.fullmatch("[0-9]{1,10}", index, re.ASCII):
        raise _BadRow(f"it has no {(*lacking, 'solution_index')[0]}")
    problem = [
        f"{'-' if name in ('m', 'n', 'k') else '--'}{name} {value}"
        for name, value in columns.items()
        if name not in _BESIDE and (name, value) != ("grouped_gemm", "0")
    ]
    kernel = [f"{name} {columns[name]}" for name in _KERNEL if name in columns]
    return ReportedTime(
        "hipblaslt",
        " ".join(["hipblaslt-bench", *problem]),
        " ".join([index, *kernel]),
        _time(columns["us"], 1000),
        device=columns.get("gcnArchName", ""),
        versions={**commit, **{name: columns[name] for name in _DEVICE if name in columns}},
    )


def _columns(subject: str) -> dict[str, str]:
    """The columns of a problem, from the command that names it."""
    words = subject.split()[1:]
    return {name.lstrip("-"): value for name, value in zip(words[::2], words[1::2], strict=True)}
