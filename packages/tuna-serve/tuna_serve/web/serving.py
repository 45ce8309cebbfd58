"""The process of the service: where it listens, who may reach it there, and the owner's link."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from tuna.api import get_settings
from tuna.api.rows import access_tokens, open_database, reading, utc_now, writing
from tuna.common.files import make_home, own_folder
from tuna.errors import BadInput
from tuna.services.listening import BoundedServer, Listener
from tuna.services.ports import announced, listen
from tuna_serve.requests.supervisor import RequestSupervisor
from tuna_serve.settings import service_settings
from tuna_serve.web.app import Site, create_app

_NAME = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?", re.ASCII)
#: How long the owner's link works; a new one is made when it has this much less left.
_OWNER_S, _RENEWED_S = 30 * 86_400.0, 86_400.0


@dataclass(frozen=True)
class Address:
    """Where the service listens, and how it is reached there."""

    host: str
    port: int  #: 0: any
    certificate: Path | None = None  #: PEM files of TLS
    key: Path | None = None
    #: names under which a proxy, which brings TLS, passes requests on
    behind: Sequence[str] = ()

    @classmethod
    def parse(
        cls,
        text: str,
        certificate: Path | None = None,
        key: Path | None = None,
        behind: Sequence[str] = (),
    ) -> Address:
        """Return the address of HOST:PORT; raises BadInput for one that others reach without
        TLS."""
        host, colon, port = text.rpartition(":")
        host = host.strip("[]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise BadInput(f"{text!r} is not of the form HOST:PORT.", hint="as 127.0.0.1:8080")
        for name in behind:
            if not _NAME.fullmatch(name):
                raise BadInput(f"{name[:80]!a} is not a host's name.", hint="as tuna.example.org")
        if (certificate is None) != (key is None):
            raise BadInput("A certificate and its key belong together.")
        if not (_is_loopback(host) or certificate or behind):
            raise BadInput(
                f"Tokens and results would cross the network to {host} unencrypted.",
                hint="give --tls-cert and --tls-key, or --behind-proxy NAME where a proxy has TLS",
            )
        return cls(host, int(port), certificate, key, behind)

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS of the files; raises BadInput for files that hold none."""
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"{self.certificate} and {self.key} cannot be used: {error}.") from None
        return context

    def origins(self, port: int) -> list[str]:
        """Return the origins of the pages of the service, whose hosts are those it answers for."""
        names = {self.host}
        if _is_loopback(self.host) or _is_any(self.host):
            names |= {"localhost", "127.0.0.1", "::1"}
        if _is_any(self.host):
            names |= {socket.gethostname(), socket.getfqdn(), *_own_addresses()}
        own = [self._origin(name, port) for name in sorted(names)]
        return [*own, *(f"https://{name}" for name in self.behind)]

    def url(self, port: int) -> str:
        """Return the address for a browser."""
        if self.behind:
            return f"https://{self.behind[0]}"
        return self._origin(socket.getfqdn() if _is_any(self.host) else self.host, port)

    def _origin(self, name: str, port: int) -> str:
        scheme, default = ("https", 443) if self.certificate else ("http", 80)
        host = f"[{name}]" if ":" in name else name
        return f"{scheme}://{host}" if port == default else f"{scheme}://{host}:{port}"


def _own_addresses() -> set[str]:
    """Return the addresses by which this machine's name is reached."""
    with contextlib.suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}
    return set()


def _is_any(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def serve(
    address: Address, started: Callable[[str], None], beside: Sequence[Listener] = ()
) -> None:
    """Serve in the main thread until a signal comes, and have requests worked on; `started` gets
    the owner's link. `beside`: what else this process serves.

    Raises BadInput for an address that cannot be had, DatabaseError.
    """
    settings, tls = get_settings(), address.tls()
    service_settings()  # an unusable one is told now
    engine = open_database()
    with contextlib.ExitStack() as stack:
        listeners = listen(address.host, address.port, "--listen")
        sockets = [stack.enter_context(listener) for listener in listeners]
        port = int(sockets[0].getsockname()[1])
        app = create_app(Site(engine, settings, address.origins(port)))
        server = BoundedServer(Listener(sockets, app, tls), *beside)
        make_home(settings.home)
        stack.enter_context(announced(settings.run_dir, "serve", port, address.url(port)))
        token = owner_token(engine, settings.run_dir / "serve.token")
        stack.enter_context(RequestSupervisor(settings, engine))
        started(f"{address.url(port)}/login?token={quote(token)}")
        server.run()


def owner_token(engine: sa.Engine, path: Path) -> str:
    """Return the token of the owner's link, which is kept in a file of this user alone, so that
    pages that are open go on after a restart."""
    own_folder(path.parent)
    with contextlib.suppress(OSError):
        kept = path.read_text().strip()
        name, _, secret = kept.partition(".")
        with reading(engine) as connection:
            found = access_tokens.find(connection, name)
        if found and found.is_valid and found.digest == access_tokens.digest(secret):
            left_s = (found.expires_at - utc_now()).total_seconds()
            if left_s > _RENEWED_S:
                return kept
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(24)
    with writing(engine) as connection:
        access_tokens.add(connection, token_id, secret, "admin", _OWNER_S, "owner of TUNA_HOME")
    path.unlink(missing_ok=True)
    with open(path, "x", opener=partial(os.open, mode=0o600)) as file:  # follows no link
        file.write(f"{token_id}.{secret}\n")
    return f"{token_id}.{secret}"
