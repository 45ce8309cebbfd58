"""An export under way: what is wanted of whose results, and the file they go into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.errors import BadInput, NotFound
from tuna.exports import naming, select
from tuna.exports.select import SolverFacts, Source


class Form(str, Enum):
    """What can be exported."""

    FIND = "find"  #: times, workspaces and algorithms, as text
    PERF = "perf"  #: params of the tunable solvers, in SQLite or as text
    KERNEL = "kernel"  #: compiled code of the fastest solvers, in SQLite
    TVM = "tvm"  #: TVM's own tuning database, a directory

    __str__ = str.__str__


_TITLES = {Form.FIND: "find db", Form.PERF: "perf db", Form.KERNEL: "kernel db", Form.TVM: "TVM database"}


@dataclass(frozen=True)
class Options:
    """How to export; see `export`."""

    form: Form
    filename: str | None
    tag: str | None
    top: int
    text: bool
    packed: bool
    opencl: bool

    def __post_init__(self) -> None:
        if self.top < 1:
            raise BadInput(f"at least one entry for each config has to be kept, not {self.top}.")
        for wanted, form, what in ((self.text, Form.PERF, "text form"), (self.opencl, Form.FIND, "form for OpenCL")):
            if wanted and self.form is not form:
                raise BadInput(f"Only a {_TITLES[form]} has a {what}, a {_TITLES[self.form]} has none.")
        if self.packed and self.form is Form.TVM:
            raise BadInput("A TVM database is a directory, which is not packed.")

    def path(self, source: Source, directory: Path) -> Path:
        """Where the file goes."""
        named = self.filename is not None
        base = naming.given_name(self.filename or "") if named else naming.base_name(source.arch, source.num_cu)
        backend = "OpenCL" if self.opencl else naming.backend(source.library)
        extensions = {Form.FIND: f".{backend}.fdb.txt", Form.KERNEL: ".kdb", Form.TVM: ".tvm"}
        extensions[Form.PERF] = ".db.txt" if self.text else ".db"
        return directory / f"{base}{extensions[self.form]}{'.bz2' if self.packed else ''}"


@dataclass
class Task:
    """One export under way."""

    connection: sa.Connection
    source: Source
    options: Options
    solvers: Mapping[int, SolverFacts]
    skipped: Counter[str] = field(default_factory=Counter)
    configs: int = 0

    def results(
        self, *names: str, key: Any = None, last: Any = None, ordered: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """(key, columns of these names, last, age) of the results that have a key, by default MIOpen's."""
        source, tag = self.source, self.options.tag
        columns = [*map(source.column, names), *(() if last is None else (last,)), *source.age]
        return select.results(self.connection, source, tag, source.key if key is None else key, columns, ordered)

    def check(self, entries: int) -> None:
        """Raise NotFound if nothing was written."""
        if entries:
            return
        where = f" with the tag {self.options.tag!r}" if self.options.tag is not None else ""
        why = select.total(+self.skipped)
        raise NotFound(
            f"{self.source.title} has no results{where} for a {_TITLES[self.options.form]}{f' ({why})' if why else ''}.",
            hint="`tuna status` shows which jobs have finished",
        )
