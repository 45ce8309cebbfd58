"""The contract of tuning files: times that other programs reported, and what these hold for."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from tuna.configs.lines import LineForm
from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.exporter import (
    Entry,
    Exporter,
    ExportOptions,
    ExportTally,
    FileOptions,
    Pair,
)
from tuna.libraries.results import ReportedTime, ResultSource


class ReportedOptions(ExportOptions):
    """Options of a form that holds reported times."""

    release: str | None = Field(
        None, description="text in a version; default: the release that was reported last"
    )


class ReportedFileOptions(ReportedOptions, FileOptions):
    """Options of a tuning file that is one file."""


@dataclass
class TuningRows:
    """The contents of a file."""

    rows: list[ReportedTime] = field(default_factory=list)
    #: numbers of the lines that are not reports, by reason
    bad: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def skipped(self) -> dict[str, int]:
        """Counts of bad lines, by reason and with the first of them."""
        return {f"line {at[0]}: {why}": len(at) for why, at in sorted(self.bad.items())}


class ReportedExporter(Exporter[ReportedOptions]):
    """A form that holds reported times alone, of one device and release."""

    options: type[ReportedOptions] = ReportedOptions
    source: ClassVar[str] = ""  #: source of its reports; empty: its form

    def accepts(self, source: ResultSource) -> None:
        """Refuse results: a solution is an index of the program that reports."""
        if not source.reports:
            raise BadInput(
                f"A {self.title} holds times that were reported, not results.",
                hint="leave --session-id and --golden out, and say --allow-reported",
            )

    def ending(self, source: ResultSource, options: ReportedOptions) -> str:
        """The first of `endings`."""
        return self.endings[0]


class TuningFile(ReportedExporter):
    """A tuning file, which can be read as reports."""

    timed = True
    fastest_of_key = True
    options = ReportedFileOptions
    layers: ClassVar[LineForm | None]  #: form of the lines that name a report's subject, if any

    def write(
        self, path: Path, source: ResultSource, options: ReportedOptions, tally: ExportTally
    ) -> int:
        """By subject."""
        rows = self.written(source.reports, tally)
        tally.configs = len({row.subject for row in rows})
        self.write_rows(path, rows, rows[0].versions or {})
        return len(rows)

    def written(self, rows: Sequence[ReportedTime], tally: ExportTally) -> Sequence[ReportedTime]:
        """The reports that can stand in one file, without those that are counted."""
        return rows

    @abstractmethod
    def write_rows(
        self, path: Path, rows: Iterable[ReportedTime], versions: Mapping[str, str]
    ) -> None:
        """Write reports that are good for these versions, in their order."""

    @abstractmethod
    def read_lines(self, lines: Iterable[tuple[int, str]], found: TuningRows) -> None:
        """Add what numbered lines hold; raises BadInput where they are of several releases."""

    def read(self, path: Path) -> TuningRows:
        """The reports in a file, packed or not, and its bad lines; raises BadInput."""
        found = TuningRows()
        try:
            self.read_lines(compressed.lines(path, self.title), found)
        except BadInput as error:
            if str(path) in str(error):
                raise
            raise BadInput(f"{path}: {error}") from None
        return found

    def layer(self, row: ReportedTime) -> str | None:
        """The key of the layer that was timed; None if that is not one of Tuna's, or there was more
        than a layer."""
        if self.layers is None:
            return None
        try:
            (config,) = self.layers.read(row.subject)
        except BadInput:
            return None
        return None if self.layers.left_out(row.subject) else config.key

    def entries(self, path: Path) -> Iterator[Entry]:
        """The time of each solution by subject, the fastest first; raises BadInput where a line is
        bad, or there is none."""
        found = self.read(path)
        if found.bad or not found.rows:
            why = "; ".join(found.skipped) or "it has no times"
            raise BadInput(f"{path} cannot be used as a {self.title}: {why}.")
        for row in sorted(found.rows, key=lambda row: row.time_ms or 0.0):
            yield Entry(row.subject, row.implementation, (row.time_ms or 0.0,))

    def check_mergeable(self, paths: Sequence[Path]) -> None:
        """Refuse files that are not all of one device and release, with all that differs."""
        first, *others = map(self._versions, paths)
        found = [
            f"{path}: {name} is {other.get(name, 'missing')}, not {first.get(name, 'missing')}"
            for path, other in zip(paths[1:], others, strict=True)
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if found:
            raise BadInput(
                f"Files of other releases or devices than {paths[0]} cannot be merged with it"
                f" ({'; '.join(found)}).",
                hint="merge the files of each release and device by themselves",
            )

    def _versions(self, path: Path) -> Mapping[str, str]:
        found = {tuple(sorted((row.versions or {}).items())) for row in self.read(path).rows}
        if len(found) > 1:
            raise BadInput(f"{path} has rows of several devices, so it cannot be merged.")
        return dict(*found)

    def write_merged(
        self, path: Path, pairs: Iterable[Pair], master: Path, target: Path, name: str
    ) -> None:
        """Write the entries by subject, with the versions of both files."""
        rows = (
            ReportedTime(self.form, one.key, one.solver, (one.b or one.a or ())[0]) for one in pairs
        )
        self.write_rows(path, rows, self._versions(master))
