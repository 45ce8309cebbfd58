"""The state of simulated jobs: which stage of which round is ready, how long the chain behind it
is, and what a simulated coordinator predicts to be left."""

from __future__ import annotations

import math
import random
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuna.coordinator.policies import SearchProgress, StageKind, StageTimes
from tuna_simulate.scenario import (
    Jobs,
    PredictionOutcome,
    SessionOutcome,
    SimulatedSession,
    Stage,
    near_best_s,
    prediction_outcome,
)

#: Number of rounds whose best times a policy sees.
_HISTORY = 8


@dataclass(eq=False, slots=True)
class Item:
    """A stage of a job's round, or a part of it: ready, published or running."""

    job: SimulatedJob
    round: int
    stage: int
    ready_s: float
    chain_s: float  #: moment when it could start if no stage ever waited for a process
    attempts: int = 0  #: number of failed attempts
    started_s: float = 0.0
    predicted_s: float = 0.0
    crashes: bool = False  #: True if its process dies before it ends

    @property
    def kind(self) -> StageKind:
        """The key that its duration is predicted by."""
        return self.job.line.kinds[self.stage]

    @property
    def seconds(self) -> float:
        """Its duration on a process that shares nothing."""
        line, place = self.job.line, (self.job.number, self.round, self.stage)
        return line.seconds[line.place(*place)] / line.parts(*place)


class SimulatedJob:
    """A job: rounds overlap by its look-ahead, the stages of a round follow each other."""

    __slots__ = (
        *("_ahead_of_turn", "_ended", "_parts_left", "_proposal_chain_s", "_proposed", "_started"),
        *("dead", "line", "number", "prefix_chain_s"),
    )

    def __init__(self, line: JobLine, number: int) -> None:
        self.line, self.number = line, number
        self.dead = False  #: True once it errored: what is left of it is dropped
        self._started = 0  #: rounds whose first stage became ready
        self._proposed = 0  #: rounds whose first stage ended
        self._ended = [0] * len(line.stages)  #: items of each stage that ended
        #: Open parts of a (round, stage), and the longest chain of those that ended.
        self._parts_left: dict[tuple[int, int], tuple[int, float]] = {}
        self._proposal_chain_s = line.session.arrives_s
        #: Element n: length of the chain to the end of the first n rounds.
        self.prefix_chain_s = [line.session.arrives_s]
        #: Chains of the rounds that ended before an earlier one.
        self._ahead_of_turn: dict[int, float] = {}

    @property
    def finished(self) -> int:
        """Rounds that ended, with all before them."""
        return len(self.prefix_chain_s) - 1

    @property
    def done(self) -> bool:
        """Every round ended."""
        return self.finished == self.line.jobs.rounds

    def ready(self, now_s: float) -> Iterator[Item]:
        """The first stages that became ready: their results are there, and the round before has
        been proposed."""
        jobs = self.line.jobs
        while self._started < jobs.rounds and self._started <= self._proposed:
            needed = max(0, self._started - jobs.look_ahead)
            if self.finished < needed:
                return
            chain_s = max(self._proposal_chain_s, self.prefix_chain_s[needed])
            self._started += 1
            yield from self._items(self._started - 1, 0, now_s, chain_s)

    def _items(self, round_: int, stage: int, now_s: float, chain_s: float) -> Iterator[Item]:
        for _ in range(self.line.parts(self.number, round_, stage)):
            yield Item(self, round_, stage, now_s, chain_s)

    def end(self, item: Item, now_s: float) -> Iterator[Item]:
        """An item ended well; what became ready by that."""
        self._ended[item.stage] += 1
        chain_s = item.chain_s + item.seconds
        parts = self.line.parts(self.number, item.round, item.stage)
        if parts > 1:
            left, longest_s = self._parts_left.pop((item.round, item.stage), (parts, 0.0))
            chain_s = max(chain_s, longest_s)
            if left > 1:
                self._parts_left[item.round, item.stage] = left - 1, chain_s
                return
        if item.stage == 0:
            self._proposed += 1
            self._proposal_chain_s = chain_s
        if item.stage + 1 < len(self.line.stages):
            yield from self._items(item.round, item.stage + 1, now_s, chain_s)
        else:
            self._ahead_of_turn[item.round] = chain_s
            while (chain := self._ahead_of_turn.pop(self.finished, None)) is not None:
                self.prefix_chain_s.append(max(self.prefix_chain_s[-1], chain))
        yield from self.ready(now_s)

    def drop(self) -> None:
        """It errored: nothing of it is left to do."""
        self.dead = True
        for stage, ended in enumerate(self._ended):
            self.line.left[stage] -= self.line.items(self.number, stage) - ended


class JobLine:
    """Jobs that are alike: their durations, and what is left of them."""

    def __init__(self, session_id: int, session: SimulatedSession, jobs: Jobs, seed: str) -> None:
        self.session_id, self.session, self.jobs = session_id, session, jobs
        self.stages = jobs.steps
        self.kinds = [StageKind(stage.queue, jobs.solver, stage.step) for stage in jobs.steps]
        rounds = jobs.count * jobs.rounds
        self._parts = [_parts(stage, rounds) for stage in jobs.steps]
        self.left = [
            sum(self.items(number, stage) for number in range(jobs.count)) if parts else rounds
            for stage, parts in enumerate(self._parts)
        ]  #: items of each stage that have not ended
        self.open_jobs = jobs.count
        self.in_one_queue = len({stage.queue for stage in jobs.steps}) == 1
        # Drawn before anything runs, so that each policy meets the same durations.
        columns = [_draw(stage, rounds, seeded(seed, stage.step)) for stage in jobs.steps]
        self.seconds: array[float] = array(
            "d", (seconds for row in zip(*columns, strict=True) for seconds in row)
        )

    def place(self, number: int, round_: int, stage: int) -> int:
        """Return the index of a job's stage in `seconds`."""
        return (number * self.jobs.rounds + round_) * len(self.stages) + stage

    def parts(self, number: int, round_: int, stage: int) -> int:
        """Return the number of items of a job's stage."""
        parts = self._parts[stage]
        return parts[(number * self.jobs.rounds + round_) % len(parts)] if parts else 1

    def items(self, number: int, stage: int) -> int:
        """Return the number of items of the stage in all rounds of a job."""
        rounds = range(self.jobs.rounds)
        return (
            sum(self.parts(number, round_, stage) for round_ in rounds)
            if self._parts[stage]
            else len(rounds)
        )

    def start(self) -> Iterator[SimulatedJob]:
        """Its jobs, when the session arrives."""
        return (SimulatedJob(self, number) for number in range(self.jobs.count))

    def best_ms(self, rounds: int) -> float | None:
        """The best time of a job after so many rounds; None: it has none, or it is not known."""
        if not rounds or not self.jobs.best_ms:
            return None
        return self.jobs.best_ms[min(rounds, len(self.jobs.best_ms)) - 1]

    def progress(self, rounds: int) -> SearchProgress | None:
        """Return the results that a policy may know of a job after so many rounds."""
        if not self.jobs.best_ms:
            return None
        latest = map(self.best_ms, range(max(1, rounds - _HISTORY + 1), rounds + 1))
        return SearchProgress(
            self.jobs.weight, tuple(best_ms for best_ms in latest if best_ms is not None), rounds
        )


class SessionTally:
    """Counters of a session, and its jobs."""

    def __init__(self, session_id: int, given: SimulatedSession, seed: int) -> None:
        self.session_id, self.given = session_id, given
        self.lines = [
            JobLine(session_id, given, jobs, f"{seed} {session_id} {n}")
            for n, jobs in enumerate(given.jobs)
        ]
        self.errored = 0
        self.ended_s = given.arrives_s
        self.waited_s = 0.0
        self.ran_s: defaultdict[str, float] = defaultdict(float)
        self.unmeasured = sum(line.jobs.count for line in self.lines if any(line.jobs.best_ms))
        self.model_ms = 0.0
        self.model_steps: list[tuple[float, float]] = []

    def measured(self, line: JobLine, before: int, after: int, now_s: float) -> None:
        """A job of the line has so many finished rounds now."""
        now_ms, before_ms = line.best_ms(after), line.best_ms(before)
        if now_ms is not None:
            self.unmeasured -= before_ms is None
            self.model_ms += line.jobs.weight * (now_ms - (before_ms or 0.0))
            if not self.unmeasured:
                self.model_steps.append((now_s, self.model_ms))

    def outcome(self) -> SessionOutcome:
        """The figures at the end of the simulation."""
        given = self.given
        return SessionOutcome(
            session_id=self.session_id,
            name=given.name,
            priority=given.priority,
            jobs=sum(line.jobs.count for line in self.lines),
            errored=self.errored,
            arrives_s=given.arrives_s,
            ended_s=self.ended_s,
            deadline_s=given.deadline_s,
            deadline_met=None if given.deadline_s is None else self.ended_s <= given.deadline_s,
            ran_s=dict(sorted(self.ran_s.items())),
            waited_s=self.waited_s,
            near_best_s=near_best_s(self.model_steps) if self.model_steps else None,
        )


def seeded(*words: object) -> random.Random:
    """Random numbers that depend on the words alone."""
    return random.Random(" ".join(map(str, words)))  # noqa: S311 - a simulation, no secret


def _parts(stage: Stage, count: int) -> tuple[int, ...]:
    """Return the parts of each execution of a stage, or of as many as repeat; empty: it is never
    divided."""
    given = stage.parts if isinstance(stage.parts, tuple) else (stage.parts,)
    return given[:count] if any(number > 1 for number in given) else ()


def _draw(stage: Stage, count: int, generator: random.Random) -> Iterator[float]:
    """Durations with the mean and the coefficient of variation of the stage, lognormal."""
    given = stage.seconds if isinstance(stage.seconds, tuple) else (stage.seconds,)
    sigma = math.sqrt(math.log1p(stage.cv**2))
    for number in range(count):
        mean_s = given[number % len(given)]
        yield mean_s * generator.lognormvariate(-(sigma**2) / 2, sigma) if sigma else mean_s


class Forecast:
    """Predicted durations, and of what is left by session and queue, as a snapshot for a policy has
    them."""

    def __init__(self) -> None:
        self.predicted_s: dict[StageKind, float] = {}
        self.left_s: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._times = StageTimes()
        self._made_of = -1  #: version of the times behind the two above; -1: stale
        #: Lines of the sessions that arrived and have open jobs.
        self._lines: dict[int, Sequence[JobLine]] = {}
        self._errors: dict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))

    def arrive(self, session_id: int, lines: Sequence[JobLine]) -> None:
        """A session came."""
        self._lines[session_id] = lines
        self.expire()

    def leave(self, session_id: int) -> None:
        """All jobs of a session ended."""
        self._lines.pop(session_id, None)
        self.expire()

    def expire(self) -> None:
        """Note that the work left changed by more than the ends of stages."""
        self._made_of = -1

    def start(self, item: Item) -> None:
        """A stage starts: predict when it will end."""
        prediction = self._times.predict(item.kind)
        item.predicted_s = prediction.seconds if prediction else 0.0

    def end(self, item: Item, ran_s: float) -> None:
        """A stage ended well after so long."""
        kind = item.kind
        if item.predicted_s and ran_s:
            self._errors[kind.queue, kind.step].append(abs(item.predicted_s - ran_s) / ran_s)
        self._times.note(kind, ran_s)

    def subtract(self, session_id: int, kind: StageKind) -> None:
        """One stage less is left."""
        if kind in self.predicted_s:
            self.left_s[session_id, kind.queue] -= self.predicted_s[kind]

    def refresh(self) -> None:
        """Predict all that is left anew, if predictions changed since; meanwhile what ends is
        subtracted."""
        if self._made_of == self._times.version:
            return
        self._made_of = self._times.version
        self.predicted_s, self.left_s = {}, defaultdict(float)
        for session_id, lines in self._lines.items():
            for line in lines:
                for kind, left in zip(line.kinds, line.left, strict=True):
                    if prediction := self._times.predict(kind):
                        self.predicted_s[kind] = prediction.seconds
                        self.left_s[session_id, kind.queue] += left * prediction.seconds

    def outcomes(self) -> tuple[PredictionOutcome, ...]:
        """The errors of its predictions by queue and step."""
        return tuple(
            prediction_outcome(queue, step, errors)
            for (queue, step), errors in sorted(self._errors.items())
        )
