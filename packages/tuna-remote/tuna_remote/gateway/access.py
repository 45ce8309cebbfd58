"""Access to a gateway: who sends a request, and who is let in."""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import anyio
import sqlalchemy as sa
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tuna.api.rows import RemoteWorker, access_tokens, joined_workers, reading, transaction
from tuna.services.listening import admit
from tuna_remote.gateway import joined
from tuna_remote.gateway.protocol import NO_SESSION, Joined, JoinRequest

log = structlog.get_logger(__name__)

#: What is known of a worker may be so old: a revoked one is refused after this long.
_KNOWN_S = 0.5
#: Requests a second of each process of a worker, and how many may be saved up.
_RATE, _BURST = 100.0, 300.0
#: Joins a second of everybody together.
_JOIN_RATE, _JOIN_BURST = 20.0, 100.0
#: How often the same offence of a worker is logged.
_LOG_EVERY_S = 60.0
_HOST = re.compile(r"[^A-Za-z0-9.-]")
_T = TypeVar("_T")


async def threaded(call: Callable[..., _T], *args: Any) -> _T:
    """Return `call(*args)`, run in a thread."""
    return await anyio.to_thread.run_sync(partial(call, *args))


class TokenBucket:
    """A token bucket."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, time.monotonic()

    def take(self) -> bool:
        """Take one; False if there is none left."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass
class KnownWorker:
    """A worker as it was in SQL a moment ago, with what this gateway counts of it."""

    worker: RemoteWorker
    read_at: float
    bucket: TokenBucket
    seen_at: float = 0.0
    failures: int = 0  #: chunks returned since it finished one
    paused_until: float = 0.0


class Access:
    """The workers of one database, as they were in SQL a moment ago."""

    def __init__(self, engine: sa.Engine, lease_s: float) -> None:
        self._engine = engine
        self._lease_s = lease_s
        self._known: dict[str, KnownWorker] = {}
        self._environments: tuple[float, dict[str, str]] = (-1e9, {})
        self._joins = TokenBucket(_JOIN_RATE, _JOIN_BURST)
        self._logged: dict[tuple[str, str], float] = {}

    def count_join(self) -> None:
        """Count a request to join; answers 429 for too many."""
        if not self._joins.take():
            raise HTTPException(429, "too many joins")

    async def authenticated(
        self, request: Request, *, counts: bool = True, known_s: float = _KNOWN_S
    ) -> KnownWorker:
        """The worker that sends the request; `counts`: for its rate; `known_s`: how old may be what
        is known of it."""
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        name, _, secret = text.strip().rpartition(".")
        if scheme.lower() != "bearer" or not name or len(name) > 128 or len(secret) > 128:
            raise HTTPException(401, "no access")
        known = self._known.get(name)
        if known is None or time.monotonic() - known.read_at > known_s:
            known = await threaded(self._look_up, name)
        digest = access_tokens.digest(secret)
        if known is None or not hmac.compare_digest(digest, known.worker.digest):
            raise HTTPException(401, "no access")
        if not known.worker.has_access:
            raise HTTPException(401, "the worker was revoked, or was silent for an hour")
        admit(request.scope)
        if counts and not known.bucket.take():
            self.refuse(name, 429, "too many requests")
        return known

    def _look_up(self, name: str) -> KnownWorker | None:
        with reading(self._engine) as connection:
            worker = joined_workers.find(connection, name)
        known = self._known.get(name)
        if worker is None:
            return None
        if known is None:
            rate = worker.processes * _RATE
            known = KnownWorker(
                worker, time.monotonic(), TokenBucket(rate, worker.processes * _BURST)
            )
            self._known[name] = known
        known.worker, known.read_at = worker, time.monotonic()
        return known

    async def queues(self, worker: RemoteWorker) -> list[str]:
        """The queues of sessions that a worker was admitted to."""
        read_at, known = self._environments
        if time.monotonic() - read_at > _KNOWN_S:
            known = await threaded(self._read_environments)
            self._environments = time.monotonic(), known
        return joined.queues(worker, known)

    def _read_environments(self) -> dict[str, str]:
        with reading(self._engine) as connection:
            return joined.known_environments(connection)

    def admit(self, asked: JoinRequest) -> Joined:
        """Let a worker in that has a token; answers 403, 422."""
        digest = access_tokens.digest(asked.secret)
        with reading(self._engine) as connection:
            token = access_tokens.find(connection, asked.token)
            before = joined.joined_with(connection, asked.token, digest)
            known = joined.known_environments(connection)
        if before is not None:  # a retry: the answer was lost with the connection
            return Joined(name=before, lease_s=self._lease_s)
        hashed = access_tokens.digest(asked.token_secret)
        if token is None or not token.is_valid or not hmac.compare_digest(hashed, token.digest):
            raise HTTPException(403, "the token is unknown, was used before, or has expired")
        refusal = ""
        if asked.role != token.role:
            refusal = f"its token is for {token.role} workers"
        elif asked.role == "eval" and not known.keys() & set(asked.facts.environments):
            refusal = f"{NO_SESSION}; compare `tuna doctor` on both machines"
        elif asked.role == "compile" and not set(known.values()) & set(asked.facts.toolchains):
            refusal = "no session needs a toolchain that it has"
        if refusal:
            log.warning("join refused", host=asked.facts.host, token=token.id, why=refusal)
            raise HTTPException(422, refusal)
        host = _HOST.sub("-", asked.facts.host)[:80]
        worker = joined_workers.NewWorker(
            name=f"{asked.role}-{host}-{secrets.token_hex(4)}",
            role=asked.role,
            host=asked.facts.host,
            device=asked.facts.device,
            environments=asked.facts.environments if asked.role == "eval" else (),
            toolchains=asked.facts.toolchains if asked.role == "compile" else (),
            digest=digest,
            processes=asked.facts.processes,
        )
        if not transaction(self._engine, joined.admit, token.id, worker):
            raise HTTPException(403, "the token is unknown, was used before, or has expired")
        log.info("worker joined", worker=worker.name, role=worker.role)
        return Joined(name=worker.name, lease_s=self._lease_s)

    def refuse(self, worker: str, status: int, why: str) -> NoReturn:
        """Answer a request of a worker with an error, which is logged."""
        self.log(worker, why)
        raise HTTPException(status, why)

    def log(self, worker: str, why: str) -> None:
        """Log an offence, the same one of a worker once a minute."""
        now = time.monotonic()
        if now - self._logged.get((worker, why), -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged[worker, why] = now
            log.warning("request of a remote worker refused", worker=worker, why=why)
