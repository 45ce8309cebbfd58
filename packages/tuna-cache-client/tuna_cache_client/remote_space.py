"""Calls to a space of `tuna serve` from within another program: each is bounded in time, and
whatever goes wrong is a miss that stderr is told of once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import json
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

#: The token line, or the path of a file that has it; milliseconds for a call.
LINE, TIMEOUT = "TUNA_CACHE", "TUNA_ADAPTER_TIMEOUT_MS"
_MADE_BY = "`tuna token create --role submit --space NAME`"
_TIMEOUT_MS, _LONGEST_MS = 200, 60_000
#: Failures in succession after which no call is made for so many seconds.
_FAILURES, _PAUSE_S = 3, 30.0
#: Prefix of the text that the server signs for each file.
_MESSAGE = "tuna cache"
#: Statuses that refuse one file, from a server that is otherwise well.
_REFUSED = frozenset({413, 422, 429, 507})
_STORED = frozenset({200, 201, 409})  #: 409: another one's bytes were first
_Result = TypeVar("_Result")


class _Miss(Exception):
    """The call came to nothing; `reason` is said once, with the details of the first time."""

    def __init__(self, reason: str, detail: str = "", *, failed: bool = False) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
        self.failed = failed  #: counts as a failure of the server


@functools.cache
def remote_space() -> RemoteSpace:
    """The space that the environment names: one for the process, as failures are counted in it."""
    return RemoteSpace(os.environ)


class RemoteSpace:
    """A space whose files are read and written by key and name. No method raises an exception."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._said: set[str] = set()
        #: Without a lock, which a fork might find closed; a count may miss one of two threads.
        self._failures, self._paused_until = 0, 0.0
        try:
            self._configure(environment)
        except _Miss as miss:
            self._paused_until = float("inf")
            self.tell(miss.reason, miss.detail)

    def _configure(self, environment: Mapping[str, str]) -> None:
        text = environment.get(LINE, "").strip()
        if not text:
            raise _Miss(f"{LINE} is not set to a line of {_MADE_BY}")
        if "://" not in text:
            try:
                text = Path(text).read_text().strip()
            except (OSError, ValueError) as error:
                raise _Miss(f"{LINE} names a file that cannot be read", str(error)) from None
        try:
            url = urlsplit(text)
            token, secret, *pin = url.fragment.split(".")
            self._key = _public_key(*pin)
            if url.scheme not in ("http", "https") or not url.hostname or not token or not secret:
                raise ValueError
            self._host, self._port, self._path = url.hostname, url.port, url.path.rstrip("/")
        except (ValueError, TypeError):
            raise _Miss(f"{LINE} is not a line of {_MADE_BY}") from None
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._bearer = f"{token}.{secret}"
        self._name = self._path.rpartition("/")[2]
        self._timeout_s = _TIMEOUT_MS / 1000
        if text := environment.get(TIMEOUT, ""):
            if not text.isdecimal() or not 0 < int(text) <= _LONGEST_MS:
                raise _Miss(f"{TIMEOUT} is not a number of milliseconds", text)
            self._timeout_s = int(text) / 1000

    def get(self, key: str, names: Iterable[str]) -> dict[str, bytes]:
        """Return those of the files that are there, each compared with its digest and signature; if
        one of them does not pass, none."""
        wanted = list(names)

        def work() -> dict[str, bytes]:
            query = urlencode([("file", name) for name in wanted])
            status, body = self._call("GET", f"/{_quoted(key)}?{query}")
            if status != 200:
                raise _Miss(_answered(status), failed=True)
            return dict(self._files(key, wanted, body))

        return self._attempt(work) or {}

    def put(self, key: str, name: str, data: bytes) -> None:
        """Store a file, unless other bytes are there."""

        def work() -> None:
            path = f"/{_quoted(key)}/{_quoted(name)}"
            status, _ = self._call("PUT", path, data)
            if status not in _STORED:
                raise _Miss(_answered(status), name, failed=status not in _REFUSED)

        self._attempt(work)

    def newest(self, suffix: str, limit: int) -> list[str]:
        """Return the keys that have a file whose name ends with `suffix`, put last first."""

        def work() -> list[str]:
            query = urlencode({"limit": limit, "suffix": suffix})
            status, body = self._call("GET", f"?{query}")
            if status != 200:
                raise _Miss(_answered(status), failed=True)
            try:
                return [
                    str(entry["key"])
                    for entry in json.loads(body)["entries"]
                    if any(name.endswith(suffix) for name in entry["files"])
                ]
            except (ValueError, LookupError, TypeError, AttributeError):
                raise _garbage() from None

        return self._attempt(work) or []

    def tell(self, reason: str, detail: str = "") -> None:
        """Say on stderr why there is a miss, unless that was said before."""
        if reason in self._said:
            return
        self._said.add(reason)
        text = f"tuna: cache: {reason}{detail and f' ({detail})'}; the program goes on without\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            sys.stderr.write(text)

    def _attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """The result of a call, or None: what went wrong has been said, or none is made now."""
        if time.monotonic() < self._paused_until:
            return None
        try:
            result = work()
        except Exception as error:  # the program in which this runs must not end by it
            miss = error if isinstance(error, _Miss) else _Miss("a call failed", repr(error))
            self._count(failed=miss.failed or miss is not error)
            self.tell(miss.reason, miss.detail)
            return None
        self._count(failed=False)
        return result

    def _count(self, *, failed: bool) -> None:
        self._failures = self._failures + 1 if failed else 0
        if self._failures >= _FAILURES:
            self._paused_until = time.monotonic() + _PAUSE_S

    def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to a request.

        The request is made by a thread, because nothing else bounds all of it: looking up a name
        has no timeout, and a socket's begins anew with each byte of a slow answer.
        """
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=self._tls
            )
        )
        sent = {"Authorization": f"Bearer {self._bearer}", "Connection": "close"}
        answers: list[tuple[int, bytes] | Exception] = []

        def exchange() -> None:
            try:
                connection.request(method, self._path + path, body, sent)
                response = connection.getresponse()
                answers.append((response.status, response.read()))
            except Exception as error:
                answers.append(error)
            finally:
                connection.close()

        thread = threading.Thread(target=exchange, name="tuna cache", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not answers or isinstance(answers[0], TimeoutError):
            _abort(connection)
            raise _Miss(f"no answer within {self._timeout_s * 1000:g} ms", self._host, failed=True)
        (answer,) = answers
        if isinstance(answer, Exception):
            reason = "not HTTP"
            if isinstance(answer, ssl.SSLCertVerificationError):
                reason = f"{self._host} does not prove its name; SSL_CERT_FILE names who is trusted"
            elif isinstance(answer, OSError):
                reason = f"{self._host} does not answer"
            raise _Miss(reason, repr(answer), failed=True)
        return answer

    def _files(self, key: str, wanted: Collection[str], body: bytes) -> Iterable[tuple[str, bytes]]:
        """Names and bytes of a batch: a line of JSON, then the bytes in its order."""
        line, _, rest = body.partition(b"\n")
        try:
            listed: list[dict[str, Any]] = json.loads(line)
            for one in listed:
                name, size, signature = one["file"], int(one["bytes"]), str(one["signature"])
                data, rest = rest[:size], rest[size:]
                digest = hashlib.sha256(data).hexdigest()
                if name not in wanted or digest != one["sha256"]:
                    raise _Miss("bytes are not those that were stored", str(name))
                self._verify(key, name, digest, signature)
                yield name, data
        except (ValueError, LookupError, TypeError):
            raise _garbage() from None

    def _verify(self, key: str, name: str, digest: str, signature: str) -> None:
        if self._key is None:
            return
        from cryptography.exceptions import InvalidSignature

        message = "\0".join((_MESSAGE, self._name, key, name, digest)).encode()
        try:
            self._key.verify(bytes.fromhex(signature.split(" ")[-1]), message)
        except (InvalidSignature, ValueError):
            raise _Miss(
                f"a file is not signed by the key that {LINE} pins", f"{key}/{name}"
            ) from None


def _public_key(pin: str = "") -> Ed25519PublicKey | None:
    if not pin:
        return None
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise _Miss(f"{LINE} pins a key, which needs the package cryptography") from None
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(pin))


def _abort(connection: http.client.HTTPConnection) -> None:
    """End an exchange that a thread waits for."""
    with contextlib.suppress(OSError, AttributeError):  # closed meanwhile, or not yet connected
        connection.sock.shutdown(2)


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _answered(status: int) -> str:
    return f"the server answered {status} {http.client.responses.get(status, '')}".rstrip()


def _garbage() -> _Miss:
    return _Miss("the server's answer is not one of `tuna serve`", failed=True)
