"""Results of a session or golden version as exporters are given them (`results.ResultSource` over
SQL), and the database files that they write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from tuna.db import sessions
from tuna.db.configs import require_tag
from tuna.errors import BadInput, NotFound
from tuna.exports.registry import AnyExporter, exporter
from tuna.libraries.exporter import ExportReport
from tuna.libraries.results import (
    KernelOf,
    ResultRecord,
    SolverFacts,
    TrialRecord,
)
from tuna.results.core_tables import config, golden, kernel, solver
from tuna.results.selectable import RELEASES, SESSIONS, Results
from tuna.results.whole_results import good_trials, records, session_trials

_FETCH_ROWS = 5000
_BATCH = 500
Row = TypeVar("Row", bound=tuple[Any, ...])


@dataclass
class SqlSource:
    """Results through one connection; see `results.ResultSource` for what each method gives."""

    connection: sa.Connection
    found: Results  #: columns of the results, baselines' too
    title: str
    library: str
    arch: str
    num_cu: int
    target: str
    environment_key: str
    toolchain: str
    tag: str | None
    mixed: bool = False
    session_id: int | None = None
    solvers: Mapping[int, SolverFacts] = field(init=False)

    def __post_init__(self) -> None:
        if self.tag is not None:
            require_tag(self.connection, self.tag)
        facts = (solver.c.name, solver.c.algorithm, solver.c.tunable)
        query = sa.select(solver.c.id, *facts).where(solver.c.library == self.library)
        self.solvers = {row[0]: SolverFacts(*row[1:]) for row in self.connection.execute(query)}

    @property
    def selected(self) -> Results:
        """The results to export: without those of baselines."""
        return self.found.only(self.found.no_baseline)

    def results(self, row: type[Row], *, needs: str = "", ordered: bool = False) -> Iterator[Row]:
        """The fields that `row` names.

        Where rows are ordered, the database sorts them, in a file when it must, by bytes: text
        columns have binary collations.
        """
        names: tuple[str, ...] = row._fields  # type: ignore[attr-defined]  # of a NamedTuple
        given = self._given()
        columns = [
            given[name] if name in given else self.found[_NAMES.get(name, name)] for name in names
        ]
        used = [_NAMES.get(name, name) for name in (*names, needs) if name and name not in given]
        query = self.selected.over(columns, used)
        if needs:
            query = query.where(self.found[needs].is_not(None))
            query = query.order_by(self.found[needs]) if ordered else query
        found = self.connection.execute(query, execution_options={"yield_per": _FETCH_ROWS})
        make: Any = row._make  # type: ignore[attr-defined]  # of a NamedTuple
        return map(make, found)

    def _given(self) -> dict[str, Any]:
        """Fields that are the same for all results, or have no value here."""
        if not self.found.released:
            return {"num_cu": sa.literal(self.num_cu), "measured_at": sa.null()}
        none = ("job_id", "trial_number", *(() if self.mixed else ("measured_at",)))
        return dict.fromkeys(none, sa.null())

    def records(self, n_best: int = 1, *, baselines: bool = False) -> Iterator[ResultRecord]:
        """Whole results; trials by the unique index (job_id, number)."""
        return records(self.connection, self.found if baselines else self.selected, n_best)

    def trials(self) -> Iterator[TrialRecord]:
        """Sorted by the database."""
        if self.session_id is None:
            return iter(())
        return session_trials(self.connection, self.session_id, self.tag)

    def kinds_without_key(self) -> Mapping[str, int]:
        """Counted by the database."""
        kind, key = self.selected["kind"], self.selected["problem_key"]
        query = self.selected.over([kind, sa.func.count()], ["kind"]).where(key.is_(None))
        return {row[0]: row[1] for row in self.connection.execute(query.group_by(kind))}

    def kernels(self, result_ids: Iterable[int]) -> Iterator[KernelOf]:
        """Read a few hundred results at a time."""
        ids = iter(result_ids)
        while batch := list(islice(ids, _BATCH)):
            yield from self._kernels(batch)

    def _kernels(self, ids: Sequence[int]) -> Iterator[KernelOf]:
        results = RELEASES if self.found.released else SESSIONS
        query = results.select(*_KERNEL, by=["code_number"]).where(results["id"].in_(ids))
        found: dict[int, list[KernelOf]] = {result_id: [] for result_id in ids}
        for values in self.connection.execute(
            query.order_by(results["id"], results["code_number"])
        ):
            found[values[0]].append(KernelOf(*values))
        for result_id in ids:
            yield from found[result_id]

    def blob(self, digest: str) -> bytes:
        """One row of `kernel`."""
        query = sa.select(kernel.c.blob).where(kernel.c.digest == digest)
        return bytes(self.connection.execute(query).scalar_one())

    def good_trials(
        self, job_id: int, at_least_ms: float, limit: int
    ) -> list[tuple[int, float, str]]:
        """Served by the unique index (job_id, number)."""
        return [
            (row.number, row.time_ms or 0.0, row.params or "")
            for row in good_trials(self.connection, job_id, at_least_ms, limit)
        ]


#: Column by field of `ResultSource.results`, where the two differ
_NAMES = {"result_id": "id"}
#: Columns of a `KernelOf`
_KERNEL = (
    *("id", "solver", "config_key", "driver", "environment", "digest", "code_name", "code_args"),
)


def of_session(connection: sa.Connection, session_id: int, tag: str | None) -> SqlSource:
    """A session's results; raises NotFound, and BadInput for those of an emulated board."""
    one = sessions.get(connection, session_id).environment
    if emulator := one.flags.get("emulator"):
        raise BadInput(
            f"Session {session_id} was measured on a board that {emulator} emulates: its times are"
            " not a device's.",
            hint="see them with `tuna report`; what is exported is measured on a real board",
        )
    mine = SESSIONS["session_id"] == session_id
    facts = (one.library, one.arch, one.num_cu, one.target, one.key, one.toolchain, tag)
    found, title = SESSIONS.only(mine, tag=tag), f"Session {session_id}"
    return SqlSource(connection, found, title, *facts, session_id=session_id)


def of_golden(
    connection: sa.Connection,
    library: str,
    version: int,
    arch: str,
    num_cu: int | None,
    tag: str | None,
) -> SqlSource:
    """A golden version's results for an architecture, for one CU count or for all; raises NotFound
    or BadInput."""
    if not arch:
        raise BadInput(
            "The export of a golden version needs an architecture.",
            hint="give it with --arch, such as gfx90a",
        )
    if num_cu is not None and num_cu < 1:
        raise BadInput(f"A device has at least one compute unit, not {num_cu}.")
    of_library = golden.c.library == library
    query = sa.select(golden.c.id).where(of_library, golden.c.version == version)
    golden_id = connection.execute(query).scalar_one_or_none()
    if golden_id is None:
        query = sa.select(golden.c.version).where(of_library).order_by(golden.c.version)
        known = ", ".join(map(str, connection.execute(query).scalars())) or "none yet"
        raise NotFound(f"Unknown golden version {version} of {library}.", hint=f"versions: {known}")
    where = [RELEASES["golden_id"] == golden_id, RELEASES["arch"] == arch]
    if num_cu is not None:
        where.append(RELEASES["num_cu"] == num_cu)
    title = (
        f"Golden version {version} of {library} for {arch}{f' with {num_cu} CUs' if num_cu else ''}"
    )
    facts = (title, library, arch, num_cu or 0, "", "", "", tag)
    results = RELEASES.only(*where, tag=tag)
    return SqlSource(connection, results, *facts, mixed=num_cu is None)


def kernels_of(
    connection: sa.Connection, library: str, arch: str, num_cu: int | None, keys: Sequence[str]
) -> dict[tuple[str, str], list[list[KernelOf]]]:
    """By key and solver, for each session that measured it on this device: its kernels."""
    named = config.c.problem_key.in_(keys)
    query = SESSIONS.select("problem_key", *_KERNEL, by=["arch"]).where(
        SESSIONS["library"] == library, SESSIONS["arch"] == arch, SESSIONS["digest"].is_not(None)
    )
    if num_cu is not None:
        query = query.where(SESSIONS["num_cu"] == num_cu)
    by_result: dict[tuple[str, str], dict[int, list[KernelOf]]] = {}
    for key_text, *values in connection.execute(query.where(named)):
        found = KernelOf(*values)
        results = by_result.setdefault((key_text, found.solver), {})
        results.setdefault(found.result_id, []).append(found)
    return {name: list(results.values()) for name, results in by_result.items()}


def export(
    connection: sa.Connection,
    /,
    session_id: int,
    form: str,
    directory: Path,
    *,
    filename: str | None = None,
    config_tag: str | None = None,
    **options: Any,
) -> ExportReport:
    """Write the session's results into `directory`, which is made if it is missing.

    `filename` replaces the base name `<arch>_<num_cu>`, `config_tag` limits the export to the
    configs with this tag; the rest are the form's own options, of which those that are None or
    False count as not given. Equal results give equal bytes; an older file is replaced at once or
    not at all. Raises NotFound for an unknown session or tag, or nothing to export (then nothing is
    written), BadInput, also for results of an emulated board, or StorageFull.
    """
    writer = exporter(form)
    chosen = _chosen(writer, options)
    source = of_session(connection, session_id, config_tag)
    return _counted(source, writer.export(source, directory, chosen, filename))


def export_golden(
    connection: sa.Connection,
    /,
    version: int,
    form: str,
    directory: Path,
    *,
    library: str = "miopen",
    arch: str,
    num_cu: int | None = None,
    filename: str | None = None,
    config_tag: str | None = None,
    **options: Any,
) -> ExportReport:
    """Write what a golden version holds for a device, as `export` does for a session.

    Without `num_cu` the file is named after the architecture alone and holds the results of all CU
    counts: MIOpen's formats of each key and solver what was measured last, of equally late ones
    that of fewer CUs; a kernel db the code of the winners of each CU count; the generic forms all
    of them. A golden version has no TVM database.
    """
    writer = exporter(form)
    chosen = _chosen(writer, options)
    source = of_golden(connection, library, version, arch, num_cu, config_tag)
    return _counted(source, writer.export(source, directory, chosen, filename))


def _chosen(writer: AnyExporter, options: Mapping[str, Any]) -> Any:
    """The options that were given: a form refuses those that it does not have."""
    given = {
        name: value for name, value in options.items() if value is not None and value is not False
    }
    return writer.options_of(given)


def _counted(source: SqlSource, report: ExportReport) -> ExportReport:
    count = partial(source.selected.count, source.connection)
    return replace(report, simulated=count("simulated"), noisy=count("noisy"))
