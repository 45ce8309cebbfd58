"""Tokens: of visitors of the service and of holders of its cache; all listed and revoked."""

from __future__ import annotations

import secrets
from typing import Literal
from urllib.parse import urlsplit

from tuna.api.opened import on_connection
from tuna.db import access_tokens, sessions
from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna.errors import BadInput
from tuna.services.ports import announced_urls
from tuna.settings import get_settings

VisitorRole = Literal["submit", "read", "admin"]
#: Where `tuna serve` listens unless it is told otherwise.
_DEFAULT_URL = "http://127.0.0.1:8080"


def create_visitor_token(role: VisitorRole, ttl_s: float, label: str = "") -> str:
    """Make a token for the service, and return it: `ID.SECRET`; pass it on as you would a
    password."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(24)
    with writing(open_database()) as connection:
        access_tokens.add(connection, token_id, secret, role, ttl_s, label)
    return f"{token_id}.{secret}"


def service_url() -> tuple[str, bool]:
    """Return where `tuna serve` of this TUNA_HOME is reached, and whether it runs; where none does,
    its default address."""
    urls = announced_urls(get_settings().run_dir, "serve")
    return (urls or [_DEFAULT_URL])[0], bool(urls)


def create_space_token(space: str, ttl_s: float, url: str | None = None, label: str = "") -> str:
    """Make a token for a space of the cache, and return the line for its holders: the address of
    the space, the token, and the key that verifies what comes from there.

    `url`: how holders reach the service; default: as `service_url` says.
    """
    address = urlsplit(url or service_url()[0])
    if address.scheme not in ("http", "https") or not address.hostname or address.path.strip("/"):
        raise BadInput(
            f"{(url or '')[:200]!r} is not the URL of a service.",
            hint="as https://tuna.example.org",
        )
    access_tokens.check_space(space)
    engine, token_id, secret = open_database(), secrets.token_hex(6), secrets.token_urlsafe(24)
    with writing(engine) as connection:
        access_tokens.add(connection, token_id, secret, "submit", ttl_s, label, space)
        public = sessions.artifact_keys(connection, get_settings()).public[0]
    base = f"{address.scheme}://{address.netloc}/v1/cache/{space}"
    return f"{base}#{token_id}.{secret}.{public}"


list_tokens = on_connection(access_tokens.list_all)


def revoke_token(token_id: str) -> None:
    """Revoke a token: a worker that joined with it stays, a visitor of the service is refused from
    two seconds later on. Raises NotFound."""
    with writing(open_database()) as connection:
        access_tokens.revoke(connection, token_id)
