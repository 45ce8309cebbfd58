"""Input and result of a check of database files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuna.libraries.results import KernelOf

#: By key and solver the kernels of a result, one list for each session that measured it.
KernelsByResult = Mapping[tuple[str, str], Sequence[Sequence[KernelOf]]]


@dataclass(frozen=True)
class Known:
    """Facts from the installation that files lack."""

    #: whether each solver is tunable; None: unknown, and its rules are left out
    solvers: Mapping[str, bool] | None
    #: The kernels that sessions recorded for these keys on an architecture and number of compute
    #: units, None for any.
    kernels_of: Callable[[str, int | None, Sequence[str]], KernelsByResult]


@dataclass(frozen=True)
class Fault:
    """A rule that a database breaks."""

    file: Path
    #: damaged, duplicate, or one of the format's own; MIOpen's: line, key, time, solver, perf-row,
    #: kernel, kernel-db
    rule: str
    text: str  #: what is wrong, and where


@dataclass
class Findings:
    """Result of a check."""

    files: list[Path]
    faults: list[Fault] = field(default_factory=list)
    entries: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  #: what could not be checked, by reason

    def fault(self, path: Path, rule: str, text: str) -> None:
        """Note that `path` breaks a rule."""
        self.faults.append(Fault(path, rule, text))
