"""The remote worker's side of the gateway: it joins, and one connection for each of its processes
does what own workers do with Redis."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import stamina
import structlog
from pydantic import BaseModel, ValidationError

from tuna.artifacts.store import ArtifactCache
from tuna.errors import BadInput, ServiceError, StorageFull, StoreUnavailable
from tuna.gateway.protocol import (
    DIGEST,
    MAX_ARTIFACT_BYTES,
    NO_SESSION,
    RENEW_S,
    ElsewhereAnswer,
    Facts,
    Handed,
    Heartbeat,
    Joined,
    JoinRequest,
    NextRequest,
    Refusal,
    Renewed,
    RenewRequest,
    Role,
)
from tuna.gateway.tokens import Credentials, Gateway, JoinToken, PinMismatch, pinned_context
from tuna.libraries.context import ArtifactStore
from tuna.queue.heartbeat import Board, WorkerStatus
from tuna.queue.messages import Chunk
from tuna.settings import Settings
from tuna.workers.link import Elsewhere

log = structlog.get_logger(__name__)

#: Seconds for a connection, and for an answer beyond what a long poll waits.
_CONNECT_S, _ANSWER_S = 5.0, 60.0
#: How long an outage of the gateway is retried, as own workers retry one of Redis.
_OUTAGE_S = 600.0
#: How long a full artifact store is waited for.
_FULL_S = 300.0
#: How long a join waits for a gateway.
_JOIN_S = 30.0
#: A chunk that is asked for waits so long for the next one.
WAIT_S = 10.0
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_ANOTHER = "make another one: `tuna token create --role ROLE`"
_Answer = TypeVar("_Answer", bound=BaseModel)


class AccessLost(Exception):
    """The worker was revoked, or was silent for an hour."""


class JoinRefused(BadInput):
    """A gateway refused a worker's request to join; its token can be used again."""


class NoSession(JoinRefused):
    """No session is for any of the worker's environments."""


class _Later(Exception):
    """The request may succeed later."""


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    content: bytes


class GatewayClient:
    """Requests to a gateway; those that fail for a while are repeated. Each thread has a connection
    of its own."""

    def __init__(self, gateway: Gateway, bearer: str = "") -> None:
        self._gateway = gateway
        parts = urlsplit(gateway.url)
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._tls = pinned_context(gateway.pin)
        self._local = threading.local()

    def send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | bytes | str | None = None,
        timeout_s: float = _OUTAGE_S,
    ) -> Answer:
        """Send a request, for up to `timeout_s` again where it may succeed later.

        Raises ServiceError if it never does or the server's key is another one, AccessLost.
        """
        text = body.model_dump_json() if isinstance(body, BaseModel) else body
        content = text.encode() if isinstance(text, str) else text
        try:
            for attempt in stamina.retry_context(
                on=_Later, attempts=None, timeout=timeout_s, wait_max=2.0
            ):
                with attempt:
                    return self._once(method, path, content)
        except _Later as error:
            raise ServiceError(
                f"The gateway at {self._gateway.url} does not answer: {error}.",
                hint="start one where the database is: `tuna gateway`",
            ) from None
        raise AssertionError("not reached")

    def _once(self, method: str, path: str, content: bytes | None) -> Answer:
        try:
            connection = self._connection()
            connection.request(method, f"/v1{path}", content, self._headers)
            found = connection.getresponse()
            answer = Answer(found.status, found.read())
        except PinMismatch:
            raise ServiceError(
                f"The server at {self._gateway.url} is not the gateway of the token: its key is"
                " another one. Nothing was sent to it.",
                hint="check the address; a gateway of another database has another key",
            ) from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _Later(str(error) or type(error).__name__) from error
        if answer.status == 401:
            raise AccessLost(_why(answer))
        if answer.status in _LATER:
            raise _Later(_why(answer))
        return answer

    def _connection(self) -> http.client.HTTPSConnection:
        """This thread's connection, open."""
        made: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        if made is None:
            made = http.client.HTTPSConnection(
                self._host, self._port, context=self._tls, timeout=_CONNECT_S
            )
            made.connect()
            made.sock.settimeout(_ANSWER_S)
            made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.auto_open = 0  # what the server closed is opened here, with its own time limit
            self._local.connection = made
        return made

    def close(self) -> None:
        """Close this thread's connection."""
        made = getattr(self._local, "connection", None)
        self._local.connection = None
        if made is not None:
            made.close()


def _why(answer: Answer) -> str:
    with contextlib.suppress(ValidationError):
        return Refusal.model_validate_json(answer.content).error
    return f"HTTP status {answer.status}"


def _read(model: type[_Answer], answer: Answer) -> _Answer:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError:
        raise ServiceError(
            "The gateway's answer cannot be read.",
            hint="install the same version of Tuna on both machines",
        ) from None


def join(token: JoinToken, role: Role, facts: Facts, timeout_s: float = _JOIN_S) -> Credentials:
    """Join; returns the credentials of this worker.

    Raises JoinRefused, BadInput for a token that cannot be used (again), ServiceError if no gateway
    answers within `timeout_s`, or one with another key.
    """
    secret = secrets.token_urlsafe(32)
    request = JoinRequest(
        token=token.id, token_secret=token.secret, secret=secret, role=role, facts=facts
    )
    with contextlib.closing(GatewayClient(token.gateway)) as client:
        answer = client.send("POST", "/join", body=request, timeout_s=timeout_s)
    if answer.status == 403:
        raise BadInput("The token is unknown, was used before, or has expired.", hint=_ANOTHER)
    if answer.status != 200:
        why = _why(answer)
        refused = NoSession if why.startswith(NO_SESSION) else JoinRefused
        raise refused(f"Join refused: {why}.")
    return Credentials(token.gateway, _read(Joined, answer).name, secret)


class RemoteLease:
    """The lease of one chunk that this process holds by a gateway."""

    def __init__(self, link: GatewayLink, lease: str, chunk: str, *, begun: bool) -> None:
        self.id = lease
        self.chunk = chunk
        self.lost = False
        self._link = link
        self._begun = begun
        self._ended = False

    def take(self, entry: str) -> bool:
        """Report that the chunk is begun, unless the gateway has."""
        return not self.lost and (self._begun or self.report(entry))

    def renew(self) -> bool:
        """False if the lease is lost, as the link found out: it renews all leases of the process at
        once."""
        return not self.lost

    def report(self, entry: str) -> bool:
        """Append `entry` to the results, if still the holder."""
        try:
            answer = self._link.client.send("POST", self.path("/report"), body=entry)
        except (AccessLost, ServiceError) as error:
            log.warning("report not delivered", reason=str(error))
            self.lost = True
            return False
        if answer.status not in (204, 409):
            log.error("report refused", reason=_why(answer))
        self.lost = self.lost or answer.status != 204
        return not self.lost

    def finish(self, entry: str) -> bool:
        """Append the last `entry` and release the lease."""
        self._ended = self.report(entry)
        return self._ended

    def close(self) -> None:
        """Give the chunk up, unless it was finished."""
        self._link.forget(self)
        if not self._ended and not self.lost:
            self._link.forfeit(self.id)

    def path(self, rest: str = "") -> str:
        """A path under that of the lease."""
        return f"/leases/{self._link.process}/{self.id}{rest}"


class RemoteArtifacts:
    """The artifacts of one chunk, by their SHA-256; the gateway signs and verifies them."""

    def __init__(self, client: GatewayClient, path: str, cache: ArtifactCache) -> None:
        self._client = client
        self._path = path
        self._cache = cache

    def put(self, data: bytes) -> str:
        """Store `data`; returns its SHA-256. Waits for space; raises StorageFull,
        StoreUnavailable."""
        if len(data) > MAX_ARTIFACT_BYTES:
            raise StorageFull(f"A gateway takes artifacts up to {MAX_ARTIFACT_BYTES >> 20} MiB.")
        digest = hashlib.sha256(data).hexdigest()
        path = f"{self._path}/artifacts/{digest}"
        for attempt in stamina.retry_context(
            on=StorageFull, attempts=None, timeout=_FULL_S, wait_max=5.0
        ):
            with attempt:
                answer = self._sent("PUT", path, data)
                if answer.status == 507:
                    raise StorageFull(_why(answer))
        if answer.status == 413:
            raise StorageFull(f"The gateway does not take the artifact: {_why(answer)}.")
        if answer.status != 204:
            raise StoreUnavailable(f"The gateway refused an artifact: {_why(answer)}.")
        self._cache.put(digest, data)
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes, whose hash is checked; raises KeyError if they are gone."""
        if not DIGEST.fullmatch(digest):
            raise KeyError(digest)
        if (data := self._cache.get(digest)) is not None:
            return data
        answer = self._sent("GET", f"{self._path}/artifacts/{digest}")
        if answer.status != 200 or hashlib.sha256(answer.content).hexdigest() != digest:
            raise KeyError(digest)
        self._cache.put(digest, answer.content)
        return answer.content

    def _sent(self, method: str, path: str, data: bytes | None = None) -> Answer:
        try:
            return self._client.send(method, path, body=data)
        except AccessLost as error:
            raise StoreUnavailable(str(error)) from None
        except ServiceError as error:
            raise StoreUnavailable(str(error), hint=error.hint) from None


class _Board:
    """Where the status of this process waits for the next renewal."""

    def __init__(self, link: GatewayLink) -> None:
        self._link = link

    def announce(self, status: WorkerStatus) -> None:
        """Publish `status` with the next renewal."""
        self._link.status = status

    def remove(self, name: str) -> None:
        """Tell the gateway that this process ends."""
        self._link.leave()


class GatewayLink:
    """The connection of one process of a remote worker, with a thread that renews its leases."""

    def __init__(
        self,
        settings: Settings,
        process: int,
        on_state: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_state` is called with the wanted state when it changes: `active`, `cordoned`,
        `draining`, or `revoked` when the worker has no access any more."""
        assert settings.gateway is not None
        credentials = Credentials.parse(settings.gateway.get_secret_value())
        self.client = GatewayClient(credentials.gateway, f"{credentials.name}.{credentials.secret}")
        self.process = process
        self.status: WorkerStatus | None = None
        self.state = "active"
        self._on_state = on_state
        self._leases: dict[str, RemoteLease] = {}
        self._by_chunk: dict[str, RemoteLease] = {}
        self._cache = ArtifactCache(
            settings.home / "cache" / "artifacts" / "gateway", settings.cache_mib << 20
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="renewals", daemon=True)

    def start(self) -> GatewayLink:
        """Start the thread that renews."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the thread and close the connections."""
        self._stop.set()
        self._thread.join()
        self.client.close()

    def next(self, lease: str, wait_s: float = WAIT_S) -> Handed | None:
        """Ask for a chunk, which is then held by the id `lease`; None if there is none for now.

        Raises AccessLost, ServiceError.
        """
        request = NextRequest(id=lease, process=self.process, wait_s=wait_s)
        answer = self.client.send("POST", "/next", body=request)
        if answer.status == 204:
            return None
        handed = _read(Handed, answer)
        held = RemoteLease(self, lease, handed.id, begun=handed.begun)
        self._by_chunk[handed.id] = self._leases[lease] = held
        return handed

    def boards(self) -> Sequence[Board]:
        """The gateway's."""
        return [_Board(self)]

    def store(self, chunk: Chunk) -> ArtifactStore:
        """The artifacts of a chunk."""
        path = self._by_chunk[chunk.id].path()
        return RemoteArtifacts(self.client, path, self._cache)

    def lease(self, chunk: Chunk, worker: str) -> RemoteLease:
        """The lease by which this process was handed the chunk."""
        return self._by_chunk[chunk.id]

    def elsewhere(self, chunk: Chunk, place: str) -> Elsewhere:
        """Live workers at other places, as the gateway sees them."""
        path = self._by_chunk[chunk.id].path(f"/elsewhere?place={quote(place, safe='')}")
        try:
            answer = self.client.send("GET", path)
            if answer.status == 200:
                found = _read(ElsewhereAnswer, answer)
                return Elsewhere(found.others, found.succeeds)
        except (AccessLost, ServiceError) as error:
            log.debug("no news of other workers", reason=str(error))
        return Elsewhere(False, None)

    def forget(self, lease: RemoteLease) -> None:
        """Renew a lease no more."""
        self._leases.pop(lease.id, None)
        self._by_chunk.pop(lease.chunk, None)

    def forfeit(self, lease: str, timeout_s: float = 5.0) -> None:
        """Let a lease expire at once, if this worker holds it: the process is dead, or gives its
        chunk up."""
        with contextlib.suppress(AccessLost, ServiceError):
            self.client.send("DELETE", f"/leases/{self.process}/{lease}", timeout_s=timeout_s)

    def return_lease(self, lease: str) -> None:
        """Return the chunk of a lease, uncharged, if this worker holds it."""
        path = f"/leases/{self.process}/{lease}/return"
        with contextlib.suppress(AccessLost, ServiceError):
            self.client.send("POST", path, timeout_s=2.0)

    def leave(self) -> None:
        """Tell the gateway that this process ends."""
        with contextlib.suppress(AccessLost, ServiceError):
            self.client.send("POST", f"/leave/{self.process}", timeout_s=2.0)

    def _beat(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                self._renew()
            except AccessLost as error:
                log.error("worker revoked", reason=str(error))
                for lease in list(self._leases.values()):
                    lease.lost = True
                self._set_state("revoked")
                return
            except ServiceError as error:
                log.warning("heartbeat failed", error=str(error))

    def _renew(self) -> None:
        held = dict(self._leases)
        said = dataclasses.asdict(self.status) if self.status else None
        request = RenewRequest(
            process=self.process,
            heartbeat=None if said is None else Heartbeat.model_validate(said),
            leases=tuple(held),
        )
        answer = self.client.send("POST", "/renew", body=request, timeout_s=RENEW_S)
        if answer.status != 200:
            raise ServiceError(_why(answer))
        renewed = _read(Renewed, answer)
        for name in renewed.lost:
            if name in held:
                held[name].lost = True
        self._set_state(renewed.state)

    def _set_state(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._on_state(state)


def facts_of(variables: Mapping[str, Any]) -> Facts:
    """Facts of a joining worker; raises BadInput for what a gateway would not take."""
    try:
        return Facts(**variables)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise BadInput(
            f"This machine's {first['loc'][0]} cannot be sent to a gateway: {first['msg']}."
        ) from None
