"""Requests to a gateway over HTTPS with a pinned key, and the join of a remote worker."""

from __future__ import annotations

import contextlib
import http.client
import secrets
import socket
import threading
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import stamina
from pydantic import BaseModel, ValidationError

from tuna.common.messages import first_fault
from tuna.errors import BadInput, ServiceError
from tuna.vocabulary import OUTAGE_S
from tuna_remote.gateway.protocol import NO_SESSION, Facts, Joined, JoinRequest, Refusal, Role
from tuna_remote.gateway.tokens import Credentials, Gateway, JoinToken, PinMismatch, pinned_context

#: Seconds for a connection, and for an answer beyond what a long poll waits.
_CONNECT_S, _ANSWER_S = 5.0, 60.0
#: How long a join waits for a gateway.
_JOIN_S = 30.0
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


class GatewayAnswer(NamedTuple):
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
        timeout_s: float = OUTAGE_S,
    ) -> GatewayAnswer:
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

    def _once(self, method: str, path: str, content: bytes | None) -> GatewayAnswer:
        try:
            connection = self._connection()
            connection.request(method, f"/v1{path}", content, self._headers)
            found = connection.getresponse()
            answer = GatewayAnswer(found.status, found.read())
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
            raise AccessLost(why_refused(answer))
        if answer.status in _LATER:
            raise _Later(why_refused(answer))
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


def why_refused(answer: GatewayAnswer) -> str:
    """The reason that a gateway gives."""
    with contextlib.suppress(ValidationError):
        return Refusal.model_validate_json(answer.content).error
    return f"HTTP status {answer.status}"


def read_answer(model: type[_Answer], answer: GatewayAnswer) -> _Answer:
    """An answer as a message; raises ServiceError for what is none."""
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
        why = why_refused(answer)
        refused = NoSession if why.startswith(NO_SESSION) else JoinRefused
        raise refused(f"Join refused: {why}.")
    return Credentials(token.gateway, read_answer(Joined, answer).name, secret)


def facts_of(**facts: Any) -> Facts:
    """Facts of a joining worker on this host; raises BadInput for what a gateway would not take."""
    try:
        return Facts(**{"host": socket.gethostname(), **facts})
    except ValidationError as error:
        fault = first_fault(error.errors())
        raise BadInput(f"This machine's facts cannot be sent to a gateway: {fault}.") from None
