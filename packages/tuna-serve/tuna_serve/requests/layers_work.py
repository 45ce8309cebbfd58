"""The steps of a request for layers: store them, load the jobs that are missing, have them done,
and answer with the best results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import sqlalchemy as sa

from tuna import api
from tuna.api import Progress, RunStopped
from tuna.api.rows import (
    ConfigTag,
    Job,
    SolverApplicability,
    SolverRow,
    configs,
    open_database,
    parts,
    reading,
    rows_among,
    sessions,
    writing,
)
from tuna.common.messages import counted
from tuna.configs import Config
from tuna.errors import TunaError
from tuna.libraries.registry import get_library
from tuna.vocabulary import END_STATES, RequestState, State
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import answers, known
from tuna_serve.requests.answers import RequestAnswer
from tuna_serve.requests.asked import SESSIONS, Asked
from tuna_serve.requests.known import ExactResult
from tuna_serve.requests.watch import Watch, begin_tuning, current

#: Seconds between two looks at workers and at what is met.
_LOOK_EVERY_S = 3.0
#: The most that libraries take for the option `candidates`.
_MAX_CANDIDATES = 10_000


class RequestWork:
    """The work on one request; each step may be repeated, and then does what is missing."""

    def __init__(self, request: TuningRequest) -> None:
        self._request = request
        self._asked = Asked.model_validate(request.wanted)
        self._environment = answers.environment_of(request)
        self._session_id = request.session_id or 0

    def _exact(self, ids: Collection[int]) -> dict[int, ExactResult]:
        with reading(open_database()) as connection:
            return known.exact(connection, self._environment, sorted(ids))


class LayersWork(RequestWork):
    """The work on a request for layers."""

    def __init__(self, request: TuningRequest) -> None:
        super().__init__(request)
        self._library = get_library(self._environment.library)
        self._looked_at = 0.0
        self._missing: list[int] = []
        self._own_workers = False  #: this process has started some

    def run(self) -> None:
        """Work until the request is over; raises RequestCanceled, and TunaError for what makes it
        fail."""
        accepted = self._request.state is RequestState.ACCEPTED
        if accepted and answers.answer_layers(self._request):
            return
        layers = self._store()
        self._missing = self._unmet(layers)
        if accepted:
            numbers = {"layers": len(layers), "known": len(layers) - len(self._missing)}
            self._request = begin_tuning(self._request, numbers)
        watch = Watch(self._request, self._library)
        if self._missing and not watch.over:
            self._load()
        self._work(watch)
        cancel_jobs(self._request)
        self._finish(layers, watch)

    def _store(self) -> dict[int, tuple[Config, int]]:
        """Store the layers under a tag of their own; return them by id, with their weights."""
        parsed, tag = answers.stored_layers(self._request), f"request {self._request.id}"
        with writing(open_database()) as connection:
            stored = configs.store(connection, parsed.configs, tag)
            requests.write(connection, self._request.id, tag=tag)
        self._request = current(self._request.id)
        pairs = zip(parsed.configs, parsed.weights, strict=True)
        return {key: pair for key, pair in zip(stored.ids, pairs, strict=True) if key is not None}

    def _unmet(self, ids: Collection[int]) -> list[int]:
        """Return the layers without a result that is as fast as was asked for."""
        found, target_ms = self._exact(ids), self._asked.target_ms
        return [key for key in ids if key not in found or not found[key].meets(target_ms)]

    def _load(self) -> None:
        """Load the jobs that are missing, as many as the budget has trials for, and begin anew
        those that were canceled for another request."""
        set_priority(self._session_id)
        api.update_solvers(self._library.name)
        api.update_applicability(self._session_id, self._request.tag)
        pairs = solvers_of(self._session_id, self._missing)
        options: dict[str, object] = {}
        if self._asked.trials is not None and "candidates" in self._library.options.model_fields:
            each = self._asked.trials // max(1, sum(map(len, pairs.values())))
            options["candidates"] = min(max(1, each), _MAX_CANDIDATES)
        for ids, solvers in self._portions(pairs):
            api.load_jobs(
                self._session_id,
                tag=self._request.tag,
                reason=self._request.tag,
                solvers=solvers,
                options=options,
                only=api.Only(config_ids=ids),
            )
        with reading(open_database()) as connection:
            canceled = _jobs(connection, self._request, self._missing, [State.CANCELED])
        if canceled:
            api.retry(self._session_id, jobs=canceled)

    def _portions(
        self, pairs: Mapping[int, Sequence[str]]
    ) -> Iterator[tuple[Sequence[int], Sequence[str]]]:
        """Yield layers, and solvers (none: all), of which each pair has a trial in the budget at
        least; where the layers have none, all, so that the refusal says why."""
        left = sum(map(len, pairs.values()))
        left = min(left, self._asked.trials or left)
        whole: list[int] = []
        for key in self._missing if pairs else ():
            solvers = pairs.get(key, ())
            if len(solvers) <= left:
                whole.append(key)
            elif left:
                yield [key], solvers[:left]
            left = max(0, left - len(solvers))
        for part in parts(whole if pairs else self._missing):
            yield part, ()

    def _work(self, watch: Watch) -> None:
        """Have the jobs done by workers that others run, or by own ones where none are and this is
        such a machine."""

        def follow(_: Progress) -> None:
            watch.now_and_then(RunStopped)
            self._look(watch)

        while not watch.over and watch.look(workers=self._count()).unfinished:
            self._own_workers = self._is_here() and not self._count()
            with contextlib.suppress(RunStopped):
                api.run(self._session_id, workers=self._own_workers, on_progress=follow)
            api.load_followers(self._session_id)

    def _look(self, watch: Watch) -> None:
        """Raise RunStopped where the jobs of the request are over, or are done in another way."""
        if time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        if self._asked.target_ms is not None:
            met = {*self._missing} - {*self._unmet(self._missing)}
            cancel_jobs(self._request, met)
        workers_now = self._count()
        mine = watch.look(workers=workers_now)
        if not mine.unfinished and not api.load_followers(self._session_id):
            raise RunStopped("All jobs of the request are done")
        if not workers_now and not self._own_workers and self._is_here():
            raise RunStopped("There are no workers any more")

    def _count(self) -> int:
        return api.count_workers(self._session_id)

    def _is_here(self) -> bool:
        """Whether this machine measures for the environment."""
        try:
            here = self._library.environment()
        except TunaError:
            return False
        return here.machine_key == self._environment.machine_key

    def _finish(self, layers: Mapping[int, tuple[Config, int]], watch: Watch) -> None:
        results, target_ms = self._exact(layers), self._asked.target_ms
        watch.look()
        absent = len(layers) - len(results)
        slow = sum(not one.meets(target_ms) for one in results.values())
        reasons = [f"the {watch.over} are used up"] if watch.over else []
        if causes := self._causes():
            reasons.append(f"jobs failed: {causes}")
        why = f" ({'; '.join(reasons)})" if reasons else ""
        said = []
        if absent:
            said.append(f"{absent} of {counted(len(layers), 'layer')} have no result")
        if slow:
            said.append(
                f"{slow} of {counted(len(layers), 'layer')} take more than {target_ms:g} ms"
            )
        message = f"{' and '.join(said)}{why}: this is the best so far." if said else ""
        if not results:
            message = f"No layer got a result{why}."
        documents = answers.documents_of_layers(
            self._request, self._environment.arch, layers, results
        )
        state = RequestState.BUILT if results else RequestState.FAILED
        answer = RequestAnswer(state, documents if results else {}, message)
        answers.finish(watch.request, answer, exact=len(results), complete=not said)
        set_priority(self._session_id)

    def _causes(self) -> str:
        """Return why jobs of the request failed, with numbers."""
        with reading(open_database()) as connection:
            query = sa.select(Job.cause, sa.func.count()).group_by(Job.cause)
            tagged = sa.select(ConfigTag.config_id).where(ConfigTag.tag == self._request.tag)
            mine = Job.session_id == self._session_id, Job.config_id.in_(tagged)
            rows = connection.execute(query.where(*mine, Job.state == State.ERRORED.value))
            return ", ".join(f"{cause} {number}" for cause, number in rows)


def solvers_of(session_id: int, layers: Sequence[int]) -> dict[int, list[str]]:
    """Return the solvers that apply to each of these layers that has any."""
    pair, found = SolverApplicability, dict[int, list[str]]()
    query = (
        sa.select(pair.config_id, SolverRow.name)
        .join(SolverRow, sa.and_(SolverRow.id == pair.solver_id, SolverRow.valid.is_(True)))
        .where(pair.session_id == session_id)
        .order_by(pair.config_id, SolverRow.name)
    )
    with reading(open_database()) as connection:
        for row in rows_among(connection, query, pair.config_id, layers):
            found.setdefault(row.config_id, []).append(row.name)
    return found


def set_priority(session_id: int) -> None:
    """Serve a session as its most urgent open request asks."""
    with writing(open_database()) as connection:
        if sessions.get(connection, session_id).reason in SESSIONS.values():
            priority = requests.highest_priority(connection, session_id)
            sessions.set_options(connection, session_id, {"priority": priority})


def cancel_jobs(request: TuningRequest, only: Collection[int] | None = None) -> None:
    """End the jobs of a request, or of `only` these of its layers, that no other request wants; for
    a model those alone that were made since it began, for others tune models too."""
    if request.session_id is None or not request.tag:
        return
    first = request.progress.get("jobs_before", 0)
    with reading(open_database()) as connection:
        tagged = sa.select(ConfigTag.config_id).where(ConfigTag.tag == request.tag)
        mine = set(connection.execute(tagged).scalars())
        mine -= requests.wanted_by_others(connection, request)
        mine = mine if only is None else mine & {*only}
        states = [state for state in State if state not in END_STATES]
        found = _jobs(connection, request, sorted(mine), states)
    if mine_now := [number for number in found if number > first]:
        api.cancel(request.session_id, jobs=mine_now)


def _jobs(
    connection: sa.Connection,
    request: TuningRequest,
    layers: Sequence[int],
    states: Sequence[State],
) -> list[int]:
    """Return the jobs of layers in the session of a request that are in these states."""
    named = [state.value for state in states]
    query = sa.select(Job.id).where(Job.session_id == request.session_id, Job.state.in_(named))
    return [row.id for row in rows_among(connection, query, Job.config_id, layers)]
