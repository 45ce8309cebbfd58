"""Time, size and memory of the service's answers over 1,000,000 jobs with 3,000,000 trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.query import PER_LAYER, Filling, fill, release

if TYPE_CHECKING:
    import sqlalchemy as sa

_BIG = 0.8  #: of the layers: those of sessions 1 and 2, half of the solvers each
_SMALL = 18  #: other sessions
_RELEASED = 50_000  #: entries of a golden version at most
_VERSIONS = 3


def make(engine: sa.Engine, jobs: int) -> None:
    """Store jobs with three trials each: two sessions have four tenths each, 18 the others; of
    these one is imported, of another one a half is still to be done. Each fiftieth job failed."""
    import sqlalchemy as sa

    from tuna.db.engine import writing
    from tuna.db.models import FindDb, Job, StepResultRow, TrialRow

    layers = jobs // PER_LAYER

    def session_of(layer: Any, solver: Any) -> Any:
        small = 3 + layer % _SMALL
        return sa.case((layer > _BIG * layers, small), (solver <= PER_LAYER // 2, 1), else_=2)

    fill(engine, Filling(layers, trials=3, session_of=session_of, imported=20))
    spread = Job.config_id + Job.solver_id
    failed = sa.select(Job.id).where(spread % 50 == 0, Job.session_id != 20)
    waits = sa.select(Job.id).where(spread % 2 == 1, Job.session_id == 3)
    with writing(engine) as connection:
        for table in (FindDb, TrialRow, StepResultRow):
            connection.execute(sa.delete(table).where(table.job_id.in_(waits)))
        connection.execute(sa.delete(FindDb).where(FindDb.job_id.in_(failed)))
        says = {"ok": False, "cause": "run_error", "output_tail": "it failed\n" * 20}
        connection.execute(
            sa.update(StepResultRow).where(StepResultRow.job_id.in_(failed)).values(says)
        )
        error = {"state": "errored", "cause": "run_error", "failures": 1}
        connection.execute(sa.update(Job).where(Job.id.in_(failed)).values(error))
        new = {"state": "new", "attempt": 0, "cause": None, "failures": 0}
        connection.execute(sa.update(Job).where(Job.id.in_(waits)).values(new))
    for version in range(1, _VERSIONS + 1):
        release(engine, version, session_id=2, most=_RELEASED)
