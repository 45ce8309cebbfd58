"""Tokens and credentials as text, and the pin in them."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from gateway_site import HOME, GatewaySite
from hostile_texts import ALL, FORGED, MARKUP, SHELL, obeyed

from tuna.cli.main import guarded, tuna
from tuna.db import joined_workers
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna_remote.gateway import tokens
from tuna_remote.gateway.tokens import (
    Credentials,
    Gateway,
    JoinToken,
    pin_of_secret,
    pinned_context,
)

PIN = "ab" * 32
GATEWAY = Gateway("https://host:7117", PIN)


def test_a_token_reads_as_it_was_written() -> None:
    one, other = JoinToken.new(GATEWAY), JoinToken.new(GATEWAY)
    assert JoinToken.parse(f" {one.line()}\n") == one
    assert JoinToken.parse_client(tokens.client_line(one, other)) == (one, other)
    assert one.at("https://1.2.3.4:5").gateway == Gateway("https://1.2.3.4:5", PIN)
    assert one.secret not in repr(one)


def test_credentials_read_as_they_were_written() -> None:
    found = Credentials(GATEWAY, "eval-a.host-12345678", "s" * 43)
    assert Credentials.parse(found.text()) == found
    assert found.secret not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "redis://host:6379/0#a.b.c",
        f"http://host:1#{PIN}.{'0' * 12}.{'s' * 32}",
        f"https://user:pw@host:1#{PIN}.{'0' * 12}.{'s' * 32}",
        f"https://host:1/path#{PIN}.{'0' * 12}.{'s' * 32}",
        f"https://host:99999#{PIN}.{'0' * 12}.{'s' * 32}",
        f"https://#{PIN}.{'0' * 12}.{'s' * 32}",
        f"https://host:1#{PIN[1:]}.{'0' * 12}.{'s' * 32}",
        f"https://host:1#{PIN}.{'0' * 12}.short",
        f"https://host:1#{PIN}.{'0' * 12}.{'s' * 32}\nx",
    ],
)
def test_what_is_not_a_token_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        JoinToken.parse(text)
    assert "s" * 32 not in f"{refused.value}{refused.value.hint}"
    with pytest.raises(BadInput):
        Credentials.parse(text)


def test_a_token_of_one_worker_is_not_a_clients() -> None:
    with pytest.raises(BadInput, match="two tokens"):
        JoinToken.parse_client(JoinToken.new(GATEWAY).line())


def test_the_pin_is_derived_from_the_secret_as_written_down() -> None:
    """All gateways of a database, and those of other releases, must come to the same key."""
    assert tokens.pin_of_secret("01" * 32) == (
        "8fbb334a0461316644d5b9bf9773880dcf8b8236b7e4c75346feda511723723c"
    )
    assert tokens.pin_of_secret("02" * 32) != tokens.pin_of_secret("01" * 32)


def test_names_and_hosts_in_claims(site: GatewaySite, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a worker that joins: control characters are refused, the rest is inert, and its name is
    made of letters."""
    client = httpx.Client(verify=pinned_context(pin_of_secret(site.tls_secret)))
    statuses = []
    for host, device in ((SHELL + MARKUP, SHELL), (ALL, ""), ("", ALL), (FORGED, ""), ("", FORGED)):
        token = site.token()
        facts = {"host": host, "device": device, "toolchains": [HOME.toolchain]}
        asked = {"token": token.id, "token_secret": token.secret, "role": "compile", "facts": facts}
        body = json.dumps(asked | {"secret": "s" * 43})
        statuses.append(client.post(f"{site.url}/v1/join", content=body).status_code)
    assert statuses == [200, 422, 422, 422, 422]
    with reading(site.engine) as connection:
        (worker,) = joined_workers.remote_workers(connection)
    assert re.fullmatch(r"compile-[A-Za-z0-9.-]{1,80}-[0-9a-f]{8}", worker.name)
    assert guarded(tuna, ["workers"]) == 0
    said = capsys.readouterr()
    assert worker.name in said.out
    assert obeyed(said.out + said.err) == []
