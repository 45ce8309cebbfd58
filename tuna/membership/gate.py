"""Access control: admits workers that present a join token, gives each its own Redis user, revokes removed members.

SQL is the source of truth and Redis' ACL is reconciled with it: missing users are created (also after Redis was
flushed); users without a row in SQL are deleted, which closes their connections, and their leases are revoked.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import redis
import sqlalchemy as sa
import structlog
from pydantic import ValidationError

from tuna import redis_client
from tuna.celery_internals import broker_keys
from tuna.db.engine import reading, retrying, writing
from tuna.db.types import utc_now
from tuna.membership import members as store
from tuna.membership.announcements import control_key
from tuna.membership.heartbeat import HeartbeatBoard
from tuna.membership.join import Answer, JoinToken, Request, Role, answer_key, join_user, password_of, request_key
from tuna.queues import queue_name
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds without a heartbeat after which a member loses its access.
MEMBER_TIMEOUT_S = 3600.0
#: Expiry of an `Answer`.
_ANSWER_TTL_S = 60
#: Grace period between consuming a token and writing the answer, in which the token's Redis user is kept.
_ANSWER_GRACE_S = 5.0
_SEEN_INTERVAL_S = 30.0
#: Redis commands of Celery workers and of the scripts of leases, heartbeats and artifacts; keys and channels are
#: restricted besides.
_COMMANDS = (
    "auth hello ping select reset time multi exec discard watch unwatch "
    "get set getdel del exists expire pexpire ttl pttl mget incrby llen lpush rpush brpop rpop "
    "hget hset hdel hexists hlen sadd srem smembers sismember zadd zrem zscore zrange zrangebyscore zrevrangebyscore "
    "zcard xadd eval evalsha script|load publish"
)
_JOIN_COMMANDS = "auth hello ping select set getdel"
_INVALID_IN_PATTERN = re.compile(r"[\s\x00]")
_GLOB = re.compile(r"([*?\[\]\\])")


class Gate:
    """Membership of one database's workers; does nothing if the Redis client may not administer users."""

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
        """`evict` revokes a worker's leases and returns its chunks (`Leases.evict`); `settings`: settings that new
        members get besides their credentials; `admin`: a client that may administer users."""
        self._engine = engine
        self._client = client
        self._admin: Any = admin or client  # redis-py has no types for raw commands
        self._namespace = namespace
        self._settings = settings or {}
        self._member_timeout_s = member_timeout_s
        self._evict = evict
        self._board = HeartbeatBoard(client, namespace, lease_s)
        self._seen_at = 0.0
        self._idle = False  # reconcile at least once: an earlier coordinator may have left users behind
        self._can_administer = True

    def tick(self) -> None:
        """Answer join requests and reconcile Redis' ACL with SQL; a coordinator calls it about once a second."""
        with reading(self._engine) as connection:
            tokens = store.tokens(connection, only_open=True)
            members = store.members(connection)
        idle = not tokens and not members
        if not self._can_administer or (idle and self._idle):
            return
        try:
            self._answer_all(tokens)
            self._note_heartbeats(members)
            self.reconcile()
        except redis.exceptions.NoPermissionError:
            self._can_administer = idle  # without tokens and members the missing right does no harm yet
            if not idle:
                log.warning("join by token disabled", reason="this Redis user may not administer users")
        self._idle = idle

    def create_token(self, role: Role, ttl_s: float, url: str) -> JoinToken:
        """Create a token and its Redis user; `url` is how workers reach this Redis. Raises redis' NoPermissionError."""
        token = JoinToken(url, self._namespace, secrets.token_hex(6), secrets.token_urlsafe(24))
        with writing(self._engine) as connection:  # SQL first: `reconcile` deletes users without a row
            store.add_token(connection, token.id, token.digest, role, utc_now() + timedelta(seconds=ttl_s))
        try:
            self._make_user(join_user(self._namespace, token.id), _sha256(token.password), self._join_rules(token.id))
        except redis.RedisError:
            with writing(self._engine) as connection:
                store.revoke_token(connection, token.id)
            raise
        return token

    def _answer_all(self, tokens: Sequence[Any]) -> None:
        if not tokens:
            return
        texts = cast(list[Any], self._client.mget([request_key(self._namespace, token.id) for token in tokens]))
        for token, text in zip(tokens, texts, strict=True):
            if text is not None:
                answer = self._answer(token, text)
                if answer is not None:
                    self._client.set(answer_key(self._namespace, token.id), answer.model_dump_json(), ex=_ANSWER_TTL_S)
                self._client.delete(request_key(self._namespace, token.id))

    def _answer(self, token: Any, text: bytes) -> Answer | None:
        """The answer to a request; None if another coordinator consumed the token."""
        try:
            request = Request.model_validate_json(text)
        except ValidationError:
            return Answer(refusal="its request is not valid; install the same version of Tuna on both machines")
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
            password=_sha256(password),
            processes=request.facts.processes,
        )
        for attempt in retrying():
            with attempt, writing(self._engine) as connection:
                admitted = store.admit(connection, token.id, worker)
        if not admitted:
            return None
        self._grant_access(worker)
        log.info("worker joined", worker=worker.name, role=worker.role)
        settings = {"TUNA_WORKER_NAME": worker.name, "TUNA_NAMESPACE": self._namespace, **self._settings}
        return Answer(username=self._user(worker.name), password=password, settings=settings)

    def _refusal(self, token: Any, request: Request) -> str:
        if not secrets.compare_digest(hashlib.sha256(request.secret.encode()).hexdigest(), token.digest):
            return "its token is unknown"
        if request.role != token.role:
            return f"its token is for {token.role} workers"
        with reading(self._engine) as connection:
            known = store.known_environments(connection)
        if request.role == "eval" and not known.keys() & set(request.facts.environments):
            return "no session is for its environment; compare `tuna doctor` on both machines"
        if request.role == "compile" and not set(known.values()) & set(request.facts.toolchains):
            return "no session needs a toolchain that it has"
        return ""

    def reconcile(self) -> None:
        """Reconcile Redis' ACL users with the tokens and members in SQL."""
        there = {redis_client.text(name) for name in self._admin.execute_command("ACL USERS")}
        ours = {name for name in there if name.startswith(self._user(""))}
        with reading(self._engine) as connection:  # after Redis: a worker that joins meanwhile is then in SQL
            tokens = {join_user(self._namespace, row.id): row for row in store.tokens(connection)}
            members = {self._user(member.name): member for member in store.members(connection)}
        now = utc_now()
        open_tokens = {name: row for name, row in tokens.items() if self._needs_join_user(row, now, there)}
        for name, row in open_tokens.items():
            if name not in there:
                self._make_user(name, _sha256(password_of(row.digest)), self._join_rules(row.id))
        for name, member in members.items():
            if name not in there:
                self._grant_access(member)
            if member.state != "active":
                self.control(member.name, member.state)
        for name in ours - open_tokens.keys() - members.keys():
            self._admin.execute_command("ACL DELUSER", name)  # also closes its connections
            if name not in tokens:
                self.revoke_access(name.removeprefix(self._user("")))

    def _needs_join_user(self, token: Any, now: datetime, there: set[str]) -> bool:
        """True while the token can be used or its answer may still be fetched."""
        if token.revoked_at is None and token.used_at is None and token.expires_at > now:
            return True
        name = join_user(self._namespace, token.id)
        if token.used_at is None or name not in there:
            return False
        if token.used_at > now - timedelta(seconds=_ANSWER_GRACE_S):
            return True  # another coordinator may be about to answer
        return bool(self._client.exists(answer_key(self._namespace, token.id)))

    def revoke_access(self, worker: str) -> list[str]:
        """Delete a worker's Redis user and revoke its leases; returns its chunks."""
        self._admin.execute_command("ACL DELUSER", self._user(worker))
        chunks = self._evict(worker)
        for status in self._board.live():
            if status.name.startswith(f"{worker}:"):
                self._board.remove(status.name)
        self._client.delete(control_key(self._namespace, worker))
        log.warning("worker revoked", worker=worker, chunks=len(chunks))
        return chunks

    def control(self, worker: str, state: str) -> None:
        """Set a worker's wanted state: `cordoned`, `draining` or `active`."""
        key = control_key(self._namespace, worker)
        if state == "active":
            self._client.delete(key)
        else:
            self._client.set(key, state)

    def _note_heartbeats(self, members: Sequence[store.Member]) -> None:
        """Record members with a heartbeat as seen; those silent for `member_timeout_s` lose their access."""
        if not members or time.monotonic() - self._seen_at < min(_SEEN_INTERVAL_S, self._member_timeout_s / 4):
            return
        self._seen_at = time.monotonic()
        names = {status.name.rpartition(":")[0] for status in self._board.live()}
        seen = [member.name for member in members if member.name in names]
        limit = utc_now() - timedelta(seconds=self._member_timeout_s)
        gone = [member.name for member in members if member.name not in names and member.seen_at < limit]
        for attempt in retrying():
            with attempt, writing(self._engine) as connection:
                if seen:
                    store.seen(connection, seen)
                for name in gone:
                    store.set_state(connection, name, "gone")

    def _grant_access(self, worker: store.NewWorker) -> None:
        """Create a member's Redis user; if it was revoked meanwhile, delete it again, since that delete came too early."""
        self._make_user(self._user(worker.name), worker.password, self._rules(worker))
        with reading(self._engine) as connection:
            still = worker.name in {member.name for member in store.members(connection)}
        if not still:
            self.revoke_access(worker.name)

    def _make_user(self, name: str, secret: str, rules: Sequence[str]) -> None:
        """Create or replace a Redis user; `secret` is the SHA-256 of its password."""
        self._admin.execute_command("ACL SETUSER", name, "reset", "on", f"#{secret}", "resetchannels", *rules)

    def _user(self, worker: str) -> str:
        return f"tuna-{self._namespace}-{worker}"

    def _join_rules(self, token_id: str) -> list[str]:
        keys = [request_key(self._namespace, token_id), answer_key(self._namespace, token_id)]
        return [*(f"~{_escaped(key)}" for key in keys), *_allowed(_JOIN_COMMANDS)]

    def _rules(self, worker: store.NewWorker) -> list[str]:
        """ACL rules of a member: its own queues and heartbeat, and the keys that all workers of this database share."""
        prefix = f"tuna:{{{self._namespace}}}:"
        queues = [queue_name(False, toolchain, "") for toolchain in worker.toolchains]
        queues += [queue_name(True, "", environment) for environment in worker.environments]
        keys = [prefix + name for name in ("leases", "holders", "results", "workers", f"order:{worker.name}")]
        keys += broker_keys(queues)
        patterns = [*map(_escaped, keys), _escaped(f"{prefix}worker:{worker.name}:") + "*"]
        patterns.append(_escaped(f"{prefix}artifact") + "*")
        return [*(f"~{pattern}" for pattern in patterns), "&/*.celeryev*", *_allowed(_COMMANDS)]


def settings_of_members(settings: Settings, key: str) -> dict[str, str]:
    """Settings that new members get besides their credentials; `key` is the artifact signing key."""
    found = {"TUNA_ARTIFACTS_KEY": key, "TUNA_LEASE_S": str(settings.lease_s)}
    return found | ({"TUNA_ARTIFACTS_URL": settings.artifacts_url} if settings.artifacts_url else {})


def _allowed(commands: str) -> list[str]:
    return ["-@all", *(f"+{name}" for name in commands.split())]


def _escaped(key: str) -> str:
    """The key escaped as an ACL pattern; `?` replaces spaces, which a pattern cannot hold."""
    return _INVALID_IN_PATTERN.sub("?", _GLOB.sub(r"\\\1", key))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
