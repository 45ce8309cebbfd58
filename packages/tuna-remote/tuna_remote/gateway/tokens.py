"""Join tokens and credentials as text, and the pin in them, which alone says who is a gateway.

    https://HOST:PORT#PIN.ID.SECRET             a token, for one worker
    https://HOST:PORT#PIN.ID.SECRET,ID.SECRET   two, for a client that compiles and measures
    https://HOST:PORT#PIN.NAME.SECRET           credentials (TUNA_GATEWAY) of a worker that joined

PIN is the SHA-256 (hex) of the SubjectPublicKeyInfo of the gateway's key.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import os
import re
import secrets
import ssl
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from tuna.errors import BadInput

_TOKEN = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{12})\.([\w-]{20,128})\Z", re.ASCII)
_CREDENTIALS = re.compile(r"([0-9a-f]{64})\.([\w.-]{1,128})\.([\w-]{40,128})\Z", re.ASCII)
_FORM = "https://host:7117#PIN.ID.SECRET"
_SEED = b"gateway tls\0"


@dataclass(frozen=True)
class Gateway:
    """The address of a gateway, and the pin of its key."""

    url: str  #: https://host:port
    pin: str

    @classmethod
    def parse_url(cls, url: str, pin: str) -> Gateway:
        """Check a URL; raises BadInput."""
        with contextlib.suppress(ValueError):
            parts = urlsplit(url.strip())
            if (
                parts.scheme == "https"
                and parts.hostname
                and parts.port != 0
                and not (parts.username or parts.password or parts.query or parts.fragment)
                and parts.path in ("", "/")
            ):
                return cls(f"https://{parts.netloc}", pin)
        raise BadInput(
            f"{url[:200]!r} is not the URL of a gateway.", hint="examples: https://host:7117"
        )


@dataclass(frozen=True)
class JoinToken:
    """A join token as passed from person to person; its `repr` hides the secret."""

    gateway: Gateway
    id: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls, gateway: Gateway) -> JoinToken:
        """Make a token."""
        return cls(gateway, secrets.token_hex(6), secrets.token_urlsafe(24))

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Parse a token; raises BadInput, without the secret in its message."""
        url, _, token = text.strip().partition("#")
        if not (found := _TOKEN.match(token)):
            raise BadInput(
                "This is not a join token.",
                hint=f"give the line that `tuna token create` printed: {_FORM}",
            )
        return cls(Gateway.parse_url(url, found[1]), found[2], found[3])

    @classmethod
    def parse_client(cls, text: str) -> tuple[JoinToken, JoinToken]:
        """Parse the two tokens, for compile and for eval, of a client's line; raises BadInput."""
        start, mark, other = text.strip().rpartition(",")
        if not mark:
            raise BadInput(
                "This is not the line of a client, which has two tokens.",
                hint="give the line that `tuna token create --role client` printed",
            )
        first = cls.parse(start)
        return first, cls.parse(f"{first.gateway.url}#{first.gateway.pin}.{other}")

    def line(self) -> str:
        """The whole line, secret included."""
        return f"{self.gateway.url}#{self.gateway.pin}.{self.id}.{self.secret}"

    def at(self, url: str) -> JoinToken:
        """The token for the same gateway under another address."""
        return replace(self, gateway=Gateway.parse_url(url, self.gateway.pin))


def client_line(compiles: JoinToken, measures: JoinToken) -> str:
    """Two tokens of one gateway in one line."""
    return f"{compiles.line()},{measures.id}.{measures.secret}"


@dataclass(frozen=True)
class Credentials:
    """Name and secret of a worker that joined; the `repr` hides the secret."""

    gateway: Gateway
    name: str
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Credentials:
        """Parse TUNA_GATEWAY; raises BadInput, without the secret in its message."""
        url, _, rest = text.partition("#")
        if not (found := _CREDENTIALS.match(rest)):
            raise BadInput(
                "TUNA_GATEWAY holds no credentials.", hint="workers get it when they join: --join"
            )
        return cls(Gateway.parse_url(url, found[1]), found[2], found[3])

    def text(self) -> str:
        """The value of TUNA_GATEWAY."""
        return f"{self.gateway.url}#{self.gateway.pin}.{self.name}.{self.secret}"


class PinMismatch(ssl.SSLError):
    """The server's key is not the one that the token names."""


def pinned_context(pin: str) -> ssl.SSLContext:
    """A client's TLS, which verifies the pin and nothing else, before anything is sent."""

    class _PinnedSocket(ssl.SSLSocket):
        def do_handshake(self, *args: Any, **options: Any) -> None:
            super().do_handshake(*args, **options)
            shown = self.getpeercert(binary_form=True)
            if not shown or not secrets.compare_digest(_pin_of_certificate(shown), pin):
                raise PinMismatch("the key of the server is not the one that the token names")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin says who the server is
    context.sslsocket_class = _PinnedSocket
    return context


def server_context(secret: str) -> ssl.SSLContext:
    """A gateway's TLS: the key is derived from the installation's `secret` (hex), so that all
    gateways of one database have the same."""
    key = _key(secret)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tuna-gateway")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(2020, 1, 1))
        .not_valid_after(dt.datetime(2120, 1, 1))
        .sign(key, None)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="tuna-") as folder:  # OpenSSL reads files alone
        path = Path(folder, "gateway.pem")
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(path)
        os.truncate(path, 0)
    return context


def pin_of_secret(secret: str) -> str:
    """The pin of the gateways of an installation."""
    return _pin(_key(secret).public_key())


def _pin_of_certificate(shown: bytes) -> str:
    return _pin(x509.load_der_x509_certificate(shown).public_key())


def _pin(key: Any) -> str:
    return hashlib.sha256(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    ).hexdigest()


def _key(secret: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(
        hashlib.sha256(_SEED + bytes.fromhex(secret)).digest()
    )
