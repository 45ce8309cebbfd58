"""The reason why sessions wait, by the chunks in their queues and the workers' heartbeats."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tuna.common.messages import counted, one_line
from tuna.jobs.serving import SessionWork
from tuna.queue.heartbeat import WorkerStatus
from tuna.queue.leases import Published

_ARTICLES = {"compile": "a compile worker", "eval": "an eval worker"}


def waited_for(
    works: Collection[SessionWork], workers: Sequence[WorkerStatus], published: Published
) -> str:
    """Return what keeps published chunks of these sessions waiting, such as "an eval worker"; ""
    where workers are at work on them."""
    queues = sorted({work.queue(step) for work in works for step in work.steps})
    open_queues = [name for name in queues if published.waiting[name] + published.running[name]]
    return " and ".join(dict.fromkeys(filter(None, (_of(name, workers) for name in open_queues))))


def _of(queue: str, workers: Sequence[WorkerStatus]) -> str:
    serving = [one for one in workers if queue in one.queues]
    if not serving:
        return f"{_ARTICLES[queue.partition('.')[0]]} (queue {queue})"
    reasons = [one.aside and f"{one.name}, which is aside: {one.aside}" for one in serving]
    reasons = [reason or one.waits_for for reason, one in zip(reasons, serving, strict=True)]
    return one_line(reasons[0]) if all(reasons) else ""


def first_done(chunks: Mapping[int, int]) -> str:
    """Return the same for chunks of other sessions, by session, which workers do first; "" if there
    are none."""
    whose = " and ".join(
        f"{counted(number, 'chunk')} of session {key}" for key, number in sorted(chunks.items())
    )
    return f"the workers, which first do {whose}" if whose else ""
