"""Access control: admits workers that present a join token, gives each its own Redis user, revokes
removed members.

SQL is the source of truth and Redis' ACL is reconciled with it: missing users are created (also
after Redis was flushed), users with the rights of another version are made again, users without a
row in SQL are deleted, and former members are cleared (`revocation`).
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import redis
import sqlalchemy as sa
import structlog
from pydantic import ValidationError

from tuna.db.engine import reading, transaction, writing
from tuna.db.types import utc_now
from tuna.membership import members as store
from tuna.membership.access import Access
from tuna.membership.join import (
    MAX_REQUEST_BYTES,
    NO_SESSION,
    Answer,
    JoinToken,
    Request,
    Role,
    answer_key,
    join_user,
    request_key,
)
from tuna.membership.revocation import ANSWER_TTL_S, Revocation
from tuna.queue import keys
from tuna.queue.announcements import control_key
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.services import redis_client
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds without a heartbeat after which a member loses its access.
MEMBER_TIMEOUT_S = 3600.0
_SEEN_INTERVAL_S = 30.0
#: After an error of rights or of values, a part of the gate's work is tried again after this long.
_BACKOFF_S = 30.0


class Gate:
    """Membership of one database's workers; does nothing if the Redis client may not administer
    users."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        namespace: str,
        lease_s: float,
        evict: Callable[[str], list[str]],
        settings: dict[str, str] | None = None,
        member_timeout_s: float = MEMBER_TIMEOUT_S,
        admin: redis.Redis | None = None,
    ) -> None:
        """`evict` revokes a worker's leases and returns its chunks (`Leases.evict`); `settings`:
        settings that new members get besides their credentials; `admin`: a client that may
        administer users."""
        self._engine = engine
        self._client = client
        self._namespace = namespace
        self._settings = settings or {}
        self._member_timeout_s = member_timeout_s
        self._board = HeartbeatBoard(client, namespace, lease_s)
        self.access = Access(admin or client, namespace)
        self.revocation = Revocation(engine, client, namespace, self.access, self._board, evict)
        self._seen_at = 0.0
        # reconcile at least once: an earlier coordinator may have left users behind
        self._idle = False
        self._granted: set[str] = set()
        self._paused_until: dict[str, float] = {}

    def tick(self) -> None:
        """Clear former members, answer join requests, and reconcile Redis' ACL with SQL; a
        coordinator calls it about once a second. Raises redis' error in an outage; other errors of
        Redis end one part of this, for a while."""
        with reading(self._engine) as connection:
            tokens = store.tokens(connection, only_open=True)
            members = store.members(connection)
        self._try("revocation", self.revocation.clear_all)
        idle = not tokens and not members
        if idle and self._idle:
            return
        for what, part in (
            ("joining", lambda: self._answer_all(tokens)),
            ("heartbeats of members", lambda: self._note_heartbeats(members)),
            ("access of members", self.reconcile),
        ):
            # without tokens and members a missing right does no harm yet
            self._try(what, part, quiet=idle)
        self._idle = idle

    def _try(self, what: str, part: Callable[[], None], *, quiet: bool = False) -> None:
        """Run a part of the gate's work: an error of rights or of values ends this part alone, for
        a while."""
        if time.monotonic() < self._paused_until.get(what, 0.0):
            return
        try:
            part()
        except (
            redis.RedisError,
            ValueError,
        ) as error:  # ValueError: a name in Redis that is no UTF-8
            if redis_client.is_outage(error):
                raise
            if not quiet:
                log.warning("membership incomplete", part=what, error=str(error))
                self._paused_until[what] = time.monotonic() + _BACKOFF_S

    def create_token(self, role: Role, ttl_s: float, url: str) -> JoinToken:
        """Create a token and its Redis user; `url` is how workers reach this Redis. Raises redis'
        NoPermissionError."""
        token = JoinToken(url, self._namespace, secrets.token_hex(6), secrets.token_urlsafe(24))
        self.access.check()
        # SQL first: `reconcile` deletes users without a row
        with writing(self._engine) as connection:
            store.add_token(
                connection, token.id, token.digest, role, utc_now() + timedelta(seconds=ttl_s)
            )
        try:
            self.access.admit_token(token.id, token.digest)
        except redis.RedisError:
            with writing(self._engine) as connection:
                store.revoke_token(connection, token.id)
            raise
        return token

    def _answer_all(self, tokens: Sequence[Any]) -> None:
        """Answer the requests of open tokens; what a token's user may have written besides is
        removed."""
        if not tokens:
            return
        with self._client.pipeline(transaction=False) as pipe:
            for token in tokens:
                pipe.getrange(request_key(self._namespace, token.id), 0, MAX_REQUEST_BYTES)
                pipe.strlen(answer_key(self._namespace, token.id))
                pipe.ttl(answer_key(self._namespace, token.id))
            found = pipe.execute()
        for token, text, length, ttl_s in zip(
            tokens, found[::3], found[1::3], found[2::3], strict=True
        ):
            # not a coordinator's
            if length and not (length <= MAX_REQUEST_BYTES and 0 <= ttl_s <= ANSWER_TTL_S):
                self._client.unlink(answer_key(self._namespace, token.id))
            if text or length > MAX_REQUEST_BYTES:
                answer = self._answer(token, text, max(len(text), length))
                if answer is not None:
                    self._client.set(
                        answer_key(self._namespace, token.id),
                        answer.model_dump_json(),
                        ex=ANSWER_TTL_S,
                    )
                self._client.unlink(request_key(self._namespace, token.id))

    def _answer(self, token: Any, text: bytes, length: int) -> Answer | None:
        """The answer to a request; None if another coordinator consumed the token. `length`: the
        most that it wrote."""
        if length > MAX_REQUEST_BYTES:
            # or its holder could fill Redis again and again
            with writing(self._engine) as connection:
                store.use_token(connection, token.id)
            log.warning("join refused", token=token.id, why="request too long")
            return Answer(
                refusal=(
                    f"its request is longer than {MAX_REQUEST_BYTES:,} bytes; the token is used up"
                )
            )
        try:
            request = Request.model_validate_json(text)
        except ValidationError:
            log.warning("join refused", token=token.id, why="request not valid")
            return Answer(
                refusal=(
                    "its request is not valid; install the same version of Tuna on both machines"
                )
            )
        refusal = self._refusal(token, request)
        if refusal:
            log.warning("join refused", host=request.facts.host, token=token.id, why=refusal)
            return Answer(refusal=refusal)
        password = secrets.token_urlsafe(32)
        host = re.sub(r"[^A-Za-z0-9.-]", "-", request.facts.host)[:80]
        worker = store.NewWorker(
            name=f"{request.role}-{host}-{secrets.token_hex(4)}",
            role=request.role,
            host=request.facts.host,
            device=request.facts.device,
            environments=request.facts.environments if request.role == "eval" else (),
            toolchains=request.facts.toolchains if request.role == "compile" else (),
            password=hashlib.sha256(password.encode()).hexdigest(),
            rights=self.access.rights,
            processes=request.facts.processes,
        )
        self.access.check()  # before the token is used up
        if not transaction(self._engine, store.admit, token.id, worker):
            return None
        self._grant(worker)
        log.info("worker joined", worker=worker.name, role=worker.role)
        settings = {
            "TUNA_WORKER_NAME": worker.name,
            "TUNA_NAMESPACE": self._namespace,
            **self._settings,
        }
        return Answer(username=self.access.user(worker.name), password=password, settings=settings)

    def _refusal(self, token: Any, request: Request) -> str:
        if not secrets.compare_digest(
            hashlib.sha256(request.secret.encode()).hexdigest(), token.digest
        ):
            return "its token is unknown"
        if request.role != token.role:
            return f"its token is for {token.role} workers"
        with reading(self._engine) as connection:
            known = store.known_environments(connection)
        if request.role == "eval" and not known.keys() & set(request.facts.environments):
            return f"{NO_SESSION}; compare `tuna doctor` on both machines"
        if request.role == "compile" and not set(known.values()) & set(request.facts.toolchains):
            return "no session needs a toolchain that it has"
        return ""

    def reconcile(self) -> None:
        """Reconcile Redis' ACL users with the tokens and members in SQL."""
        there = self.access.users()
        # after Redis: a worker that joins meanwhile is then in SQL
        with reading(self._engine) as connection:
            tokens = {
                join_user(self._namespace, row.id): row
                for row in store.tokens(connection, only_open=True)
            }
            uncleared = {
                join_user(self._namespace, row.id) for row in store.spent_tokens(connection)
            }
            members = {
                self.access.user(member.name): member for member in store.members(connection)
            }
        for name, row in tokens.items():
            if name not in there:
                self.access.admit_token(row.id, row.digest)
        for name, member in members.items():
            if name not in there or member.name not in self._granted:
                self._grant(member)
            if member.state != "active":
                self.control(member.name, member.state)
        self._granted &= {member.name for member in members.values()}
        for name in there - tokens.keys() - uncleared - members.keys():
            if name.startswith(join_user(self._namespace, "")):
                self.access.remove(name)
            else:
                self.revocation.clear(self.access.worker(name))

    def control(self, worker: str, state: str) -> None:
        """Set a worker's wanted state: `cordoned`, `draining` or `active`."""
        key = control_key(self._namespace, worker)
        if state == "active":
            self._client.delete(key)
        else:
            self._client.set(key, state)

    def _note_heartbeats(self, members: Sequence[store.Member]) -> None:
        """Record members with a heartbeat as seen; those silent for `member_timeout_s` lose their
        access."""
        if not members or time.monotonic() - self._seen_at < min(
            _SEEN_INTERVAL_S, self._member_timeout_s / 4
        ):
            return
        self._seen_at = time.monotonic()
        names = {status.name.rpartition(":")[0] for status in self._board.live()}
        seen = [member.name for member in members if member.name in names]
        limit = utc_now() - timedelta(seconds=self._member_timeout_s)
        gone = [
            member.name for member in members if member.name not in names and member.seen_at < limit
        ]

        def note(connection: sa.Connection) -> None:
            if seen:
                store.seen(connection, seen)
            for name in gone:
                store.set_state(connection, name, "gone")

        transaction(self._engine, note)

    def _grant(self, worker: store.NewWorker) -> None:
        """Make a member's Redis user, or give it this version's rights; if it was revoked
        meanwhile, delete it again, since that delete came too early."""
        rights = self.access.rights
        if worker.rights != rights:
            # closes connections that wait for what was once its own
            self.access.remove(self.access.user(worker.name))
            self._client.unlink(*keys.former_keys(self._namespace, worker.name))
        self.access.admit(worker)
        with reading(self._engine) as connection:
            still = worker.name in {member.name for member in store.members(connection)}
        if not still:
            self.revocation.clear(worker.name)
            return
        self._granted.add(worker.name)
        if worker.rights != rights:
            transaction(self._engine, store.set_rights, worker.name, rights)


def settings_of_members(settings: Settings) -> dict[str, str]:
    """Settings that new members get besides their credentials: neither the key of artifacts nor
    their store."""
    return {"TUNA_LEASE_S": str(settings.lease_s)}
