"""Where gateways listen, and how they are reached there."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from urllib.parse import quote

from tuna.api import get_settings
from tuna.services.ports import announced

#: Default port of `tuna gateway`.
GATEWAY_PORT = 7117
#: Beginning of the names under which gateways of one TUNA_HOME are announced.
GATEWAY = "gateway"


def gateway_url(host: str, port: int) -> str:
    """The address by which others reach a gateway; one on all addresses by this machine's name."""
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.getfqdn()
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def announced_gateway(host: str, port: int) -> contextlib.AbstractContextManager[None]:
    """Write down, while a block runs, that a gateway listens on a port that this process has."""
    name = f"{GATEWAY}-{quote(host, safe='')}"
    return announced(get_settings().run_dir, name, port, gateway_url(host, port))
