"""The rules of MIOpen's own test of its databases (test/gtest/db_sync.cpp) that need neither a GPU nor MIOpen."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tuna.errors import BadInput
from tuna.exports import compressed, find_db, kernel_db, naming, sqlite_file
from tuna.exports.database_file import ENDS, Kind, kind_of, read_perf
from tuna.exports.find_db import FindItem, FindRecord
from tuna.exports.select import is_time
from tuna.libraries.miopen import problem_key
from tuna.libraries.miopen.problem_key import PerfKey

#: By key and solver the names and arguments of kernels, one list for each session that measured it.
Kernels = Mapping[tuple[str, str], Sequence[Sequence[tuple[str, str]]]]
#: Gives the kernels of these keys for an architecture and number of compute units; see `select.kernels_of`.
KernelsOf = Callable[[str, int | None, Sequence[str]], Kernels]
_BATCH = 500
_ENDS = tuple(end for ends in ENDS.values() for end in ends)
#: Target features that MIOpen's own test forbids among the arguments of shipped kernels.
_FORBIDDEN = ("sram-ecc", "xnack")


@dataclass(frozen=True)
class Fault:
    """A rule that a database breaks."""

    file: Path
    rule: str  #: damaged, line, key, duplicate, time, solver, perf-row, kernel or kernel-db
    text: str  #: what is wrong, and where


@dataclass
class Findings:
    """What a check went through and found."""

    files: list[Path]
    faults: list[Fault] = field(default_factory=list)
    entries: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  #: what could not be checked, by why


def check(directory: Path, solvers: Mapping[str, bool] | None, kernels_of: KernelsOf) -> Findings:
    """Check all databases in a folder.

    - find db: every line reads, its key is what MIOpen would write for that problem, no key and no solver in a line
      comes twice, times are positive numbers, solvers are known
    - a tunable solver in a find db has its row in the perf db of the same name
    - the kernels of the fastest solver of each problem are in the kernel db of the same name, else of the architecture
    - perf db: no key and solver twice
    - kernel db: every blob unpacks to its size and MD5, no name and arguments come twice, the journal is no WAL, and no
      arguments name target features

    `solvers` says of each known solver whether it is tunable; without it the rules on solvers are left out. A find db
    does not say which kernels it needs: `kernels_of` tells what sessions recorded. Raises BadInput if the folder has no
    database.
    """
    files = sorted(path for path in directory.iterdir() if compressed.plain_name(path).endswith(_ENDS))
    if not files:
        raise BadInput(f"{directory} holds no database.", hint=f"their names end in {', '.join(_ENDS)}, or so and .bz2")
    return _Check(solvers, kernels_of, Findings(files)).run()


class _Check:
    def __init__(self, solvers: Mapping[str, bool] | None, kernels_of: KernelsOf, findings: Findings) -> None:
        self._solvers, self._kernels_of, self._findings = solvers, kernels_of, findings
        self._tuned: dict[str, set[tuple[str, str]]] = {}  #: what perf dbs hold, by the files' base names
        self._code: dict[str, set[tuple[str, str]]] = {}  #: what kernel dbs hold

    def run(self) -> Findings:
        kinds: dict[Kind, list[Path]] = {kind: [] for kind in Kind}
        for path in self._findings.files:
            try:
                kinds[kind_of(path)].append(path)
            except BadInput as error:
                self._fault(path, "damaged", str(error))
        steps = {Kind.PERF: self._perf, Kind.KERNEL: self._kernels, Kind.FIND: self._find}
        for kind, step in steps.items():
            for path in kinds[kind]:
                try:
                    step(path)
                except (BadInput, sqlite3.Error) as error:
                    self._fault(path, "damaged", str(error))
        return self._findings

    def _fault(self, path: Path, rule: str, text: str) -> None:
        self._findings.faults.append(Fault(path, rule, text))

    def _perf(self, path: Path) -> None:
        there: set[tuple[str, str]] = set()
        before: PerfKey | None = None
        text = ""
        for record in read_perf(path):
            if record.key is not before:
                before, text = record.key, record.key.text()
            self._add(path, there, (text, record.solver))
        self._tuned.setdefault(_base(path), set()).update(there)

    def _kernels(self, path: Path) -> None:
        there: set[tuple[str, str]] = set()
        if not compressed.is_packed(path) and sqlite_file.is_wal(path):
            self._fault(path, "kernel-db", "its journal is a write-ahead log: MIOpen opens it read-only")
        for record in kernel_db.read(path):
            self._add(path, there, (record.name, record.args))
            for feature in _FORBIDDEN:
                if feature in record.args:
                    self._fault(path, "kernel-db", f"the arguments of {record.name} name {feature}: {record.args}")
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
                self._fault(path, "duplicate", f"line {number}: {record.key} has an earlier line, which counts")
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
        tuned = self._tuned.get(_base(path), set())
        for item in items:
            if not is_time(item.time_ms):
                self._fault(path, "time", f"line {number}: {item.solver} takes {item.time_ms} ms")
            if self._solvers is None:
                self._findings.left_out["items, whether their solver is known: no solvers are stored"] += 1
            elif item.solver not in self._solvers:
                self._fault(path, "solver", f"line {number}: {item.solver} is no solver of the library")
            elif self._solvers[item.solver] and (perf, item.solver) not in tuned:
                self._fault(path, "perf-row", f"line {number}: {item.solver} is tunable, but no perf db has {perf}")

    def _winners(self, path: Path, records: Iterable[FindRecord]) -> None:
        """The kernels of each fastest solver are there."""
        arch, num_cu = naming.parse_name(path.name)
        winners = {record.key: min(record.items, key=lambda item: item.time_ms).solver for record in records}
        known = self._kernels_of(arch, num_cu, list(winners))
        there = self._code.get(_base(path), self._code.get(naming.base_name(arch, 0), set()))
        for key, solver in winners.items():
            needed = known.get((key, solver))
            if needed is None:
                self._findings.left_out["problems, whether their kernels are there: no session recorded them"] += 1
            elif not any(there.issuperset(kernels) for kernels in needed):
                missing = sorted(set(needed[-1]) - there)[0]
                self._fault(path, "kernel", f"{key}: {solver} needs {' '.join(missing)}, which no kernel db has")


def _base(path: Path) -> str:
    return path.name.partition(".")[0]
