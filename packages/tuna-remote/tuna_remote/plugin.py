"""The object behind the entry point `tuna.joining`."""

from __future__ import annotations

from tuna.api import Joining
from tuna_remote.joining import create_token, join

JOINING = Joining("tuna_remote.gateway.node", create_token, join)
