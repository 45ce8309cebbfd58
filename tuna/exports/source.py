"""The results of a session or golden version as exporters are given them: `results.ResultSource`
over SQL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa

from tuna.exports import select
from tuna.exports.record_query import records
from tuna.exports.select import Selection
from tuna.libraries.results import KernelOf, ResultRecord, SolverFacts

_FETCH_ROWS = 5000
_BATCH = 500
Row = TypeVar("Row", bound=tuple[Any, ...])


class SqlSource:
    """Results through one connection; see `results.ResultSource` for what each method gives."""

    def __init__(self, connection: sa.Connection, selection: Selection) -> None:
        self._connection, self._selection = connection, selection
        self.title, self.library = selection.title, selection.library
        self.arch, self.num_cu, self.target = selection.arch, selection.num_cu, selection.target
        self.environment_key, self.toolchain = selection.environment_key, selection.toolchain
        self.tag, self.mixed = selection.tag, selection.mixed
        self.solvers: Mapping[int, SolverFacts] = select.solvers(connection, selection.library)

    def results(self, row: type[Row], *, needs: str = "", ordered: bool = False) -> Iterator[Row]:
        """The fields that `row` names.

        Where rows are ordered, the database sorts them, in a file when it must, by bytes: text
        columns have binary collations.
        """
        fields = self._selection.fields
        names: tuple[str, ...] = row._fields  # type: ignore[attr-defined]  # of a NamedTuple
        query = self._selection.chosen(sa.select(*(fields[name] for name in names)))
        if needs:
            query = query.where(fields[needs].is_not(None))
            query = query.order_by(fields[needs]) if ordered else query
        found = self._connection.execute(query, execution_options={"yield_per": _FETCH_ROWS})
        make: Any = row._make  # type: ignore[attr-defined]
        return map(make, found)

    def records(self, n_best: int = 1) -> Iterator[ResultRecord]:
        """Whole results; trials by the unique index (job_id, number)."""
        return records(self._connection, self._selection, n_best)

    def kinds_without_key(self) -> Mapping[str, int]:
        """Counted by the database."""
        return select.kinds_without_key(self._connection, self._selection)

    def kernels(self, result_ids: Iterable[int]) -> Iterator[KernelOf]:
        """Read a few hundred results at a time."""
        ids = iter(result_ids)
        while batch := list(islice(ids, _BATCH)):
            yield from select.kernels(self._connection, self._selection, batch)

    def blob(self, digest: str) -> bytes:
        """One row of `kernel`."""
        return select.blob(self._connection, digest)

    def good_trials(
        self, job_id: int, at_least_ms: float, limit: int
    ) -> list[tuple[int, float, str]]:
        """Served by the unique index (job_id, number)."""
        return select.good_trials(self._connection, job_id, at_least_ms, limit)
