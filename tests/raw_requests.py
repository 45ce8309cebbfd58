"""Malformed, hostile and cut-off HTTP requests, as the bytes that a client sends; they follow from
a seed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from structlog.testing import capture_logs

#: Characters of a line of the log.
_LINE_CHARS = 1000
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW")
_ODD_METHODS = ("", "get", "G\x00T", "GE T", "P" * 5000)
_VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9", "http/1.1", "", "HTTP/1.1 x", "\x00")
TEXTS = (
    *("", "x", "-1", "0", "1", "1.5", "*", "nan", "true", "null", "../..", "a" * 300, "9" * 400),
    *("%00", "%2e%2e%2f", "%ff%fe", "%ED%A0%80", "%", "%zz", "\u202e", "\x1b[2J", "'; --", "\x00"),
    *("0" * 32, "f" * 64, str(2**31), str(2**63), str(2**64), "[", '"', "\\", "{{7*7}}", "\u0130"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 10**400, 1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x1b[2J", "\x00", "\ud800", "0" * 32, "a" * 70_000, [], {}, [[[]]], {"": [None]}),
)
_TYPES = (
    *("application/json", "application/x-www-form-urlencoded", "text/plain", "multipart/form-data"),
    *("", "/", "x" * 3000, "application/json; charset=utf-16", "multipart/form-data; boundary="),
    *(f'multipart/form-data; boundary="{"b" * 300}"', f"multipart/form-data; boundary={'b' * 257}"),
    *('multipart/form-data; boundary="\xe9\xff"', "multipart/mixed; boundary=b", "application/xml"),
    *(
        "multipart/form-data; boundary=b; boundary=c",
        'multipart/form-data; boundary="b',
        "\xff;\xff",
    ),
)
#: Lines of the head, without their ends, beside those that make it a request.
_HEADERS = (
    *("Content-Length: -1", "Content-Length: +5", "Content-Length: 1e3", "Content-Length: x"),
    *(f"Content-Length: {'9' * 19}", f"Content-Length: {'9' * 40}", "Content-Length: 5, 6"),
    *("Transfer-Encoding: gzip", "Transfer-Encoding: chunked, chunked", "Transfer-Encoding: x"),
    *("Content-Length: 5\r\nContent-Length: 6", "Transfer-Encoding: chunked\r\nContent-Length: 5"),
    *(
        "Cookie: a:b=1; a,b=2",
        "Cookie: \xff=\xff; ;;=",
        f"Cookie: {'a=b; ' * 900}",
        'Cookie: a="\\',
    ),
    *("Host: evil.example", "Host:", "Host: [::1", "Host: a b", "Origin: null", "Origin: http://["),
    *("Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13", "Expect: x"),
    *(
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA",
        "TE: trailers",
    ),
    *("Expect: 100-continue", "Content-Encoding: gzip", "Range: bytes=9-1", "Accept: text/html"),
    *("Authorization: Bearer", "Authorization: Bearer \xff.\xff", "Authorization: Basic Og=="),
    *(f"Idempotency-Key: {'k' * 129}", "Idempotency-Key: \xff", "Accept: \xff;q=x", "X: \x00"),
    *(
        f"X: {'y' * 20_000}",
        "X: y\r\n" * 400 + "X: z",
        " folded",
        "no colon",
        ": x",
        "X : y",
        "\xff: y",
    ),
    *("X: a\rb", "X:\x7f", "Forwarded: for=\x00", "X-Forwarded-Host: evil", "If-None-Match: \xff"),
)
_NOT_HTTP = (
    *(b"", b"\r\n\r\n", b"\n", b"\x00" * 50, b"GET /\r\n", b"GET\r\n\r\n", b"\xff\xfe\r\n\r\n"),
    *(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 90,
    ),
    *(
        b"A" * 70_000,
        b"SSH-2.0-x\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"GET / HTTP/1.1\r\n" + b"a" * 9000,
    ),
)
_CHUNKS = (
    *(
        b"zz\r\nx\r\n",
        b"-1\r\nx\r\n",
        b"5\r\nabc\r\n0\r\n\r\n",
        b"1\r\nab",
        b"f" * 30 + b"\r\n",
        b"\r\n",
    ),
    *(
        b"1;" + b"e" * 20_000 + b"\r\na\r\n0\r\n\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"5\nabcde\n0\n\n",
    ),
    *(
        b"1\r\n[\r\n0\r\n\r\n",
        b"2\r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}\r\n0\r\nA: b\r\n\r\n",
        b"0x1\r\na\r\n",
    ),
)
_PART_HEADS = (
    *('Content-Disposition: form-data; name="{}"', "Content-Disposition: form-data", "", "X: y"),
    *('Content-Disposition: form-data; name="file"; filename="{}.onnx"', "Content-Disposition"),
    *('Content-Disposition: form-data; name="file"; filename="\x00\r"', "\xff\xfe: \xff", ": x"),
    *("Content-Disposition: form-data; name*=utf-9''%ff", f"X: {'y' * 9000}", "X" * 9000 + ": y"),
    *('Content-Disposition: form-data; name="file"; filename=""', "Content-Disposition: \x00"),
)


@dataclass
class RawRequests:
    """A stream of requests to one server."""

    seed: int
    host: str
    routes: Sequence[str]  #: as `GET /jobs/{}`; each `{}` is replaced by some text
    tokens: Sequence[str] = ()  #: of visitors, one of which most requests have
    fields: Sequence[str] = ()  #: names in documents, forms and queries
    texts: Sequence[str] = ()  #: that name something
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.texts = (*TEXTS, *self.texts)

    def __iter__(self) -> Iterator[bytes]:
        """Yield requests without end."""
        while True:
            yield self._next()

    def _next(self) -> bytes:
        chance, pick = self.random.random, self.random.choice
        if chance() < 0.05:
            return pick(_NOT_HTTP)
        body, lines = self._body()
        method, _, path = pick(self.routes).partition(" ")
        version = "HTTP/1.1"
        if chance() < 0.1:
            method = pick(_METHODS)
        if chance() < 0.03:
            method, version = pick((*_METHODS, *_ODD_METHODS)), pick(_VERSIONS)
        if chance() < 0.98:
            lines.append(f"Host: {self.host}")
        if self.tokens and chance() < 0.9:
            lines.append(f"Authorization: Bearer {pick(self.tokens)}")
        if chance() < 0.9:
            lines.append("Connection: close")
        while chance() < 0.25:
            lines.append(pick(_HEADERS))
        self.random.shuffle(lines)
        head = "\r\n".join([f"{method} {self._path(path)} {version}", *lines, "", ""])
        request = bytearray(
            head.encode("utf-8" if chance() < 0.05 else "latin-1", "replace") + body
        )
        if chance() < 0.05:
            self._damage(request)
        return bytes(
            request[: self.random.randrange(len(request) + 1)] if chance() < 0.1 else request
        )

    def _path(self, path: str) -> str:
        while "{}" in path:
            path = path.replace("{}", self.random.choice(self.texts), 1)
        if self.random.random() < 0.3:
            path += f"?{self._query()}"
        return path if self.random.random() < 0.97 else self.random.choice(self.texts)

    def _query(self) -> str:
        number = self.random.choice((1, 2, 3, 500))
        pick = self.random.choice
        return "&".join(f"{pick(self.fields)}={pick(self.texts)}"[:60] for _ in range(number))

    def _body(self) -> tuple[bytes, list[str]]:
        """Return a body, and the lines of the head that announce it."""
        pick, chance = self.random.choice, self.random.random
        match pick(("none", "json", "json", "form", "form", "urlencoded", "bytes", "chunks")):
            case "none":
                return b"", []
            case "json":
                body, kind = self._json(), "application/json"
            case "form":
                boundary = pick(("b", "b", "b", "-" * 20, "b" * 256, "b" * 300))
                body, kind = self._form(boundary), f"multipart/form-data; boundary={boundary}"
            case "urlencoded":
                body, kind = self._query().encode(), "application/x-www-form-urlencoded"
            case "chunks":
                return pick(_CHUNKS), [
                    "Transfer-Encoding: chunked",
                    f"Content-Type: {pick(_TYPES)}",
                ]
            case _:
                body, kind = self.random.randbytes(self.random.randrange(300)), pick(_TYPES)
        if chance() < 0.1:
            kind = pick(_TYPES)
        lines = [f"Content-Type: {kind}"]
        if chance() < 0.2:
            cut = self.random.randrange(len(body) + 1)
            parts = [part for part in (body[:cut], body[cut:]) if part]
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
            return body, [*lines, "Transfer-Encoding: chunked"]
        length = len(body) if chance() < 0.9 else len(body) + self.random.randrange(-5, 50)
        return body, [*lines, f"Content-Length: {max(0, length)}"]

    def _json(self) -> bytes:
        pick, chance = self.random.choice, self.random.random
        if chance() < 0.2:
            return pick(
                (b"[" * 60_000, b'{"a":' * 5000, b"\xff", b"{}", b"[]", b"1", b"nul", b'"\\ud800"')
            )
        values = (*VALUES, *([text] for text in self.texts), *self.texts)
        document = {pick(self.fields): pick(values) for _ in range(self.random.randrange(8))}
        text = json.dumps(document)
        return text.encode("utf-16" if chance() < 0.05 else "utf-8")

    def _form(self, boundary: str) -> bytes:
        pick, chance = self.random.choice, self.random.random
        parts = []
        for _ in range(pick((0, 1, 2, 3, 60))):
            head = _PART_HEADS[0] if chance() < 0.5 else pick(_PART_HEADS)
            name = pick(self.fields) if chance() < 0.8 else pick(self.texts)
            parts.append(
                f"--{boundary}\r\n{head.replace('{}', name)}\r\n\r\n{pick(self.texts)}\r\n"
            )
        end = f"--{boundary}--\r\n" if chance() < 0.8 else pick(("", "--", f"--{boundary}"))
        return ("".join(parts) + end).encode("latin-1", "replace")

    def _damage(self, request: bytearray) -> None:
        for _ in range(self.random.randrange(1, 4)):
            at = self.random.randrange(len(request) + 1)
            request[at : at + self.random.randrange(3)] = self.random.randbytes(
                self.random.randrange(3)
            )


@dataclass(frozen=True)
class Answers:
    """What came of requests."""

    statuses: Counter[int]  #: 0: the connection was closed without an answer
    failed: Sequence[tuple[int, bytes]]  #: statuses of 5xx, and what was sent

    def count(self, *statuses: int) -> int:
        """Return how many have one of these statuses."""
        return sum(self.statuses[status] for status in statuses)


def send_all(
    requests: Sequence[bytes],
    port: int,
    context: ssl.SSLContext | None = None,
    at_a_time: int = 24,
    is_left: Callable[[int], bool] = lambda number: number % 16 == 0,
) -> Answers:
    """Send each on a connection of its own, and read until the server closes it; `is_left`: the
    client goes away at once."""
    statuses, failed = Counter[int](), list[tuple[int, bytes]]()

    async def send(number: int, request: bytes, turn: asyncio.Semaphore) -> None:
        async with turn:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            answer = b""
            try:
                writer.write(request)
                await writer.drain()
                while not is_left(number) and (part := await reader.read(1 << 16)):
                    answer += part
            except (ConnectionError, ssl.SSLError):
                pass
            finally:
                writer.transport.abort()
        status = int(answer[9:12]) if answer.startswith(b"HTTP/1.") else 0
        statuses[status] += 1
        if status >= 500:
            failed.append((status, request))

    async def every() -> None:
        turn = asyncio.Semaphore(at_a_time)
        await asyncio.gather(*(send(*one, turn) for one in enumerate(requests)))

    asyncio.run(every())
    return Answers(statuses, failed)


class _Records(logging.Handler):
    """What is logged through the standard library."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@contextlib.contextmanager
def logged_in_lines() -> Iterator[None]:
    """Fail unless what is logged in the block are lines of bounded length, and no traceback."""
    records, root = _Records(), logging.getLogger()
    root.addHandler(records)  # caplog's is gone once a command has configured the logs
    try:
        with capture_logs() as events:
            yield
    finally:
        root.removeHandler(records)
    texts = [*map(str, events), *(record.getMessage() for record in records.found)]
    assert not [event for event in events if event.get("exc_info")], events
    assert not [record.exc_info for record in records.found if record.exc_info]
    assert not [text for text in texts if len(text) > _LINE_CHARS]
