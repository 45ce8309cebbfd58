"""The messages between a remote worker and a gateway: JSON over HTTPS, under `/v1`.

    POST   /join                                  `JoinRequest` -> `Joined`
    POST   /next                                  `NextRequest` -> `Handed`, or after a while 204,
                                                  or 404: no job is to come either
    POST   /renew                                 `RenewRequest` -> `Renewed`; each second
    POST   /leave/{process}                       the process has ended
    POST   /leases/{process}/{id}/report          a `queue.messages.Report`
    POST   /leases/{process}/{id}/return          the worker ends: its chunk is returned, uncharged
    DELETE /leases/{process}/{id}                 the process that held the lease is dead
    GET    /leases/{process}/{id}/elsewhere       a `workers.link.Elsewhere`
    GET    /leases/{process}/{id}/artifacts/{sha256}
    PUT    /leases/{process}/{id}/artifacts/{sha256}

All but `/join` carry `Authorization: Bearer NAME.SECRET`. 401: the worker has no access (any
longer); 409: the lease is lost; 413, 422, 429: what no working client sends; 503, 507: later.
The id of a lease is the client's, so that a request whose answer was lost can be repeated.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["compile", "eval"]
#: Chunks that one remote worker may run at a time.
MAX_PROCESSES = 256
#: Longest wait for a chunk that a client may ask for.
MAX_WAIT_S = 20.0
#: The start of a refusal where no session is for any of a worker's environments.
NO_SESSION = "no session is for its environment"
#: Size of an artifact, at most.
MAX_ARTIFACT_BYTES = 100 << 20
#: Seconds between two renewals.
RENEW_S = 1.0

_Text = Annotated[str, Field(max_length=255)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Moment = Annotated[float, Field(ge=0, lt=2**33, allow_inf_nan=False)]
#: Without control characters, and those that change the order of what is printed.
_Printable = Annotated[str, Field(max_length=255, pattern=r"^[^\p{Cc}\p{Cf}]*$")]
#: What `Environment.machine_key` makes.
_EnvironmentKey = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
#: Words with single blanks between them.
_Toolchain = Annotated[str, Field(max_length=255, pattern=r"^[^\s\p{C}]+( [^\s\p{C}]+)*$")]
#: The SHA-256 of an artifact.
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
LeaseId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
ProcessId = Annotated[int, Field(ge=0, lt=2**31)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Facts(_Body):
    """A joining worker's description of itself. A gateway compares keys and toolchains with those
    of sessions as they are: none is a pattern."""

    host: _Printable
    device: _Printable = ""
    #: Keys of the environments that it measures in.
    environments: tuple[_EnvironmentKey, ...] = Field((), max_length=64)
    toolchains: tuple[_Toolchain, ...] = Field((), max_length=64)
    processes: int = Field(1, ge=1, le=MAX_PROCESSES)  #: chunks that it can run at a time


class JoinRequest(_Body):
    """A worker's request to join."""

    token: Annotated[str, Field(max_length=16)]
    token_secret: Annotated[str, Field(max_length=128)]
    #: what the worker will authenticate with: random, and chosen by it, so that a join whose
    #: answer was lost can be repeated
    secret: Annotated[str, Field(pattern=r"^[\w-]{40,128}$")]
    role: Role
    facts: Facts


class Joined(_Body):
    """The worker joined."""

    name: str
    lease_s: float


class NextRequest(_Body):
    """A request for a chunk."""

    id: LeaseId
    process: ProcessId
    wait_s: float = Field(0.0, ge=0.0, le=MAX_WAIT_S)


class Handed(_Body):
    """A chunk, leased to the worker."""

    id: str  #: the chunk's id
    chunk: str  #: a `queue.messages.Chunk` as JSON
    limit_s: float  #: seconds for all items of the chunk
    begun: bool  #: False: each process of the worker has one already, so this one is ahead


class Heartbeat(_Body):
    """Fields of `WorkerStatus` that the worker reports and nobody has checked."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    device: _Text = ""
    environment: Annotated[str, Field(max_length=1 << 14)] = ""
    toolchains: Annotated[tuple[_Text, ...], Field(max_length=64)] = ()
    job_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(max_length=1 << 14)
    ] = ()
    started_at: _Moment = 0.0
    done: _Count = 0
    place: _Text = ""
    failing: _Count = 0
    aside: Annotated[str, Field(max_length=1 << 12)] = ""
    waits_for: Annotated[str, Field(max_length=1 << 12)] = ""


class RenewRequest(_Body):
    """The heartbeat of a process, and the leases that it holds."""

    process: ProcessId
    heartbeat: Heartbeat | None = None
    leases: Annotated[tuple[LeaseId, ...], Field(max_length=4)] = ()


class Renewed(_Body):
    """The wanted state of the worker, and the leases that it has lost."""

    state: Literal["active", "cordoned", "draining"]
    lost: tuple[str, ...] = ()


class Refusal(_Body):
    """Why a request was refused."""

    error: str
