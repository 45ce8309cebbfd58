"""Joining: a worker presents a one-time token and gets its own Redis user.

`tuna token create` prints `redis://host:port/db#NAMESPACE.ID.SECRET`. Its Redis user
`tuna-NAMESPACE-join-ID`, whose password is derived from SECRET, may access two keys and nothing
else:

    tuna:{<NAMESPACE>}:join:<ID>:request  string  a `Request`, written by the worker
    tuna:{<NAMESPACE>}:join:<ID>:answer   string  an `Answer`, written by a coordinator

The answer holds settings for the worker's processes. They stay in environment variables: never on a
disk, never on a command line.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuna import tls
from tuna.errors import BadInput, ServiceError
from tuna.services import redis_client

Role = Literal["compile", "eval"]
#: Expiry of an unanswered request.
REQUEST_TTL_S = 60
#: A longer request is not even read.
MAX_REQUEST_BYTES = 65_536
_POLL_S = 0.2
#: Seconds for which errors are retried after a first success: Redis may be away, and has no users
#: after a restart until a coordinator makes them again.
_OUTAGE_S = 10.0
#: Chunks that one member may do at a time; of further processes it has no use.
MAX_PROCESSES = 256
#: What a refusal begins with where no session is for any of a worker's environments.
NO_SESSION = "no session is for its environment"
_TOKEN = re.compile(r"([\w-]{1,32})\.([0-9a-f]{12})\.([\w-]{20,128})\Z", re.ASCII)


#: Without control characters, and those that change the order of what is printed.
_Printable = Annotated[str, Field(max_length=255, pattern=r"^[^\p{Cc}\p{Cf}]*$")]
#: What `Environment.machine_key` makes.
_EnvironmentKey = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
#: Words with single blanks between them.
_Toolchain = Annotated[str, Field(max_length=255, pattern=r"^[^\s\p{C}]+( [^\s\p{C}]+)*$")]


class Facts(BaseModel):
    """A joining worker's description of itself. A coordinator compares keys and toolchains with
    those of sessions as they are: none is a pattern."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    host: _Printable
    pid: int = Field(ge=0, lt=1 << 31)
    device: _Printable = ""
    environments: tuple[_EnvironmentKey, ...] = Field(
        (), max_length=64
    )  #: keys of the environments that it measures in
    toolchains: tuple[_Toolchain, ...] = Field((), max_length=64)
    processes: int = Field(1, ge=1, le=MAX_PROCESSES)  #: chunks that it can do at a time


class Request(BaseModel):
    """A worker's request to join."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    secret: str = Field(max_length=128)
    role: Role
    facts: Facts


class Answer(BaseModel):
    """A coordinator's answer; `refusal` is empty if the worker joined."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    refusal: str = ""
    username: str = ""
    password: str = ""
    settings: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class JoinToken:
    """A join token as passed from person to person; its `repr` hides the secret."""

    url: str  #: of Redis, without user and password
    namespace: str
    id: str
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Parse `redis://host:port/db#NAMESPACE.ID.SECRET`; raises BadInput, without the secret in
        its message."""
        url, _, token = text.strip().partition("#")
        parts, found = urlsplit(url), _TOKEN.match(token)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname or not found:
            raise BadInput(
                "This is not a join token.",
                hint="give the line that `tuna token create` printed: redis://host:6379/0#NAME.ID.SECRET",
            )
        try:
            return cls(tls.checked(url), *found.groups())
        except ValueError as error:
            raise BadInput(f"The URL of this join token is not usable: {error}.") from None

    @classmethod
    def parse_client(cls, text: str) -> tuple[JoinToken, JoinToken]:
        """The two tokens, for compile and for eval, of a line that `client_line` made; raises
        BadInput."""
        start, mark, other = text.strip().rpartition(",")
        if not mark:
            raise BadInput(
                "This is not the line of a client, which has two tokens.",
                hint="give the line that `tuna token create --role client` printed",
            )
        first = cls.parse(start)
        return first, cls.parse(f"{first.url}#{other}")

    def full(self) -> str:
        """The whole line, secret included."""
        return f"{self.url}#{self.namespace}.{self.id}.{self.secret}"

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the secret, as stored in SQL."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    @property
    def password(self) -> str:
        """Password of its Redis user; the secret cannot be derived from it."""
        return password_of(self.digest)


def client_line(compiles: JoinToken, measures: JoinToken) -> str:
    """Two tokens of one Redis in one line, for a client that has a worker of each role."""
    return f"{compiles.full()},{measures.full().rpartition('#')[2]}"


def password_of(digest: str) -> str:
    """The password of a token's Redis user, derived from the digest in SQL."""
    return hashlib.sha256(f"redis {digest}".encode()).hexdigest()


def join_user(namespace: str, token_id: str) -> str:
    """Name of a token's Redis user."""
    return f"tuna-{namespace}-join-{token_id}"


def request_key(namespace: str, token_id: str) -> str:
    """Redis key of a token's `Request`."""
    return f"tuna:{{{namespace}}}:join:{token_id}:request"


def answer_key(namespace: str, token_id: str) -> str:
    """Redis key of a token's `Answer`."""
    return f"tuna:{{{namespace}}}:join:{token_id}:answer"


class JoinRefused(BadInput):
    """A coordinator refused a worker's request to join; its token can be used again."""


def join(url_with_token: str, role: Role, facts: Facts, timeout_s: float = 600.0) -> dict[str, str]:
    """Join; returns the `TUNA_*` settings for this worker's processes, secrets included.

    Waits up to `timeout_s` for a coordinator to answer. Raises JoinRefused, BadInput for a token
    that cannot be used (again), ServiceError if there is no answer.
    """
    return join_with(JoinToken.parse(url_with_token), role, facts, timeout_s)


def join_with(
    token: JoinToken, role: Role, facts: Facts, timeout_s: float = 600.0
) -> dict[str, str]:
    """The same with a parsed token."""
    client = redis_client.retrying_client(
        token.url, username=join_user(token.namespace, token.id), password=token.password
    )
    request = Request(secret=token.secret, role=role, facts=facts).model_dump_json()
    deadline = time.monotonic() + timeout_s
    patient_until = 0.0
    try:
        while time.monotonic() < deadline:
            text = None
            try:
                client.set(
                    request_key(token.namespace, token.id), request, ex=REQUEST_TTL_S, nx=True
                )
                patient_until = min(time.monotonic() + _OUTAGE_S, deadline)
                time.sleep(_POLL_S)
                text = client.getdel(answer_key(token.namespace, token.id))
            except redis.RedisError:
                if time.monotonic() >= patient_until:
                    raise
                time.sleep(_POLL_S)
            if isinstance(text, bytes):
                return _settings(token, Answer.model_validate_json(text))
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
        raise BadInput(
            "The token is unknown, was used before, or has expired.", hint=_ANOTHER
        ) from None
    except (redis.RedisError, OSError, ValidationError) as error:
        parts = urlsplit(token.url)
        raise ServiceError(
            f"Redis at {parts.hostname}:{parts.port or 6379} cannot be used: {error}"
        ) from None
    finally:
        client.close()
    raise ServiceError(
        "No coordinator answered the join request.",
        hint="start one where the database is: `tuna enqueue --session-id ID`",
    )


_ANOTHER = "make another one: `tuna token create --role ROLE`"


def _settings(token: JoinToken, answer: Answer) -> dict[str, str]:
    if answer.refusal:
        raise JoinRefused(f"Join refused: {answer.refusal}.")
    parts = urlsplit(token.url)
    user = f"{quote(answer.username, safe='')}:{quote(answer.password, safe='')}"
    url = urlunsplit((parts.scheme, f"{user}@{parts.netloc}", parts.path, parts.query, ""))
    return {"TUNA_BROKER_URL": url, "TUNA_REDIS_URL": url, **answer.settings}


def without_secrets(url: str) -> str:
    """A Redis URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(
        (parts.scheme, unquote(parts.netloc.rpartition("@")[2]), parts.path, parts.query, "")
    )


def token_from_environment(environ: dict[str, str] | None = None) -> str | None:
    """The token in TUNA_JOIN, which is removed from the environment so that no child process sees
    it."""
    return (os.environ if environ is None else environ).pop("TUNA_JOIN", None)
