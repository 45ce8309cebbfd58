"""Tokens and credentials as text, and the pin in them."""

from __future__ import annotations

import pytest

from tuna.errors import BadInput
from tuna_remote.gateway import tokens
from tuna_remote.gateway.tokens import Credentials, Gateway, JoinToken

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
