"""Values of settings: each function returns its argument, or raises ValueError with the reason."""

from __future__ import annotations

import shlex

from pydantic import SecretStr

from tuna.common.messages import choices
from tuna.common.tls import checked
from tuna.vocabulary import COMPARED_POLICIES, PUBLISHING_POLICIES

#: Highest core number: Linux supports 8192 cores (NR_CPUS).
_MAX_CPU = 8191
#: Shortest signing key.
_KEY_BYTES = 16


def cpu_set(value: str) -> str:
    """Refuse what is not a list of cores."""
    parse_cpus(value)
    return value


def hex_key(value: SecretStr) -> SecretStr:
    """Refuse a key that is not hexadecimal, or short enough to be guessed."""
    try:
        key = bytes.fromhex(value.get_secret_value())
    except ValueError:
        raise ValueError("it is not hexadecimal") from None
    if len(key) < _KEY_BYTES:
        raise ValueError(f"it has less than {2 * _KEY_BYTES} digits, so it could be guessed")
    return value


def verified(value: SecretStr) -> SecretStr:
    """Refuse a URL that asks for TLS without verification."""
    checked(value.get_secret_value())
    return value


def named(value: object) -> object:
    """Refuse an empty path."""
    if value == "":
        raise ValueError("it is empty, and would be the current folder: name one, or unset it")
    return value


def command(value: str) -> str:
    """Refuse a command line that a shell could not split."""
    shlex.split(value)
    return value


def publishing_policy(name: str) -> str:
    """Refuse a policy that no coordinator publishes by."""
    if name in COMPARED_POLICIES:
        raise ValueError(f"{name} is for comparisons alone: `tuna simulate --policy {name}`")
    if name not in PUBLISHING_POLICIES:
        raise ValueError(choices(name, PUBLISHING_POLICIES, "policies"))
    return name


def parse_cpus(text: str) -> tuple[int, ...]:
    """Core numbers of a list such as `0,2-5`, ascending; raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if low < 0 or high < low or high > _MAX_CPU:
            raise ValueError(f"{part!r} is not a core or a range of cores")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))
