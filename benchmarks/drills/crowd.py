"""The service under 200 requests at once, 50 of them hostile: how long pages take, and the memory
of all its processes.

The crowd comes in waves: the requests of one begin at the same moment, each on a connection of its
own. The ordinary ones open pages, ask for known results, use a cache and submit layers and small
models; the hostile ones submit models that would take all memory, send files byte by byte, heads of
100 KB and bodies that are malformed. The service works on what was submitted meanwhile. Times are
those of the client, on the same cores; `client_late_ms` is how late its own loop was at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path

import psutil

from benchmarks.drills import costs, served, zoo
from benchmarks.harness import Outcome, command_line
from benchmarks.serve import Service, serving
from benchmarks.servers import home
from tests.raw_requests import RawRequests

_HOSTILE_SHARE = 1 / 4
_SAMPLE_S = 0.2
#: Seconds between the begin of two waves, and that a request may take in all.
_EVERY_S, _DEADLINE_S = 4.0, 60.0
#: Seconds to wait for the ends of the requests of hostile visitors.
_WAIT_S = 60.0
#: Tokens of each sort.
_TOKENS = 10
_PAGES = (
    *("/sessions", "/requests", "/sessions/1", "/sessions/1/jobs", "/sessions/1/results", "/query"),
    *("/models", "/golden", "/workers", "/actions", "/static/tuna.css", "/healthz", "/metrics"),
    *("/v1/sessions", "/v1/requests", "/v1/query", "/v1/whoami", "/v1/workers", "/v1/sizes"),
)
#: Slowest page, and the memory of all requests (`TUNA_SERVICE_MEMORY_MIB`) and the service itself.
LIMITS = {
    "slowest_page_ms": 1000.0,
    "pss_mib": 4096.0 + 1024.0,
    "answers_5xx": 0.0,
    "bombs_built": 0.0,
}


def main() -> int:
    """Command line; `--at-once`: requests of a wave."""
    parser = command_line(__doc__, at_once=200, waves=12, seed=1)
    options = parser.parse_args()
    with home("sqlite"):
        return _measure(options.at_once, options.waves, options.seed)


def _measure(at_once: int, waves: int, seed: int) -> int:
    from tuna import api

    with as_file(files("tuna_serve.web") / "demo.tuna") as archive:
        session_id = api.restore_session(archive).session_id
    api.golden.build(1, session_id, None, allow_noisy=True)
    tokens = [api.create_visitor_token("submit", 86_400.0) for _ in range(2 * _TOKENS)]
    line = api.create_space_token("bench", 86_400.0)
    space = line.partition("#")[2].rpartition(".")[0]
    with serving() as service, Memory(service.process) as memory:
        before = service.cpu_s()
        crowd = Crowd(service, Visitors(tokens[:_TOKENS], tokens[_TOKENS:], space), seed)
        crowd.run(at_once, waves)
        cpu_s = service.cpu_s() - before
        ends = ends_of_bombs(tokens[_TOKENS:])
    print(json.dumps(crowd.statuses), file=sys.stderr)
    for wave, (seconds, what) in sorted(crowd.slowest.items()):
        print(f"wave {wave}: slowest page {seconds:.2f} s, {what.decode()}", file=sys.stderr)
    pages = sorted(crowd.seconds["page"])
    figures = {
        "pages": len(pages),
        "page_p50_ms": 1000 * pages[len(pages) // 2],
        "page_p99_ms": 1000 * pages[len(pages) * 99 // 100],
        "slowest_page_ms": 1000 * pages[-1],
        "slowest_submit_ms": 1000 * max(crowd.seconds["submit"]),
        "service_cpu_ms": 1000 * cpu_s / (at_once * waves),
        "client_late_ms": 1000 * crowd.late_s,
        "pss_mib": memory.most_mib,
        "bombs_refused": ends["failed"],
        "bombs_built": ends["built"] + ends["known"],
        "answers_5xx": sum(
            number for of in crowd.statuses.values() for code, number in of.items() if code >= 500
        ),
    }
    return Outcome("crowd", figures, limits=LIMITS).print()


def ends_of_bombs(tokens: Sequence[str]) -> Counter[str]:
    """Return the states of the requests of hostile visitors, which are waited for a while."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna_serve.db import requests

    deadline = time.monotonic() + _WAIT_S
    while True:
        with reading(open_database()) as connection:
            pages = [requests.latest(connection, 100, token_id=one[:12]).rows for one in tokens]
        every = [request for page in pages for request in page]
        if all(request.ended_at for request in every) or time.monotonic() > deadline:
            break
        time.sleep(1)
    for message in sorted({request.message for request in every}):
        print(f"refused: {' '.join(message.split())[:300]}", file=sys.stderr)
    return Counter(request.state.value for request in every)


class Memory:
    """The proportional set size of a process and all below it, sampled until the block ends."""

    def __init__(self, process: psutil.Process) -> None:
        self.most_mib = 0.0
        self._process, self._ends = process, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(_SAMPLE_S):
            self.most_mib = max(self.most_mib, pss_mib(self._process))


def pss_mib(process: psutil.Process) -> float:
    """Return the proportional set size of a process and all below it."""
    total_kib = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total_kib += sum(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:")
    return total_kib / 1024


class Visitors:
    """Who asks: holders of tokens for submissions, good and hostile, and of a space."""

    def __init__(self, good: Sequence[str], hostile: Sequence[str], space: str) -> None:
        self.good, self.hostile, self.space = good, hostile, space


class Crowd:
    """Clients of one service."""

    def __init__(self, service: Service, visitors: Visitors, seed: int) -> None:
        self._host, self._visitors = service.host, visitors
        self._owner = service.headers["Authorization"].partition(" ")[2]
        self._random = random.Random(seed)  # noqa: S311
        self._raw = RawRequests(
            seed, self._host, [f"GET {path}" for path in _PAGES], [self._owner], ["limit", "state"]
        )
        self._bombs, self._number = bombs(), 0
        self.seconds: dict[str, list[float]] = {"page": [], "submit": [], "hostile": []}
        self.statuses: dict[str, Counter[int]] = {name: Counter() for name in self.seconds}
        #: By wave: seconds and what was asked for.
        self.slowest: dict[int, tuple[float, bytes]] = {}
        self.late_s = 0.0

    def run(self, at_once: int, waves: int) -> None:
        """Send waves of so many requests."""
        asyncio.run(self._run(at_once, waves))

    async def _run(self, at_once: int, waves: int) -> None:
        lateness = asyncio.create_task(self._watch_own_loop())
        every: list[asyncio.Task[None]] = []
        for wave in range(waves):
            hostile = islice(self._hostile(), int(at_once * _HOSTILE_SHARE))
            sent: list[tuple[str, bytes, float]] = [("hostile", *one) for one in hostile]
            sent += [(*one, 0.0) for one in islice(self._ordinary(), at_once - len(sent))]
            self._random.shuffle(sent)
            every += [asyncio.create_task(self._send(wave, *one)) for one in sent]
            await asyncio.sleep(_EVERY_S)
        await asyncio.gather(*every)
        lateness.cancel()

    async def _watch_own_loop(self) -> None:
        while True:
            due = time.perf_counter() + 0.05
            await asyncio.sleep(0.05)
            self.late_s = max(self.late_s, time.perf_counter() - due)

    async def _send(self, wave: int, sort: str, request: bytes, pause_s: float = 0.0) -> None:
        """Send a request, with `pause_s` byte by byte, and read the answer."""
        began_at, answer = time.perf_counter(), b""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            answer = await asyncio.wait_for(self._exchange(request, pause_s), _DEADLINE_S)
        seconds = time.perf_counter() - began_at
        self.seconds[sort].append(seconds)
        self.statuses[sort][int(answer[9:12]) if answer[:7] == b"HTTP/1." else 0] += 1
        if sort == "page" and seconds > self.slowest.get(wave, (0.0, b""))[0]:
            self.slowest[wave] = seconds, request.partition(b" HTTP/")[0]

    async def _exchange(self, request: bytes, pause_s: float) -> bytes:
        host, _, port = self._host.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = request.find(b"\r\n\r\n") + 4 if pause_s else len(request)
            writer.write(request[:head])
            for at in range(head, len(request)):
                writer.write(request[at : at + 1])
                await writer.drain()
                await asyncio.sleep(pause_s)
            return await reader.read(-1)
        finally:
            writer.transport.abort()

    def _head(self, route: str, token: str, *lines: str) -> bytes:
        bearer = f"Authorization: Bearer {token}"
        mine = (f"{route} HTTP/1.1", f"Host: {self._host}", bearer, "Connection: close", *lines)
        return "\r\n".join((*mine, "", "")).encode()

    def _ordinary(self) -> Iterator[tuple[str, bytes]]:
        """Yield requests of visitors as they should be: of 50 one submits a model, and two submit
        layers."""
        pick = self._random.choice
        while True:
            self._number += 1
            token = pick(self._visitors.good)
            match self._number % 50:
                case 0:
                    yield "submit", self._form(token, "good.onnx", good_model(self._number))
                case 1 | 2:
                    layer = f"MIOpenDriver gemm -m 8 -n 8 -k {self._number}"
                    asked = {"name": "mine", "library": "noop", "layers": [layer], "trials": 2}
                    yield "submit", self._document("POST /v1/requests", token, asked)
                case 3 | 4:
                    key = f"PUT /v1/cache/bench/K{self._number}/f"
                    yield "page", self._document(key, self._visitors.space, [self._number])
                case 5 | 6 | 7 | 8:
                    yield "page", self._head("GET /v1/cache/bench?limit=10", self._visitors.space)
                case 9 | 10 | 11 | 12:
                    asked = {"layers": ["MIOpenDriver gemm -m 8 -n 8 -k 8"]}
                    yield "page", self._document("POST /v1/best", self._owner, asked)
                case _:
                    headers = ("Accept: text/html",)
                    yield "page", self._head(f"GET {pick(_PAGES)}", self._owner, *headers)

    def _hostile(self) -> Iterator[tuple[bytes, float]]:
        """Yield requests of visitors who want to harm, and their pause between two bytes."""
        raw, files = iter(self._raw), self._bombs
        while True:
            self._number += 1
            token = self._random.choice(self._visitors.hostile)
            form = self._form(token, "bomb.onnx", files[self._number % len(files)])
            match self._number % 5:
                case 0 | 1:
                    yield form, 0.0
                case 2:
                    yield form, 0.5
                case 3:
                    yield self._head("GET /sessions", token, "X: " + "y" * 100_000), 0.0
                case _:
                    yield next(raw), 0.0

    def _document(self, route: str, token: str, document: object) -> bytes:
        body = json.dumps(document).encode()
        kind = "Content-Type: application/json"
        return self._head(route, token, kind, f"Content-Length: {len(body)}") + body

    def _form(self, token: str, filename: str, content: bytes) -> bytes:
        field = "--b\r\nContent-Disposition: form-data; name="
        fields = f'{field}"name"\r\n\r\nnet\r\n{field}"minutes"\r\n\r\n0.01\r\n'
        fields += f'{field}"file"; filename="{filename}"\r\n\r\n'
        body = fields.encode() + content + b"\r\n--b--\r\n"
        kind = "Content-Type: multipart/form-data; boundary=b"
        return self._head("POST /v1/requests", token, kind, f"Content-Length: {len(body)}") + body


def bombs() -> list[bytes]:
    """Return models that cost far more than their files, one of each kind of the zoo."""
    kinds = [name for name, maker in zoo.KINDS.items() if maker.__module__ == costs.__name__]
    made = [zoo.Numbered(name, 0, 1).make() for name in kinds]
    return [specimen.files[zoo.FILE] for specimen in made if served.can_be_sent(specimen)]


def good_model(seed: int) -> bytes:
    """Return a small network."""
    network = zoo.perceptron(random.Random(seed))  # noqa: S311
    return bytes(network.model().SerializeToString())


if __name__ == "__main__":
    raise SystemExit(main())
