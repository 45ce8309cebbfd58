"""The contract between Tuna and a database format: an `Exporter` writes results as files and reads
such files.

A library lists its exporters (`Library.exporters`), and all commands on database files offer them.
Tuna queries the results, names the file, and replaces it atomically; the exporter knows the format
and what belongs in it. It has no access to SQL. `tuna.testing.exporter_contract` proves one. Here
too is what formats share: names of files, findings of a check, a sort of more rows than fit into
memory.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuna.common import files
from tuna.common.messages import choices
from tuna.errors import BadInput, NotFound
from tuna.libraries import compressed
from tuna.libraries.imported_records import ImportedResult
from tuna.libraries.results import KernelOf, ResultSource

#: Number of pages of 4 KiB that SQLite may keep in memory before it spills to its temporary file
_CACHE_PAGES = 4096

UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
#: Maximum of bytes of a name that every file system takes, less the extension and the suffix of a
#: temporary file
_MAX_NAME = 180

#: Kernels of a result by key and solver, one list for each session that measured it
KernelsByResult = Mapping[tuple[str, str], Sequence[Sequence[KernelOf]]]


class ExportOptions(BaseModel):
    """Options of an export; an exporter adds fields with a type, a default and a description."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileOptions(ExportOptions):
    """The options of a format that is one file."""

    packed: bool = Field(False, description="pack the file with bzip2")


@dataclass(frozen=True)
class ExportReport:
    """The file of an export, and counts of what it holds and of what was left out."""

    path: Path
    entries: int  #: number of items, rows or records
    configs: int  #: number of distinct problems among them
    skipped: Mapping[str, int]  #: number of results left out, by reason
    simulated: int = 0  #: number of written results that a stand-in timed
    noisy: int = 0  #: number of written results that were not measured on a quiet device
    #: number of written layers by what their user has to know
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass
class ExportTally:
    """Counters of a writer."""

    configs: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    #: number of written layers by what their user has to know
    notes: Counter[str] = field(default_factory=Counter)


class Entry(NamedTuple):
    """One line of a database file, as comparing and merging see it."""

    key: str  #: key of the problem
    solver: str
    #: values of the entry, up to VALUES: time, workspace, algorithm; params; digest and size
    value: tuple[str | int | float, ...]


#: Maximum of values in an entry
VALUES = 3


class LineNames(NamedTuple):
    """The layer, the solvers and the device that a line of a text database is about."""

    solvers: tuple[str, ...]
    device: str  #: name of the device, as `base_name` has it
    config_key: str = ""
    #: beginning of MIOpen's keys of the layer, where the key is not known, and a test of a key
    keys_begin: str = ""
    is_key: Callable[[str], bool] = bool


@dataclass(frozen=True)
class Pair:
    """The values of two files for the same key and solver; not both None."""

    key: str
    solver: str
    a: tuple[Any, ...] | None
    b: tuple[Any, ...] | None


@dataclass(frozen=True)
class CheckFacts:
    """Facts from the installation that files lack."""

    #: tunability by name of each solver; None: unknown, and the rules about solvers are left out
    solvers: Mapping[str, bool] | None
    #: function that returns the kernels that sessions recorded for some keys on an architecture and
    #: number of compute units (None: any)
    kernels_of: Callable[[str, int | None, Sequence[str]], KernelsByResult]


@dataclass(frozen=True)
class DatabaseFault:
    """A rule that a database breaks."""

    file: Path
    #: name of the rule: damaged, duplicate, or one of the format's own; MIOpen's: line, key, time,
    #: solver, perf-row, kernel, kernel-db
    rule: str
    text: str  #: description of the fault, with its place


@dataclass
class Findings:
    """Result of a check."""

    files: list[Path]
    faults: list[DatabaseFault] = field(default_factory=list)
    entries: int = 0
    #: number of entries that could not be checked, by reason
    left_out: Counter[str] = field(default_factory=Counter)

    def fault(self, path: Path, rule: str, text: str) -> None:
        """Note that `path` breaks a rule."""
        self.faults.append(DatabaseFault(path, rule, text))


#: Function that checks the files of one or more formats together, given by form, and adds its
#: findings
Check = Callable[[Mapping[str, Sequence[Path]], CheckFacts, Findings], None]
Options = TypeVar("Options", bound=ExportOptions)


class Exporter(ABC, Generic[Options]):
    """One database format. An exporter keeps nothing from one file to the next."""

    form: ClassVar[str]  #: word that a user types, such as `find`
    title: ClassVar[str]  #: name for people, such as `find db`
    endings: ClassVar[tuple[str, ...]]  #: endings of such files' names, without `.bz2`
    #: true if the library is in a file's name, so that those of two do not replace each other
    names_library: ClassVar[bool] = False
    is_directory: ClassVar[bool] = False  #: true if the database is a directory rather than a file
    timed: ClassVar[bool] = False  #: true if the first value of an entry is a time in ms
    #: true if a merge drops the master's other solvers of a problem that the target knows, unless
    #: the user wants both
    keys_replace: ClassVar[bool] = False
    #: true if differences are counted by key, because `solver` does not hold a solver
    entry_is_key: ClassVar[bool] = False
    options: type[Options]

    def accepts(self, source: ResultSource) -> None:
        """Raise BadInput unless such a source can have a database of this format."""
        return

    def ending(self, source: ResultSource, options: Options) -> str:
        """Return the ending of the file's name, such as `.HIP.fdb.txt`; it ends in one of
        `endings`, by default in the first."""
        library = f".{UNSAFE.sub('_', source.library)}" if self.names_library else ""
        return library + self.endings[0]

    @abstractmethod
    def write(self, path: Path, source: ResultSource, options: Options, tally: ExportTally) -> int:
        """Write the results to `path`, an empty file or directory, and return the number of
        entries.

        Equal results must give equal bytes. What cannot stand in the format is left out and counted
        in `tally`, never an error.
        """

    @abstractmethod
    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether the file is of this format, by the first 64 KiB of its unpacked contents; of a
        directory, empty."""

    @abstractmethod
    def entries(self, path: Path) -> Iterator[Entry]:
        """The entries of a file, packed or not, in any order; raises BadInput, with the line where
        there are lines."""

    def type_of(self, key: str) -> str:
        """The data type and direction in an entry's key, such as `FP16 F`, by which differences are
        counted."""
        return ""

    def checker(self) -> Check | None:
        """Rules beyond readability and unique (key, solver) pairs; formats that share a check are
        checked together."""
        return None

    def usable(self, value: tuple[Any, ...]) -> bool:
        """Whether an entry's value may stand in a merged database."""
        return True

    def write_merged(
        self, path: Path, pairs: Iterable[Pair], master: Path, target: Path, name: str
    ) -> None:
        """Write the chosen entries of two files, sorted by key and solver, to `path`; `name` says
        the variant.

        Where there is a `pair.b`, it wins. Not supported by default.
        """
        raise BadInput(f"Two databases of the form {self.form} ({self.title}) cannot be merged.")

    @property
    def mergeable(self) -> bool:
        """Whether there is a `write_merged`."""
        return type(self).write_merged is not Exporter.write_merged

    def names_at(self, path: Path, number: int) -> LineNames:
        """The names in a line of a file, packed or not; raises BadInput. Not supported by
        default."""
        raise BadInput(f"A line of a {self.title} names no entry of a golden version.")

    def imported(self, path: Path) -> Iterator[Any]:
        """The records of a file (`imports`), for an import into a session; raises BadInput. Not
        supported by default."""
        raise BadInput(f"A {self.title} cannot be imported.")

    def target_name(self, target: str) -> str:
        """A session's target, or one that a user named, as `ImportedResult.target` has it; raises
        BadInput. By default records have none."""
        return ""

    @property
    def imports(self) -> type[Any] | None:
        """The type of what `imported` yields, one of `imported_records`; None: not supported."""
        return ImportedResult if type(self).imported is not Exporter.imported else None

    def made_for(self, filename: str) -> tuple[str, int | None]:
        """Return the architecture and number of compute units (None: not said) in a file's name;
        raises BadInput. By default a name has none."""
        raise BadInput(f"The name of a {self.title} says nothing of the device: {filename}.")

    def options_of(self, given: Mapping[str, Any]) -> Options:
        """The options that a user gave; raises BadInput that names what is wrong and lists what
        there is."""
        try:
            return self.options.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"])) or "options"
            if first["type"] == "extra_forbidden":
                hint = choices(name, self.options.model_fields, "options")
                raise BadInput(f"A {self.title} has no option {name!r}.", hint=hint) from None
            if name == "top" and first["type"] == "greater_than_equal":
                raise BadInput(
                    f"at least one entry for each config has to be kept, not {given['top']}."
                ) from None
            raise BadInput(f"The option {name!r} is invalid: {first['msg'].lower()}.") from None

    def base(self, source: ResultSource) -> str:
        """Return the beginning of the file's name, which names the device."""
        return base_name(source.arch, source.num_cu)

    def path(
        self, source: ResultSource, directory: Path, options: Options, filename: str | None = None
    ) -> Path:
        """Return the path of the export; raises BadInput for a `filename` other than a plain base
        name."""
        base = self.base(source) if filename is None else given_name(filename)
        packed = ".bz2" if getattr(options, "packed", False) else ""
        return directory / f"{base}{self.ending(source, options)}{packed}"

    def export(
        self, source: ResultSource, directory: Path, options: Options, filename: str | None = None
    ) -> ExportReport:
        """Write the source's results into `directory`; an older file is replaced at once or not at
        all.

        Raises NotFound if there is nothing to export (then nothing is written), BadInput, or
        StorageFull.
        """
        self.accepts(source)
        path, tally = self.path(source, directory, options, filename), ExportTally()
        with self.replacing(path) as temporary:
            entries = self.write(temporary, source, options, tally)
            if not entries:
                raise self._nothing(source, +tally.skipped)
        skipped, notes = (
            dict(sorted((+counts).items())) for counts in (tally.skipped, tally.notes)
        )
        return ExportReport(path, entries, tally.configs, skipped, notes=notes)

    def replacing(self, path: Path) -> contextlib.AbstractContextManager[Path]:
        """A temporary file or directory that replaces `path` when the block succeeds."""
        return files.atomic_directory(path) if self.is_directory else compressed.packed_file(path)

    def _nothing(self, source: ResultSource, skipped: Mapping[str, int]) -> NotFound:
        where = f" with the tag {source.tag!r}" if source.tag is not None else ""
        why = "; ".join(f"{count} left out: {reason}" for reason, count in sorted(skipped.items()))
        return NotFound(
            f"{source.title} has no results{where} for a {self.title}{f' ({why})' if why else ''}.",
            hint="`tuna status` shows which jobs have finished",
        )


def base_name(arch: str, num_cu: int) -> str:
    """`gfx90a` and 104 give `gfx90a68`, `gfx906` and 60 give `gfx906_60`.

    MIOpen's `Handle::GetDbBasename`: more than 64 compute units in hexadecimal, else decimal after
    an underscore. Without compute units it is the architecture alone. Of `gfx90a:sramecc+:xnack+`
    only the name and `_xnack` stay, and characters that file systems refuse become underscores.
    """
    device, *features = arch.split(":")
    if "xnack+" in features:
        device += "_xnack"
    if device in ("gfx906", "gfx908") and "sramecc-" in features:
        device += "_nosramecc"
    device = UNSAFE.sub("_", device).strip("._-")[:_MAX_NAME] or "unknown"
    if num_cu <= 0:
        return device
    return f"{device}{num_cu:x}" if num_cu > 64 else f"{device}_{num_cu}"


def given_name(filename: str) -> str:
    """A base name that the user chose; raises BadInput if it is not one plain file name."""
    if (
        not filename
        or filename in (".", "..")
        or "/" in filename
        or "\0" in filename
        or len(filename) > _MAX_NAME
    ):
        raise BadInput(
            f"{filename!r} cannot be a file name.",
            hint="give a base name without directories; the extension is added",
        )
    return filename


def sort_rows(rows: Iterable[tuple[Any, ...]], width: int, by: int) -> Iterator[tuple[Any, ...]]:
    """The rows, each of `width` columns, in the order of their first `by` columns; text sorts by
    code point.

    An anonymous SQLite database does the work: it lives in a file that is already unlinked (in
    TMPDIR), so that nothing is left behind whatever happens.
    """
    names = [f"c{index}" for index in range(width)]
    with closing(sqlite3.connect("", isolation_level=None)) as spool:
        spool.execute(f"PRAGMA cache_size = {_CACHE_PAGES}")
        spool.execute("PRAGMA journal_mode = OFF")
        spool.execute("PRAGMA temp_store = FILE")
        spool.execute(f"CREATE TABLE row ({', '.join(names)})")
        spool.execute("BEGIN")
        values, order = ", ".join("?" * width), ", ".join(names[:by])
        spool.executemany(f"INSERT INTO row VALUES ({values})", rows)  # noqa: S608 (own names)
        yield from spool.execute(f"SELECT * FROM row ORDER BY {order}")  # noqa: S608 (own names)
