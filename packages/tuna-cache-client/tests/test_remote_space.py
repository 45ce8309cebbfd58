"""A space of the cache, seen from a program that goes on whatever is wrong with it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from certificates import DAY, NOW, Authority
from space_double import SLOW_S, SpaceDouble, space_double

from tuna_cache_client import remote_space
from tuna_cache_client.remote_space import LINE, TIMEOUT, RemoteSpace

KEY, FILES = "ABC234", {"k.json": b"{}", "k.cubin": bytes(range(256)) * 40}


def _space(line: str, timeout_ms: int = 10_000) -> RemoteSpace:
    return RemoteSpace({LINE: line, TIMEOUT: str(timeout_ms)})


def _stored(server: SpaceDouble) -> RemoteSpace:
    space = _space(server.line)
    for name, data in FILES.items():
        space.put(KEY, name, data)
    assert space.get(KEY, FILES) == FILES
    return space


def test_files_are_found_by_others_and_the_token_is_sent_in_a_header_alone(
    server: SpaceDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _stored(server)
    (tmp_path / "line").write_text(server.line + "\n")
    other = _space(str(tmp_path / "line"))
    assert other.get(KEY, [*FILES, "absent"]) == FILES
    assert other.get("another", FILES) == {}
    other.put(KEY, "k.json", b"[]")  # refused by the server, and no fault
    assert _space(f"{server.url}#id.secret").get(KEY, ["k.json"]) == {"k.json": b"{}"}
    assert {one["Authorization"] for one in server.headers} == {"Bearer id.secret"}
    assert not [one for one in server.requests if "secret" in one]
    assert capsys.readouterr().err == ""


def test_only_what_the_server_signed_for_this_key_name_and_space_is_returned(
    server: SpaceDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    space = _stored(server)
    server.signed_space = "other"
    assert space.get(KEY, FILES) == {}
    assert space.get(KEY, ["k.json"]) == {}
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "not signed by the key that TUNA_CACHE pins" in told
    assert _space(f"{server.url}#id.secret").get(KEY, FILES) == FILES, "nothing is pinned"
    server.signed_space = "gpu"
    assert space.get(KEY, FILES) == FILES, "an entry's fault is none of the server"
    assert _space(server.line[:-64] + "7f" * 32).get(KEY, FILES) == {}


def test_bytes_that_were_changed_on_their_way_are_a_miss(
    server: SpaceDouble, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    space = _stored(server)
    answer = RemoteSpace._call

    def changed(self: RemoteSpace, method: str, path: str) -> tuple[int, bytes]:
        status, body = answer(self, method, path)
        return status, body[:-1] + bytes([body[-1] ^ 1])

    monkeypatch.setattr(RemoteSpace, "_call", changed)
    assert space.get(KEY, FILES) == {}
    assert "bytes are not those that were stored (k.cubin)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("500", "the server answered 500 Internal Server Error"),
        ("401", "the server answered 401 Unauthorized"),
        ("404", "the server answered 404 Not Found"),
        ("garbage", "not HTTP"),
        ("no batch", "the server's answer is not one of `tuna serve`"),
        ("drip", "no answer within 80 ms"),
        ("silent", "no answer within 80 ms"),
    ],
)
def test_a_broken_server_is_asked_three_times_in_half_a_minute_and_named_once(
    server: SpaceDouble,
    fault: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_slow = fault in ("drip", "silent")
    space = _space(server.line, 80 if is_slow else 10_000)
    server.fault = fault
    begin = time.monotonic()
    for _ in range(50):
        assert space.get(KEY, FILES) == {}
    assert time.monotonic() - begin < SLOW_S / 4
    assert len(server.requests) == 3 or is_slow
    assert len(server.requests) <= 3
    written = capsys.readouterr().err
    assert written.startswith(f"tuna: cache: {told}")
    assert written.count("\n") == 1
    assert 0 < space._paused_until - time.monotonic() <= 30
    server.fault, space._paused_until, space._timeout_s = "", 0.0, 10.0
    space.put(KEY, "k.json", b"{}")
    assert space.get(KEY, ["k.json"]) == {"k.json": b"{}"}


def test_a_server_that_is_away_costs_no_more_than_three_calls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    space = _space(f"http://127.0.0.1:{port}/v1/cache/gpu#id.secret")
    for _ in range(1000):
        space.put(KEY, "k.json", b"{}")
        assert space.get(KEY, FILES) == {}
    assert capsys.readouterr().err.count("127.0.0.1 does not answer") == 1


def test_a_server_by_tls_proves_its_name_by_an_authority_that_the_program_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with space_double(authority.issue("right.pem", "127.0.0.1")) as server:
        _stored(server)
        assert capsys.readouterr().err == ""
        monkeypatch.delenv("SSL_CERT_FILE")
        assert _space(server.line).get(KEY, FILES) == {}
        told = capsys.readouterr().err
        assert "127.0.0.1 does not prove its name; SSL_CERT_FILE names who is trusted" in told
        assert "certificate verify failed" in told
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    for wrong in (
        authority.issue("name.pem", "tuna.example.org"),
        authority.issue("expired.pem", "127.0.0.1", until=NOW - DAY),
    ):
        with space_double(wrong) as server:
            assert _space(server.line).get(KEY, FILES) == {}
            assert server.headers == [], "nobody else is told the token"


def test_a_file_that_is_refused_stops_no_others(
    server: SpaceDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    space = _stored(server)
    server.fault = "413"
    for _ in range(4):
        space.put(KEY, "large", b"x")
    assert "the server answered 413" in capsys.readouterr().err
    server.fault = ""
    assert space.get(KEY, FILES) == FILES


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "TUNA_CACHE is not set"),
        ({LINE: "/no/such/file"}, "TUNA_CACHE names a file that cannot be read"),
        ({LINE: "http://host/v1/cache/gpu"}, "TUNA_CACHE is not a line"),
        ({LINE: "ftp://host/v1/cache/gpu#a.b"}, "TUNA_CACHE is not a line"),
        ({LINE: "http://host:70000/v1/cache/gpu#a.b"}, "TUNA_CACHE is not a line"),
        ({LINE: "http://host/v1/cache/gpu#a.b.c.d"}, "TUNA_CACHE is not a line"),
        ({LINE: "http://host/v1/cache/gpu#a.b.12"}, "TUNA_CACHE is not a line"),
        ({LINE: "http://h/v1/cache/gpu#a.b", TIMEOUT: "0"}, "not a number of milliseconds (0)"),
    ],
)
def test_what_is_not_set_right_is_said_and_nothing_is_called(
    environment: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    space = RemoteSpace(environment)
    assert space.get(KEY, FILES) == {}
    assert space.newest(".json", 3) == []
    written = capsys.readouterr().err
    assert told in written
    assert written.count("\n") == 1


def test_a_pin_without_the_package_that_checks_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert _space(f"http://h/v1/cache/gpu#a.b.{'7f' * 32}").get(KEY, FILES) == {}
    assert "needs the package cryptography" in capsys.readouterr().err


def test_stderr_may_be_closed(server: SpaceDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    server.fault = "500"
    monkeypatch.setattr(sys, "stderr", None)
    assert _space(server.line).get(KEY, FILES) == {}


def test_the_standard_library_is_all_that_is_imported() -> None:
    before = "import json, sys; print(json.dumps([*sys.modules]))"
    words = f"import {remote_space.__name__}; {before}"
    names, there = (
        json.loads(subprocess.check_output([sys.executable, "-c", text]))
        for text in (words, before)
    )
    new = {name.partition(".")[0] for name in set(names) - set(there)}
    assert new - sys.stdlib_module_names == {"tuna_cache_client"}
