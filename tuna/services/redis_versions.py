"""The versions of Redis and Valkey in which known holes are closed."""

from __future__ import annotations

from collections.abc import Mapping

from tuna.services.redis_client import text

#: For each branch the first version without the holes in scripts that run foreign code, as of May
#: 2026: CVE-2025-49844, and where later releases fix them, CVE-2026-23631 and CVE-2026-23479. From
#: the projects' release notes.
_REDIS = ((6, 2, 20), (7, 2, 11), (7, 4, 9), (8, 0, 4), (8, 2, 6), (8, 4, 3), (8, 6, 3))
_VALKEY = ((7, 2, 13), (8, 0, 8), (8, 1, 7), (9, 0, 4))

Version = tuple[int, ...]


def version_of(info: Mapping[str, object]) -> tuple[str, Version]:
    """Name and version of a server, by its answer to INFO; Valkey says that it is a Redis, too."""
    name = "Valkey" if "valkey_version" in info else "Redis"
    return name, tuple(int(part) for part in text(info[f"{name.lower()}_version"]).split(".")[:3])


def first_safe(name: str, version: Version) -> Version | None:
    """The first version without known holes, if this is older: of its branch, or of the next one if
    its own has none."""
    fixes = _VALKEY if name == "Valkey" else _REDIS
    fix = next((fix for fix in fixes if version[:2] <= fix[:2]), None)
    return fix if fix is not None and version < fix else None
