"""Spaces of the cache that programs share: list, prune, verify, pack."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tuna.api import get_settings
from tuna.api.rows import check_space, open_database, reading, sessions, transaction
from tuna.api.services import artifacts_of_models, remove_unneeded
from tuna.artifacts.signatures import Keys
from tuna.errors import BadInput, NotFound
from tuna_serve import cache_pack, pack_sources
from tuna_serve.db import cache_entries
from tuna_serve.db.cache_entries import CacheEntry, CacheSpace
from tuna_serve.programs import Packed


def list_spaces() -> list[CacheSpace]:
    """Return the spaces that have entries."""
    with reading(open_database()) as connection:
        return cache_entries.spaces(connection)


def list_cache(space: str, limit: int = 100) -> list[dict[str, Any]]:
    """Return the keys of a space with the sizes of their files, the key that was put last first.
    Raises NotFound for a space without entries."""
    with reading(open_database()) as connection:
        found = cache_entries.newest(connection, check_space(space), limit)
    if not found:
        raise cache_pack.nothing_in(space)
    return found


def prune_cache(
    space: str,
    keys: Collection[str] = (),
    unused_since: datetime | None = None,
    gone: Path | None = None,
) -> list[CacheEntry]:
    """Remove the entries of these keys, and those that were not used since a time and that no pack
    holds, with their bytes; return them. The pack that was written to `gone` holds none any more.

    Raises BadInput where nothing is said, NotFound for a key or pack that is not there.
    """
    if not keys and unused_since is None and gone is None:
        raise BadInput("What is to be pruned?", hint="give --unused, --key or --pack")
    engine = open_database()
    check_space(space)
    with reading(engine) as connection:
        for key in keys:
            if not cache_entries.entries_of(connection, space, key):
                raise NotFound(f"Unknown key {key[:255]!a} in {space}.")
    if gone is not None:
        transaction(engine, cache_entries.let_go, space, cache_pack.held_by(gone))
    pruned = transaction(engine, cache_entries.prune, space, keys, unused_since)
    remove_unneeded({entry.digest for entry in pruned})
    return pruned


@dataclass(frozen=True)
class VerifiedCache:
    """Entries whose bytes were read."""

    checked: int
    size_bytes: int
    damaged: tuple[CacheEntry, ...]  #: entries whose bytes are missing or changed


def verify_cache(space: str | None = None) -> VerifiedCache:
    """Read the bytes of each entry, of one space if it is given, and compare them with their
    SHA-256. Raises NotFound for a space without entries."""
    engine, artifacts = open_database(), artifacts_of_models()
    damaged: list[CacheEntry] = []
    checked, size_bytes, last = 0, 0, 0
    while True:
        with reading(engine) as connection:
            page = cache_entries.page(connection, last, space and check_space(space))
        if not page:
            if space is not None and not checked:
                raise cache_pack.nothing_in(space)
            return VerifiedCache(checked, size_bytes, tuple(damaged))
        for entry in page:
            if artifacts.is_whole(entry.digest):
                size_bytes += entry.size_bytes
            else:
                damaged.append(entry)
        checked, last = checked + len(page), page[-1].id


def pack_cache(
    space: str,
    folder: Path,
    at: Path | None = None,
    arch: str = "",
    chosen: Sequence[Path] = (),
) -> Packed:
    """Write a space as a folder that Triton and Helion read; see `cache_pack`.

    `at`: the absolute path at which they read it; default: where it is written. `arch`: leaves out
    kernels of others. `chosen`: folders of tiles that it has, too. Raises NotFound for a space
    without entries, BadInput, StorageFull.
    """
    plan = cache_pack.PackPlan(space, folder, at or folder.resolve(), arch, chosen)
    return cache_pack.write(open_database(), plan, artifacts_of_models(), _keys())


def check_pack(folder: Path) -> int:
    """Compare each file of a pack with its signed manifest, and return their number; raises
    PackDamaged."""
    return cache_pack.check(folder, _keys())


def verify_pack(
    folder: Path, site: Path | None = None, triton_version: str = ""
) -> pack_sources.Checked:
    """Compare the sources of a pack's kernels with those that are installed here, or in `site`;
    see `pack_sources`."""
    return pack_sources.check(folder, site, triton_version)


def _keys() -> Keys:
    with reading(open_database()) as connection:
        return sessions.artifact_keys(connection, get_settings())
