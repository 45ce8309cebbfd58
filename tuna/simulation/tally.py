"""Counters of a simulation for each session."""

from __future__ import annotations

from collections import defaultdict

from tuna.simulation.jobs import JobLine
from tuna.simulation.outcome import SessionOutcome, near_best_s
from tuna.simulation.scenario import SimulatedSession


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
