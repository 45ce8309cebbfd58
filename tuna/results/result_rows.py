"""The question and the answer of `tuna query`: a filter, and rows that each say where they come
from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from html import escape
from typing import TYPE_CHECKING, Any, overload

from tuna.errors import BadInput, LibraryMissing

if TYPE_CHECKING:
    import pandas as pd

#: Number of rows of an answer unless the user asks for more, and the maximum: `tuna export` streams
#: all results
DEFAULT_LIMIT, MAX_LIMIT = 100, 100_000


def _condition(text: str, default: Any = None) -> Any:
    """A field whose description is also the help of its option."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ResultFilter:
    """Which results: those that meet all conditions that are given."""

    model: str | None = _condition("Only layers of this model or network: NAME or NAME@VERSION.")
    tag: str | None = _condition("Only layers that carry this tag.")
    layer: str | None = _condition("One layer: key, label, driver command or JSON.")
    op: str | None = _condition("Kind of layer, also at the core of a task: convolution, gemm, ...")
    shape: tuple[str, ...] = _condition("A field, or part of the label: 64x56x56.", ())
    dtype: str | None = _condition("Data type, such as fp32.")
    library: str | None = _condition("Only results of this library.")
    arch: str | None = _condition("Architecture, such as gfx90a.")
    device: str | None = _condition("Text in the name of the device.")
    environment: str | None = _condition("Key of an environment, or its beginning.")
    solver: str | None = _condition("Only results of this solver.")
    session_id: int | None = _condition("Only results of this session.")
    since: datetime | None = _condition(
        "Only results measured since 2026-03-31, or 7d: seven days ago."
    )
    n_best: int | None = _condition("Fastest N trials of each layer, solver and environment.")
    limit: int = _condition("Rows.", DEFAULT_LIMIT)


@dataclass(frozen=True)
class ResultRow:
    """One result, or one trial, with all that is known of it."""

    layer: str  #: label of the config
    config_key: str
    kind: str
    driver: str  #: `Config.text()` of the layer
    library: str
    solver: str
    params: str
    time_ms: float | None  #: median; None: an imported perf db knows only params
    low_ms: float | None  #: lower end of the median's 95 % interval
    high_ms: float | None
    max_error: float | None  #: largest error, relative to the largest magnitude of the answer
    noisy: bool  #: true if the device was not quiet during the measurement
    simulated: bool  #: true if a stand-in timed it, not a device
    baseline: bool  #: true for a solver that only shows what tuning gains
    clock: str  #: `wall`, `cpu`, `own`; empty: not known
    workspace_bytes: int
    arch: str
    num_cu: int
    environment: str  #: key of the environment
    library_version: str
    toolchain: str
    conditions: Mapping[str, str]  #: conditions of measurement that differ from the default
    session_id: int
    reason: str  #: reason of the session
    job_id: int | None
    trial_number: int | None
    search_ended: str  #: reason for which its search ended; empty: it goes on, or there was none
    golden: int | None  #: number of the golden version that has the entry; None: a session has it
    imported_from: str | None  #: name and digest of the imported file; None: measured here
    worker: str
    device: str  #: device that measured, else the environment's
    measured_at: datetime | None  #: UTC time of the measurement, or of the import
    #: command line that explains it: repeats the measurement, or shows where the result comes from
    command: str

    @property
    def spread(self) -> float | None:
        """Half the interval over the time."""
        if self.low_ms is None or self.high_ms is None or not self.time_ms:
            return None
        return (self.high_ms - self.low_ms) / 2 / self.time_ms

    @property
    def source(self) -> str:
        """`session`, `golden` or `import`."""
        return (
            "golden" if self.golden is not None else "import" if self.imported_from else "session"
        )

    @property
    def marks(self) -> str:
        """Reservations about the time, in words."""
        return ", ".join(word for word in ("noisy", "simulated", "baseline") if getattr(self, word))

    def as_json(self) -> dict[str, Any]:
        """All fields, JSON-serialisable."""
        document = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        document["conditions"] = dict(self.conditions)
        document["measured_at"] = self.measured_at.isoformat() if self.measured_at else None
        return document | {"spread": self.spread, "source": self.source}


#: Columns of the table that `ResultRows` is shown as
_COLUMNS = ("layer", "solver", "ms", "marks", "arch", "session", "device")


@dataclass(frozen=True)
class ResultRows(Sequence[ResultRow]):
    """The answer: rows by layer in the order of its import, then time, solver, session."""

    rows: tuple[ResultRow, ...]
    limit: int
    more: bool  #: true if there are more rows than the limit
    cursor: str = ""  #: cursor of the rows behind these; empty: there are none

    @overload
    def __getitem__(self, index: int) -> ResultRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ResultRow, ...]: ...
    def __getitem__(self, index: int | slice) -> ResultRow | tuple[ResultRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ResultRow]:
        return iter(self.rows)

    def frame(self) -> pd.DataFrame:
        """A pandas DataFrame with a column for each field; raises LibraryMissing without pandas."""
        try:
            import pandas as pd
        except ImportError:
            raise LibraryMissing("pandas is not installed.", hint="pip install pandas") from None
        columns = [*(field.name for field in dataclasses.fields(ResultRow)), "spread", "source"]
        found = pd.DataFrame([row.as_json() for row in self.rows], columns=columns)
        return found.assign(measured_at=pd.to_datetime(found["measured_at"], utc=True))

    def __str__(self) -> str:
        """A line for each row; all that is known of one is in its fields."""
        lines = [
            _COLUMNS,
            *(tuple("" if cell is None else f"{cell}" for cell in row) for row in self._cells()),
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        ]
        return "\n".join([*(text.rstrip() for text in texts), *filter(None, [self._note])])

    def _repr_html_(self) -> str:
        return _html_table(_COLUMNS, self._cells(), self._note)

    def _cells(self) -> list[tuple[object, ...]]:
        return [
            (row.layer, row.solver, row.time_ms, row.marks, row.arch, row.session_id, row.device)
            for row in self.rows
        ]

    @property
    def _note(self) -> str:
        return f"The first {self.limit}; there are more." if self.more else ""


def _html_table(columns: Sequence[str], rows: Iterable[Sequence[object]], note: str) -> str:
    """Return a table as notebooks show it: text to the left, numbers to the right, all of it
    escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    after = f"<p>{escape(note)}</p>" if note else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{after}"


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            f'<td style="text-align:right">{value:.4g}</td>'
            if isinstance(value, float)
            else f"<td>{value}</td>"
        )
    return f'<td style="text-align:left">{escape("" if value is None else str(value))}</td>'


_AGO = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment(text: str) -> datetime:
    """A date or time in ISO 8601 (UTC unless it names a zone), or `7d`: seven days ago; raises
    BadInput."""
    ago = re.fullmatch(r"([0-9]{1,5})([mhdw])", text)
    if ago:
        return datetime.now(timezone.utc) - timedelta(**{_AGO[ago[2]]: int(ago[1])})
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        hint = "such as 2026-03-31, 2026-03-31T12:00, or 7d: seven days ago"
        raise BadInput(f"{text!r} is not a time.", hint=hint) from None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)
