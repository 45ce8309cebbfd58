"""The input of an exporter: the results of one session or golden version, streamed, with their code
and trials.

`tuna.exports` implements `ResultSource` over SQL, `tuna.testing.exporter_contract` in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeVar

#: Shortest time that a clock can tell, 1 ns, and longest in which a candidate may be measured, a
#: day
SHORTEST_MS, LONGEST_MS = 1e-6, 86_400_000.0
#: Maximum of parts of a run that are timed
MAX_PARTS = 10_000
#: Reason why a result is left out
NO_TIME = "its time is not between 1 ns and a day"


def is_time(time_ms: float | None) -> bool:
    """Return whether a run can have taken this long; in SQL: `db.types.timed`."""
    return time_ms is not None and SHORTEST_MS <= time_ms <= LONGEST_MS


#: Factor of the best within which times are close to it: they are measured again, beside it, before
#: one is called best. Between two processes, times of day or neighbours in a model a kernel's time
#: differs by as much.
CLOSE = 1.3


def is_close(time_ms: float, best_ms: float) -> bool:
    """Return whether a time is close to the best."""
    return time_ms <= CLOSE * best_ms


class SolverFacts(NamedTuple):
    """A solver as exporters see it."""

    name: str
    algorithm: str  #: family of algorithms: Direct, GEMM, Winograd, ImplicitGEMM, FFT
    tunable: bool


class KernelOf(NamedTuple):
    """A code object of a result; `digest` is None for a result without any."""

    result_id: int
    solver: str
    config_key: str
    driver: str
    environment_key: str
    digest: str | None
    name: str  #: name that the library's loader asks for; empty: exporters generate one
    args: str


class Spread(NamedTuple):
    """All repeats of the winning trial's measurement."""

    min_ms: float
    median_ms: float
    iqr_ms: float  #: difference between the quartiles, by linear interpolation
    repeats: int


class ResultEnvironment(NamedTuple):
    """`libraries.base.Environment` as it is stored, with its key."""

    key: str
    library: str
    library_version: str
    arch: str
    num_cu: int
    toolchain: str
    device: str
    target: str
    flags: Mapping[str, str]
    conditions: Mapping[str, str]  #: conditions of measurement that differ from the default


class ResultRecord(NamedTuple):
    """The whole result of one (config, solver), for every library and kind of config."""

    config_key: str
    kind: str  #: kind of the config
    config: str  #: line that names the config: `Config.text()`
    label: str
    solver: str
    algorithm: str  #: algorithm as the library named it, else the solver's family
    family: str
    params: str
    time_ms: float | None  #: median; None: an imported file knows only params
    spread: Spread | None  #: spread of the repeats; None: imported
    #: largest error of the winner, relative to the largest magnitude of the answer; None: not known
    max_error: float | None
    workspace_bytes: int
    simulated: bool  #: true if the times come from a stand-in, not from a device
    noisy: bool  #: true if the device was not quiet during the measurement
    #: clock: `wall`, `cpu` (the core was never quiet), or `own` (the library's); empty: not known
    clock: str
    environment: ResultEnvironment
    session_id: int
    job_id: int | None
    trial_number: int | None
    worker: str
    device: str
    measured_at: datetime | None  #: UTC time of the measurement
    imported_from: str | None  #: name and digest of the imported file; None: measured here
    low_ms: float | None = None  #: lower end of the median's 95 % interval
    high_ms: float | None = None
    #: job that measured it once more, in turn with the config's other winners; None: none did
    final_job_id: int | None = None


class TrialRecord(NamedTuple):
    """A candidate of a session's job, with its measurement or why it failed."""

    config_key: str
    config: str  #: line that names the config: `Config.text()`
    label: str
    solver: str
    job_id: int  #: id of the job; a search has one for each round
    number: int  #: index within the job
    params: str | None  #: params of the candidate; None: the attempt failed as a whole
    cause: str  #: cause of the failure, a `vocabulary.Cause`; empty: it was measured
    time_ms: float | None  #: median
    times_ms: tuple[float, ...]  #: time of every repeat
    low_ms: float | None  #: lower end of the median's 95 % interval
    high_ms: float | None
    clock: str  #: clock: `wall`, `cpu` or `own`, as in `ResultRecord`
    ended_early: bool  #: true if it was clearly slower, and measured no further
    max_error: float | None
    build_s: float | None
    measured_at: datetime | None  #: UTC time of the measurement


Row = TypeVar("Row", bound=tuple[Any, ...])


class ResultSource(Protocol):
    """Streams the results to export; memory does not grow with their number."""

    title: str  #: title for people, such as `Session 3`
    library: str
    arch: str
    num_cu: int  #: number of compute units; 0: any, or none
    target: str  #: target of a session's compiler
    environment_key: str  #: environment key of a session; empty: every result has its own
    toolchain: str  #: toolchain of a session; empty: every result has its own
    tag: str | None  #: tag of the configs in it; None: all configs
    #: true if results of several CU counts compete: then the latest of a solver counts, not the
    #: fastest
    mixed: bool
    solvers: Mapping[int, SolverFacts]

    def results(self, row: type[Row], *, needs: str = "", ordered: bool = False) -> Iterator[Row]:
        """Return the results as `row`, a NamedTuple class; only the fields that it names are read.

        `needs` names a field that must not be None, by which the results are `ordered` (by bytes)
        if that is asked for; else their order is any. The fields are:

        - result_id: number of the result, for `kernels`
        - config_key: SHA-256 of the config
        - driver: the config's canonical text
        - problem_key: MIOpen's name of the config, by the library itself or by Tuna, or None
        - problem: `problem_key`, else `driver`
        - solver_id: key of `solvers`
        - time_ms: median of the best checked candidate; None where an imported file knows only
          params
        - workspace_bytes: scratch memory on the device
        - params: text form of the best candidate; empty for none
        - algorithm: as the library named it; empty: the solver's family
        - job_id: of a session's measured result, for `good_trials`; else None
        - trial_number: of the best candidate; else None
        - workload: SHA-256 of the problem's text, for `blob`; else None
        - noisy: whether the device was not quiet while it was measured
        - num_cu: compute units of the device
        - measured_at: when, where results of several devices compete (`mixed`); else None
        """

    def records(self, n_best: int = 1, *, baselines: bool = False) -> Iterator[ResultRecord]:
        """Whole results by config key, environment key, time, solver's name and params: a total
        order.

        With `n_best` also up to that number of trials of each config, solver and environment, the
        result the first of them. With `baselines` also the results of baselines of configs that
        have others; golden versions have none.
        """

    def trials(self) -> Iterator[TrialRecord]:
        """All trials of a session, also failed ones and those of baselines, by config key, solver,
        job and number; a golden version and what was imported have none."""

    def kinds_without_key(self) -> Mapping[str, int]:
        """Return the number of results without a `problem_key`, by their config's kind."""

    def kernels(self, result_ids: Iterable[int]) -> Iterator[KernelOf]:
        """The code objects of these results, in the order of the ids, at least one for each."""

    def blob(self, digest: str) -> bytes:
        """The stored bytes (code, workload) with this SHA-256."""

    def good_trials(
        self, job_id: int, at_least_ms: float, limit: int
    ) -> list[tuple[int, float, str]]:
        """(number in its round, time in ms, params) of the fastest good trials of a job that took
        `at_least_ms` or longer.

        Of a job that searches in rounds, those of all of them.
        """
