"""The rules of MIOpen's own test of its databases (test/gtest/db_sync.cpp) that need neither a GPU
nor MIOpen."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from tuna.configs import problem_key
from tuna.configs.problem_key import PerfKey
from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.exporter import CheckFacts, Findings, base_name
from tuna.libraries.imported_records import FindItem, FindRecord
from tuna.libraries.miopen.formats import database_file, find_db, kernel_db, perf_db
from tuna.libraries.results import is_time

_BATCH = 500
#: Target features that MIOpen's own test forbids among the arguments of shipped kernels
_FORBIDDEN = ("sram-ecc", "xnack")


def check(files: Mapping[str, Sequence[Path]], known: CheckFacts, findings: Findings) -> None:
    """Check MIOpen's databases in a folder, given by form.

    - find db: every line reads, its key is what MIOpen would write for that problem, no key and no
      solver in a line comes twice, times are positive numbers, solvers are known
    - a tunable solver in a find db has its row in the perf db of the same name
    - the kernels of the fastest solver of each problem are in the kernel db of the same name, else
      of the architecture
    - perf db: no key and solver twice
    - kernel db: every blob unpacks to its size and MD5, no name and arguments come twice, the
      journal is not a WAL, and no arguments name target features

    A find db does not say which kernels it needs: `known.kernels_of` has those that sessions
    recorded.
    """
    _Check(known, findings).run(files)


class _Check:
    def __init__(self, known: CheckFacts, findings: Findings) -> None:
        self._known, self._findings, self._fault = known, findings, findings.fault
        #: keys and solvers in perf dbs, by the files' base names
        self._tuned: dict[str, set[tuple[str, str]]] = {}
        #: names and arguments in kernel dbs, by the files' base names
        self._code: dict[str, set[tuple[str, str]]] = {}

    def run(self, files: Mapping[str, Sequence[Path]]) -> None:
        steps = {"perf": self._perf, "kernel": self._kernels, "find": self._find}
        for form, step in steps.items():
            for path in files.get(form, ()):
                try:
                    step(path)
                except (BadInput, sqlite3.Error) as error:
                    self._fault(path, "damaged", str(error))

    def _perf(self, path: Path) -> None:
        there: set[tuple[str, str]] = set()
        before: PerfKey | None = None
        text = ""
        for record in perf_db.read(path):
            if record.key is not before:
                before, text = record.key, record.key.text()
            self._add(path, there, (text, record.solver))
        self._tuned.setdefault(_base(path), set()).update(there)

    def _kernels(self, path: Path) -> None:
        there: set[tuple[str, str]] = set()
        if not compressed.is_packed(path) and database_file.is_wal(path):
            self._fault(
                path, "kernel-db", "its journal is a write-ahead log: MIOpen opens it read-only"
            )
        for record in kernel_db.read(path):
            self._add(path, there, (record.name, record.args))
            for feature in _FORBIDDEN:
                if feature in record.args:
                    self._fault(
                        path,
                        "kernel-db",
                        f"the arguments of {record.name} name {feature}: {record.args}",
                    )
        self._code.setdefault(_base(path), set()).update(there)

    def _add(self, path: Path, there: set[tuple[str, str]], entry: tuple[str, str]) -> None:
        self._findings.entries += 1
        if entry in there:
            self._fault(path, "duplicate", " ".join(entry))
        there.add(entry)

    def _find(self, path: Path) -> None:
        seen: set[str] = set()
        lines = self._lines(path, seen)
        while batch := list(islice(lines, _BATCH)):
            self._winners(path, batch)

    def _lines(self, path: Path, seen: set[str]) -> Iterator[FindRecord]:
        """The records with a good key, each checked by itself."""
        for number, record in find_db.read_lines(path):
            if isinstance(record, BadInput):
                self._fault(path, "line", f"line {number}: {record}")
                continue
            self._findings.entries += len(record.items)
            if record.key in seen:
                self._fault(
                    path,
                    "duplicate",
                    f"line {number}: {record.key} has an earlier line, which counts",
                )
                continue
            seen.add(record.key)
            try:
                key = problem_key.parse(record.key)
                if key.text() != record.key:
                    raise BadInput(f"MIOpen writes {record.key} as {key.text()}")
            except BadInput as error:
                self._fault(path, "key", f"line {number}: {error}")
                continue
            self._items(path, number, record.items, key.perf().text())
            yield record

    def _items(self, path: Path, number: int, items: Collection[FindItem], perf: str) -> None:
        names = [item.solver for item in items]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self._fault(path, "duplicate", f"line {number}: {name} comes {names.count(name)} times")
        tuned, solvers = self._tuned.get(_base(path), set()), self._known.solvers
        for item in items:
            if not is_time(item.time_ms):
                self._fault(path, "time", f"line {number}: {item.solver} takes {item.time_ms} ms")
            if solvers is None:
                self._findings.left_out[
                    "items, whether their solver is known: no solvers are stored"
                ] += 1
            elif item.solver not in solvers:
                self._fault(
                    path, "solver", f"line {number}: {item.solver} is not a solver of the library"
                )
            elif solvers[item.solver] and (perf, item.solver) not in tuned:
                self._fault(
                    path,
                    "perf-row",
                    f"line {number}: {item.solver} is tunable, but no perf db has {perf}",
                )

    def _winners(self, path: Path, records: Iterable[FindRecord]) -> None:
        """The kernels of each fastest solver are there."""
        arch, num_cu = database_file.parse_name(path.name)
        winners = {
            record.key: min(record.items, key=lambda item: item.time_ms).solver
            for record in records
        }
        known = self._known.kernels_of(arch, num_cu, list(winners))
        names = (_base(path), base_name(arch, num_cu or 0), base_name(arch, 0))
        code = next((self._code[name] for name in names if name in self._code), set())
        for key, solver in winners.items():
            recorded = known.get((key, solver))
            needed = [
                [kernel_db.names_of(kernel, arch) for kernel in kernels]
                for kernels in recorded or ()
            ]
            if recorded is None:
                self._findings.left_out[
                    "problems, whether their kernels are there: no session recorded them"
                ] += 1
            elif not any(code.issuperset(kernels) for kernels in needed):
                missing = sorted(set(needed[-1]) - code)[0]
                self._fault(
                    path,
                    "kernel",
                    f"{key}: {solver} needs {' '.join(missing)}, which no kernel db has",
                )


def _base(path: Path) -> str:
    return path.name.partition(".")[0]
