"""The remote worker's side of the gateway: one connection for each of its processes does what own
workers do with Redis."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Callable
from urllib.parse import quote

import stamina
import structlog

from tuna.api import Settings, WorkerStatus
from tuna.artifacts.copies import ArtifactCache
from tuna.errors import ServiceError, StorageFull, StoreUnavailable
from tuna.libraries.context import ArtifactStore
from tuna.queue.messages import Chunk
from tuna.workers.link import Elsewhere
from tuna_remote.gateway.https_client import (
    AccessLost,
    GatewayAnswer,
    GatewayClient,
    read_answer,
    why_refused,
)
from tuna_remote.gateway.protocol import (
    DIGEST,
    MAX_ARTIFACT_BYTES,
    RENEW_S,
    Handed,
    Heartbeat,
    NextRequest,
    Renewed,
    RenewRequest,
)
from tuna_remote.gateway.tokens import Credentials

log = structlog.get_logger(__name__)

#: How long a full artifact store is waited for.
_FULL_S = 300.0
#: A chunk that is asked for waits so long for the next one.
WAIT_S = 10.0


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
            log.error("report refused", reason=why_refused(answer))
        self.lost = self.lost or answer.status != 204
        return not self.lost

    def finish(self, entry: str) -> bool:
        """Append the last `entry` and release the lease."""
        self._ended = self.report(entry)
        return self._ended

    def abandon(self, entry: str) -> None:
        """Append nothing: the gateway knows what was stored for the chunk."""

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
                    raise StorageFull(why_refused(answer))
        if answer.status == 413:
            raise StorageFull(f"The gateway does not take the artifact: {why_refused(answer)}.")
        if answer.status != 204:
            raise StoreUnavailable(f"The gateway refused an artifact: {why_refused(answer)}.")
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

    def find_build(self, key: str) -> bytes | None:
        """None: a remote worker builds for itself."""
        return None

    def record_build(self, key: str, digest: str) -> None:
        """Record nothing: others would take its builds without a signature of an own worker."""

    def _sent(self, method: str, path: str, data: bytes | None = None) -> GatewayAnswer:
        try:
            return self._client.send(method, path, body=data)
        except AccessLost as error:
            raise StoreUnavailable(str(error)) from None
        except ServiceError as error:
            raise StoreUnavailable(str(error), hint=error.hint) from None


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
        self.is_idle = False  #: True if the gateway knows of nothing to do for this worker
        self._on_state = on_state
        self._leases: dict[str, RemoteLease] = {}  #: lease of each chunk, by its id
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
        self.is_idle = False
        request = NextRequest(id=lease, process=self.process, wait_s=wait_s)
        answer = self.client.send("POST", "/next", body=request)
        self.is_idle = answer.status == 404
        if answer.status in (204, 404):
            return None
        handed = read_answer(Handed, answer)
        self._leases[handed.id] = RemoteLease(self, lease, handed.id, begun=handed.begun)
        return handed

    def announce(self, status: WorkerStatus) -> None:
        """Publish `status` with the next renewal."""
        self.status = status

    def remove(self, name: str) -> None:
        """Tell the gateway that this process ends."""
        self.leave()

    def store(self, chunk: Chunk) -> ArtifactStore:
        """The artifacts of a chunk."""
        path = self._leases[chunk.id].path()
        return RemoteArtifacts(self.client, path, self._cache)

    def lease(self, chunk: Chunk, worker: str) -> RemoteLease:
        """The lease by which this process was handed the chunk."""
        return self._leases[chunk.id]

    def elsewhere(self, chunk: Chunk, place: str) -> Elsewhere:
        """Live workers at other places, as the gateway sees them."""
        path = self._leases[chunk.id].path(f"/elsewhere?place={quote(place, safe='')}")
        try:
            answer = self.client.send("GET", path)
            if answer.status == 200:
                return read_answer(Elsewhere, answer)
        except (AccessLost, ServiceError) as error:
            log.debug("no news of other workers", reason=str(error))
        return Elsewhere()

    def forget(self, lease: RemoteLease) -> None:
        """Renew a lease no more."""
        self._leases.pop(lease.chunk, None)

    def forfeit(self, lease: str, timeout_s: float = 5.0) -> None:
        """Let a lease expire at once, if this worker holds it: the process is dead, or gives its
        chunk up."""
        self._tell("DELETE", f"/leases/{self.process}/{lease}", timeout_s)

    def return_lease(self, lease: str) -> None:
        """Return the chunk of a lease, uncharged, if this worker holds it."""
        self._tell("POST", f"/leases/{self.process}/{lease}/return")

    def leave(self) -> None:
        """Tell the gateway that this process ends."""
        self._tell("POST", f"/leave/{self.process}")

    def _tell(self, method: str, path: str, timeout_s: float = 2.0) -> None:
        """Send what a gateway finds out by itself where it does not answer now."""
        with contextlib.suppress(AccessLost, ServiceError):
            self.client.send(method, path, timeout_s=timeout_s)

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
        held = {lease.id: lease for lease in list(self._leases.values())}
        said = dataclasses.asdict(self.status) if self.status else None
        request = RenewRequest(
            process=self.process,
            heartbeat=None if said is None else Heartbeat.model_validate(said),
            leases=tuple(held),
        )
        answer = self.client.send("POST", "/renew", body=request, timeout_s=RENEW_S)
        if answer.status != 200:
            raise ServiceError(why_refused(answer))
        renewed = read_answer(Renewed, answer)
        for name in renewed.lost:
            if name in held:
                held[name].lost = True
        self._set_state(renewed.state)

    def _set_state(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._on_state(state)
