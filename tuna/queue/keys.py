"""The keys of a member: a worker that joined with a token reaches these, and nothing else in Redis.

All under `tuna:{<namespace>}:m:<worker>:`. The list is fixed, so that a coordinator can bound and
delete all that a member may have written, whatever it wrote. What stands in them is hostile: see
`docs/security.md`.

    work        list    its Celery queue (also `work\\x06\\x163`, ..: priorities), with kombu's
    bindings; dealt to
    dealt       hash    chunk -> empty, or the token of the process that took it. A hint to the
    member: the coordinator's own
                        `leases` and `holders` decide
    reports     stream  `messages.Report`s as JSON (field `r`), moved to `results` by the
    coordinator, which checks them
    heartbeats  hash    process id -> `WorkerStatus` as JSON; the coordinator shows them under the
    member's name
    artifacts   hash    `<chunk>/<SHA-256>` -> bytes, `<chunk>/<SHA-256>.<key id>` -> signature:
    what a dealt chunk needs, put by
                        the coordinator, and what the member made, unsigned
    public      string  the public keys that verify artifacts, from the coordinator
    order       string  `cordoned` or `draining`, from the coordinator
"""

from __future__ import annotations

from tuna.queue.celery_internals import member_broker_keys
from tuna.settings import Settings

#: The member's Celery queue; its exchange and routing key have the same name.
WORK = "work"
#: All keys, without their prefix.
NAMES = (
    "dealt",
    "reports",
    "heartbeats",
    "artifacts",
    "public",
    "order",
    *member_broker_keys(WORK),
)
#: The Redis commands that a member's processes use, Celery's included, beside `select` of their
#: database: no script, nothing that lists keys, no channel.
COMMANDS = (
    "auth hello ping multi exec get hget hset hdel hexists xadd brpop lpush llen sadd smembers"
)


def prefix(namespace: str, worker: str) -> str:
    """What all keys of a member start with, Celery's included (`global_keyprefix`)."""
    return f"tuna:{{{namespace}}}:m:{worker}:"


def of(settings: Settings, name: str) -> str:
    """One of this member's own keys."""
    return prefix(settings.namespace, settings.worker_name) + name


def former_keys(namespace: str, worker: str) -> list[str]:
    """What versions before the gate kept for a member, for coordinators to delete: nothing reads it
    any more."""
    return [f"tuna:{{{namespace}}}:order:{worker}"]


def all_keys(namespace: str, worker: str) -> list[str]:
    """Every key that the member's Redis user may touch."""
    start = prefix(namespace, worker)
    return [start + name for name in NAMES]
