"""The gate: lets workers in that show a token, gives each a Redis user of its own, and puts out those that must go.

SQL says who is a member, Redis' access list follows it: users that are missing are made (after Redis was wiped, too),
those that SQL does not know any more are deleted, which ends their connections, and what they held is taken away.

Key, under `tuna:{<namespace>}:`

    order:<worker>  string  `cordoned` (take nothing new) or `draining` (and leave); read by the worker
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
from tuna.membership.heartbeat import HeartbeatBoard
from tuna.membership.join import Answer, JoinToken, Request, Role, answer_key, join_user, password_of, request_key
from tuna.queues import queue_name
from tuna.settings import Settings

log = structlog.get_logger(__name__)

#: A member that has not been heard of for so long loses its access.
GONE_S = 3600.0
_ANSWER_S = 60
#: Between using up a token and its answer.
_ANSWERING_S = 5.0
_SEEN_EVERY_S = 30.0
#: What a Celery worker and the scripts of leases, heartbeats and artifacts call; keys and channels are limited besides.
_COMMANDS = (
    "auth hello ping select reset time multi exec discard watch unwatch "
    "get set getdel del exists expire pexpire ttl pttl mget incrby llen lpush rpush brpop rpop "
    "hget hset hdel hexists hlen sadd srem smembers sismember zadd zrem zscore zrange zrangebyscore zrevrangebyscore "
    "zcard xadd eval evalsha script|load publish"
)
_JOIN_COMMANDS = "auth hello ping select set getdel"
_NOT_IN_PATTERNS = re.compile(r"[\s\x00]")
_GLOB = re.compile(r"([*?\[\]\\])")


class Gate:
    """The membership of one database's work; a client that may not administer users finds nothing to do here."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        namespace: str,
        lease_s: float,
        evict: Callable[[str], list[str]],
        settings: dict[str, str] | None = None,
        gone_s: float = GONE_S,
        admin: redis.Redis | None = None,
    ) -> None:
        """`evict` takes a worker's leases away and returns its chunks (`Leases.evict`); `settings`: what new members get
        besides their credentials; `admin`: a client that may administer users."""
        self._engine = engine
        self._client = client
        self._admin: Any = admin or client  # redis-py has no types for what it does not wrap
        self._namespace = namespace
        self._settings = settings or {}
        self._gone_s = gone_s
        self._evict = evict
        self._board = HeartbeatBoard(client, namespace, lease_s)
        self._seen_at = 0.0
        self._idle = False  # of what an earlier coordinator left, nothing may stay
        self._able = True

    def tick(self) -> None:
        """Answer who asks, and make the access list what SQL says; for a coordinator to call every second or so."""
        with reading(self._engine) as connection:
            tokens = store.tokens(connection, only_open=True)
            members = store.members(connection)
        idle = not tokens and not members
        if not self._able or (idle and self._idle):
            return
        try:
            self._answer_all(tokens)
            self._note_heartbeats(members)
            self.reconcile()
        except redis.exceptions.NoPermissionError:
            self._able = idle  # for now nobody wants to join
            if not idle:
                log.warning("workers cannot join by token: this Redis user may not administer users")
        self._idle = idle

    # -- tokens -------------------------------------------------------------------------------------------------------

    def create_token(self, role: Role, ttl_s: float, url: str) -> JoinToken:
        """A new token with its Redis user; `url` is how workers reach this Redis. Raises redis' NoPermissionError."""
        token = JoinToken(url, self._namespace, secrets.token_hex(6), secrets.token_urlsafe(24))
        with writing(self._engine) as connection:  # first: a user that SQL does not know is deleted
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
                    self._client.set(answer_key(self._namespace, token.id), answer.model_dump_json(), ex=_ANSWER_S)
                self._client.delete(request_key(self._namespace, token.id))

    def _answer(self, token: Any, text: bytes) -> Answer | None:
        """The answer to a request; None when another coordinator gives it."""
        try:
            request = Request.model_validate_json(text)
        except ValidationError:
            return Answer(refusal="its request cannot be understood; is its Tuna another version?")
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
            return "its token is not one of ours"
        if request.role != token.role:
            return f"its token is for {token.role} workers"
        with reading(self._engine) as connection:
            known = store.known_environments(connection)
        if request.role == "eval" and not known.keys() & set(request.facts.environments):
            return "no session is for its environment; compare `tuna doctor` on both machines"
        if request.role == "compile" and not set(known.values()) & set(request.facts.toolchains):
            return "no session needs a toolchain that it has"
        return ""

    # -- the access list ----------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Make Redis' users those that SQL says."""
        there = {redis_client.text(name) for name in self._admin.execute_command("ACL USERS")}
        ours = {name for name in there if name.startswith(self._user(""))}
        with reading(self._engine) as connection:  # after the look at Redis: who joins meanwhile is in it
            tokens = {join_user(self._namespace, row.id): row for row in store.tokens(connection)}
            members = {self._user(member.name): member for member in store.members(connection)}
        now = utc_now()
        asking = {name: row for name, row in tokens.items() if self._may_ask(row, now, there)}
        for name, row in asking.items():
            if name not in there:
                self._make_user(name, _sha256(password_of(row.digest)), self._join_rules(row.id))
        for name, member in members.items():
            if name not in there:
                self._grant_access(member)
            if member.state != "active":
                self.control(member.name, member.state)
        for name in ours - asking.keys() - members.keys():
            self._admin.execute_command("ACL DELUSER", name)  # ends its connections too
            if name not in tokens:
                self.revoke_access(name.removeprefix(self._user("")))

    def _may_ask(self, token: Any, now: datetime, there: set[str]) -> bool:
        if token.revoked_at is None and token.used_at is None and token.expires_at > now:
            return True
        name = join_user(self._namespace, token.id)
        if token.used_at is None or name not in there:
            return False
        if token.used_at > now - timedelta(seconds=_ANSWERING_S):
            return True  # another coordinator may be about to answer
        return bool(self._client.exists(answer_key(self._namespace, token.id)))

    def revoke_access(self, worker: str) -> list[str]:
        """Take the access and the chunks of a worker away; returns the chunks."""
        self._admin.execute_command("ACL DELUSER", self._user(worker))
        chunks = self._evict(worker)
        for status in self._board.live():
            if status.name.startswith(f"{worker}:"):
                self._board.remove(status.name)
        self._client.delete(control_key(self._namespace, worker))
        log.warning("worker revoked", worker=worker, chunks=len(chunks))
        return chunks

    def control(self, worker: str, state: str) -> None:
        """Tell a worker that it is `cordoned` or `draining`, or `active` again."""
        key = control_key(self._namespace, worker)
        if state == "active":
            self._client.delete(key)
        else:
            self._client.set(key, state)

    def _note_heartbeats(self, members: Sequence[store.Member]) -> None:
        """Remember whom we hear of; who was not heard of for long loses its access."""
        if not members or time.monotonic() - self._seen_at < min(_SEEN_EVERY_S, self._gone_s / 4):
            return
        self._seen_at = time.monotonic()
        names = {status.name.rpartition(":")[0] for status in self._board.live()}
        seen = [member.name for member in members if member.name in names]
        limit = utc_now() - timedelta(seconds=self._gone_s)
        gone = [member.name for member in members if member.name not in names and member.seen_at < limit]
        for attempt in retrying():
            with attempt, writing(self._engine) as connection:
                if seen:
                    store.seen(connection, seen)
                for name in gone:
                    store.set_state(connection, name, "gone")

    def _grant_access(self, worker: store.NewWorker) -> None:
        """Make the user of a member, unless somebody revoked it meanwhile: then their delete came before our make."""
        self._make_user(self._user(worker.name), worker.password, self._rules(worker))
        with reading(self._engine) as connection:
            still = worker.name in {member.name for member in store.members(connection)}
        if not still:
            self.revoke_access(worker.name)

    def _make_user(self, name: str, secret: str, rules: Sequence[str]) -> None:
        """`secret`: SHA-256 of the password."""
        self._admin.execute_command("ACL SETUSER", name, "reset", "on", f"#{secret}", "resetchannels", *rules)

    def _user(self, worker: str) -> str:
        return f"tuna-{self._namespace}-{worker}"

    def _join_rules(self, token_id: str) -> list[str]:
        keys = [request_key(self._namespace, token_id), answer_key(self._namespace, token_id)]
        return [*(f"~{_literally(key)}" for key in keys), *_allowed(_JOIN_COMMANDS)]

    def _rules(self, worker: store.NewWorker) -> list[str]:
        """What a member may do: its own queues, its own heartbeat, and what all workers of this database share."""
        prefix = f"tuna:{{{self._namespace}}}:"
        queues = [queue_name(False, toolchain, "") for toolchain in worker.toolchains]
        queues += [queue_name(True, "", environment) for environment in worker.environments]
        keys = [prefix + name for name in ("leases", "holders", "results", "workers", f"order:{worker.name}")]
        keys += broker_keys(queues)
        patterns = [*map(_literally, keys), _literally(f"{prefix}worker:{worker.name}:") + "*"]
        patterns.append(_literally(f"{prefix}artifact") + "*")
        return [*(f"~{pattern}" for pattern in patterns), "&/*.celeryev*", *_allowed(_COMMANDS)]


def settings_of_members(settings: Settings, key: str) -> dict[str, str]:
    """What new members are told besides their credentials; `key` signs artifacts."""
    told = {"TUNA_ARTIFACTS_KEY": key, "TUNA_LEASE_S": str(settings.lease_s)}
    return told | ({"TUNA_ARTIFACTS_URL": settings.artifacts_url} if settings.artifacts_url else {})


def control_key(namespace: str, worker: str) -> str:
    """Where a worker finds what it is told to do."""
    return f"tuna:{{{namespace}}}:order:{worker}"


def _allowed(commands: str) -> list[str]:
    return ["-@all", *(f"+{name}" for name in commands.split())]


def _literally(key: str) -> str:
    """The key as an access-list pattern; these cannot hold spaces."""
    return _NOT_IN_PATTERNS.sub("?", _GLOB.sub(r"\\\1", key))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
