"""The doors of the service: hostile requests, and files of the zoo that are sent to it."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.drills.judging import LIMIT_S, Fault, Run, faults, text_faults
from benchmarks.drills.zoo import FILE, Expected, Specimen, pick

_FORM = "multipart/form-data; boundary="
_TICK_S = 0.1
#: Seconds until the work on a file has refused it, on a busy machine.
_WAIT_S = 300.0


@dataclass(frozen=True)
class Sent:
    """A request."""

    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def _json(value: Any) -> Sent:
    return _body(json.dumps(value).encode())


def _body(data: bytes, kind: str = "application/json") -> Sent:
    return Sent("POST", "/v1/requests", data, {"content-type": kind})


def _form(*parts: tuple[str, bytes], boundary: str = "b") -> Sent:
    """A form of parts, each with what stands behind `Content-Disposition:`, and content."""
    mark = b"--" + boundary.encode()
    lines = [
        mark + b"\r\nContent-Disposition: " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in parts
    ]
    return _body(b"".join(lines) + mark + b"--\r\n", _FORM + boundary)


def _named(value: Any, **more: Any) -> Sent:
    return _json({"name": value, "layers": ["conv -n 1 -c 3 -H 8 -W 8 -k 4 -y 3 -x 3"], **more})


def _lines(*layers: Any) -> Sent:
    return _json({"name": "zoo", "layers": list(layers)})


def requests(rng: random.Random) -> list[Sent]:
    """Requests none of which may be accepted, each in a variant that the generator draws."""
    number = pick(rng, [-1, 0, 2**31, 2**63, 2**64, 10**30, 1.5, "x", None, [1], {}])
    text = rng.choice(
        [
            "",
            " ",
            "\0",
            "\x1b[31m",
            "a" * 5000,
            "\ud800",
            "<script>",
            "%s{0}",
            "'; DROP TABLE job; --",
        ]
    )
    a_file = 'form-data; name="file"; filename="model.onnx"'
    a_name = 'form-data; name="name"'
    deep = rng.choice([100, 5000, 200_000])
    image = "-c 3 -H 8 -W 8 -k 4"
    odd_line = rng.choice(
        [
            *(
                "",
                " ",
                "\0",
                "{",
                "{}",
                "[]",
                "null",
                "[" * deep,
                "MIOpenDriver",
                "frobnicate -n 1",
            ),
            *('{"kind": "conv"}', '{"kind": ["conv"]}', "gemm -m 1", "conv\x1b[2J -n 1"),
            *("conv", "conv -n", "conv -n -1 -c 3", "conv -n ½ -c 3", "conv " + "-n -1 " * 2000),
            *(f"conv -n 1 {image} -y 9 -x 9", f"conv -n {10**20} {image} -y 3 -x 3"),
            *(f"conv -n 1 {image} -y 3 -x 3 -g 2", f"conv -n 1 {image} -y 3 -x 3 -u 0"),
        ]
    )
    return [
        _body(b""),
        _body(rng.randbytes(rng.randrange(1, 3000))),
        _body(b"[" * deep),
        _body(b'{"a":' * deep),
        _body(rng.choice([b"null", b"1", b'"x"', b"[]", b"true", b"NaN", b"1e999", b"\xff\xfe{}"])),
        _json({}),
        _json({"name": "zoo"}),
        _json({"layers": []}),
        _json({"name": "zoo", "layers": number}),
        _json({"name": "zoo", "layers": [number]}),
        _named(None if number == "x" else number),
        _named(text or "\t"),
        _named("zoo", frobnicate=1),
        _named("zoo", session_id=number or -3),
        _named("zoo", trials=number or -3),
        _named("zoo", minutes=rng.choice([-1, 0, 1e99, "x", [], float("nan"), float("inf")])),
        _named("zoo", priority=rng.choice([-1, 10, "x", 1.5, 10**30])),
        _named("zoo", target_ms=rng.choice([-1, 0, "x", float("nan"), {}])),
        _named("zoo", library=rng.choice(["frobnicate", "x" * 300, 5, "\0"])),
        _named("zoo", arch=rng.choice(["frobnicate", "x" * 300, 5, [], "\0"])),
        _named("zoo", shapes=rng.choice([5, {"x": 5}, {"x": [0]}, {"x": [2**40]}, {"x": ["n"]}])),
        _named("zoo", batch=rng.choice([0, -1, 2**40, "x", 1.5])),
        _lines(odd_line),
        _lines(*[odd_line or "x"] * 50),
        _lines(*["conv -n 1"] * 10_001),
        _body(b"name=zoo&layers=x", "application/x-www-form-urlencoded"),
        _body(
            b"x", rng.choice(["text/plain", "", "multipart/form-data", _FORM, _FORM + "b" * 300])
        ),
        _form((a_name, b"zoo")),
        _form((a_file, b"")),
        _form((a_file, b"x"), (a_file, b"y"), (a_name, b"zoo")),
        _form((a_file, rng.randbytes(100)), (a_name, b"zoo")),
        _form(('form-data; name="file"; filename="' + "n" * 9000 + '.onnx"', b"x"), (a_name, b"z")),
        _form(('form-data; name="file"; filename="../../x\0.onnx"', b"x"), (a_name, b"zoo")),
        _form((a_file, b"x"), (a_name, b"zoo"), ('form-data; name="shapes"', b"[" * deep)),
        _form((a_file, b"x"), (a_name, b"\xff\xfe")),
        _form(("", b"x"), ("form-data", b"y")),
        _form(*[(f'form-data; name="f{place}"', b"x") for place in range(500)]),
        _body(b"--b\r\nContent-Disposition: form-data; name=file", _FORM + "b"),
        Sent("GET", f"/v1/requests/{rng.choice(['0', '-1', 'x', 2**63, '%00', '1.5', '9' * 400])}"),
        Sent("GET", f"/v1/requests?limit={rng.choice(['-1', '0', 'x', 10**30])}"),
        Sent("GET", f"/v1/requests?state={rng.choice(['x', '%00', '[]'])}"),
        Sent("GET", f"/v1/{'x' * rng.choice([3, 5000])}"),
        Sent("DELETE", "/v1/requests/999999"),
        Sent("PATCH", "/v1/requests"),
    ]


@contextmanager
def serving(home: Path) -> Iterator[tuple[httpx.Client, _Memory]]:
    """Yield a visitor of a service of this machine, and its memory."""
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests")]
    from web_service import serving, visitor_of  # type: ignore[import-not-found]

    home.mkdir()
    with (
        serving(home) as link,
        visitor_of(link) as visitor,
        _Memory().watching() as memory,
    ):
        yield visitor, memory


class _Memory:
    """The largest process that this one has started, and the sum of all, in bytes."""

    def __init__(self) -> None:
        self.largest = self.total = 0
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[_Memory]:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._over.wait(_TICK_S):
            sizes = []
            for process in own.children(recursive=True):
                try:
                    sizes.append(process.memory_info().rss)
                except psutil.Error:
                    continue  # it has ended
            self.largest = max([self.largest, *sizes])
            self.total = max(self.total, sum(sizes))


def send(visitor: httpx.Client, sent: Sent) -> tuple[str, list[Fault]]:
    """Send a request that has to be refused, return the answer and the rules that it breaks."""
    try:
        answer = visitor.request(
            sent.method, sent.path, content=sent.content, headers=sent.headers, timeout=LIMIT_S
        )
    except httpx.HTTPError as error:
        return "", [Fault("answers", f"{type(error).__name__}: {error}")]
    text = answer.text
    broken = list(text_faults(text))
    if not 400 <= answer.status_code < 500:
        broken.append(Fault("answers", f"status {answer.status_code}"))
    elif not (answer.headers["content-type"].startswith("application/json") and
              answer.json().get("error")):  # fmt: skip
        broken.append(Fault("unnamed", "no error in JSON"))
    return f"{answer.status_code} {text}", broken


def submit(
    visitor: httpx.Client, memory: _Memory, name: str, specimen: Specimen
) -> tuple[Run, list[Fault]]:
    """Send a file that has to be refused, by the door or by the work on it."""
    memory.largest = 0
    answer = visitor.post(
        "/v1/requests",
        data={"name": name, "minutes": "1"},
        files={"file": (FILE, specimen.files[FILE])},
        timeout=LIMIT_S,
    )
    said, code = answer.json(), 2 if answer.status_code < 500 else answer.status_code
    text = f"{said.get('error', '')} {said.get('hint', '')}"
    if answer.status_code < 400:
        deadline = time.monotonic() + _WAIT_S
        while said["state"] == "accepted" and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            said = visitor.get(f"/v1/requests/{said['id']}").json()
        text, code = str(said.get("message")), 2 if said["state"] == "failed" else 0
        visitor.post(f"/v1/requests/{said['id']}/cancel")  # what was accepted wrongly takes long
    run = Run(code, text, 0.0, memory.largest, 0, ())
    return run, list(faults(specimen, run))


def can_be_sent(specimen: Specimen) -> bool:
    """Whether it is one plain file that has to be refused."""
    return set(specimen.files) == {FILE} and specimen.expected is Expected.REFUSED
