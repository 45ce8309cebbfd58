"""A server that answers for a space of the cache as `tuna serve` does, or as one that is broken."""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: Seconds that a slow answer takes if the client does not end it.
SLOW_S = 60.0


class SpaceDouble(ThreadingHTTPServer):
    """The space `gpu` and its files. `fault` is how it fails: garbage, no batch, drip, silent, or a
    status; from the first request on, or after so many (`good`)."""

    daemon_threads = True

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "http" if certificate is None else "https"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.signer = Ed25519PrivateKey.generate()
        self.files: dict[tuple[str, str], bytes] = {}
        self.headers: list[dict[str, str]] = []
        self.requests: list[str] = []
        self.fault, self.good = "", 0
        self.signed_space = "gpu"
        self.ended = threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Say nothing of connections that the client ended."""

    @property
    def url(self) -> str:
        """The address of the space."""
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}/v1/cache/gpu"

    @property
    def line(self) -> str:
        """The token line, with the public key."""
        return f"{self.url}#id.secret.{self.signer.public_key().public_bytes_raw().hex()}"


@contextmanager
def space_double(certificate: Path | None = None) -> Iterator[SpaceDouble]:
    """A server in a thread of this process; by TLS with a certificate and its key."""
    with SpaceDouble(certificate) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: SpaceDouble

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _is_broken(self) -> bool:
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.headers.append(dict(self.headers))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.body = body
        fault = self.server.fault if len(self.server.requests) > self.server.good else ""
        if fault == "silent":
            self.server.ended.wait(SLOW_S)
        elif fault == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nX: ")
            while not self.server.ended.wait(0.01):
                self.wfile.write(b"x")
        elif fault == "garbage":
            self.wfile.write(bytes(range(256)) * 8)
        elif fault == "no batch":
            self._answer(200, b'[{"file": 7, "bytes": "many"}]\nabc')
        elif fault:
            self._answer(int(fault), b"{}")
        return bool(fault)

    def do_PUT(self) -> None:
        if self._is_broken():
            return
        key, name = map(unquote, self.path.split("/")[-2:])
        there = self.server.files.setdefault((key, name), self.body)
        self._answer(200 if there == self.body else 409, b"{}")

    def do_GET(self) -> None:
        if self._is_broken():
            return
        url = urlsplit(self.path)
        key, query = unquote(url.path.split("/")[-1]), parse_qs(url.query)
        files = self.server.files
        if "file" in query:
            found = [(name, files[key, name]) for name in query["file"] if (key, name) in files]
            listed = [self._listed(key, name, data) for name, data in found]
            data = b"".join(data for _, data in found)
            self._answer(200, json.dumps(listed).encode() + b"\n" + data)
            return
        newest = [one for one in reversed(files) if one[1].endswith(query["suffix"][0])]
        entries = [{"key": key, "files": {name: 1}} for key, name in newest]
        self._answer(200, json.dumps({"entries": entries[: int(query["limit"][0])]}).encode())

    def _listed(self, key: str, name: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        text = "\0".join(("tuna cache", self.server.signed_space, key, name, digest))
        signature = f"0a1b2c3d {self.server.signer.sign(text.encode()).hex()}"
        return {"file": name, "bytes": len(data), "sha256": digest, "signature": signature}

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
