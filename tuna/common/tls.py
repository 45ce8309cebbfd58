"""TLS of the connections to Redis and the broker, always verified."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

#: Options of a URL's query, files in PEM format: the certificates of authorities, by default the
#: system's; and for servers that want a client certificate, that and its private key
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SCHEMES = ("rediss", "amqps")
#: Explicit defaults, as Celery's documentation asks for them
_VERIFIED = {"ssl_cert_reqs": "required", "ssl_check_hostname": "true"}


def checked(url: str) -> str:
    """Return the URL of a Redis or a broker; raises ValueError for TLS without verification."""
    scheme = urlsplit(url).scheme
    encrypted = [part for part in url.lower().split(";") if urlsplit(part).scheme in _SCHEMES]
    if encrypted and ";" in url.partition("?")[0]:
        raise ValueError("one rediss:// or amqps:// URL names one server")
    for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if not name.startswith("ssl"):
            continue
        if scheme not in _SCHEMES:
            raise ValueError(f"{name} is for rediss:// and amqps://")
        if name not in _FILES and _VERIFIED.get(name) != value.lower():
            raise ValueError(
                f"{name}={value[:20]} is not allowed: servers are always verified, see"
                f" {', '.join(_FILES)}"
            )
    return url


def for_celery(url: str) -> tuple[str, dict[str, Any] | None]:
    """Split a broker's URL into one without TLS options and Celery's `broker_use_ssl`.

    The options are None without TLS. Without them kombu verifies nothing at `rediss://`, and not
    the name at `amqps://`; options in the URL would replace them.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        return url, None
    query = dict(parse_qsl(parts.query))
    files = {name: query[name] for name in _FILES if name in query}
    others = urlencode({name: value for name, value in query.items() if not name.startswith("ssl")})
    plain = url.partition("?")[0] + (f"?{others}" if others else "")
    if parts.scheme == "rediss":
        return plain, {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True, **files}
    named = {name.removeprefix("ssl_"): path for name, path in files.items()}
    return plain, {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": parts.hostname, **named}
