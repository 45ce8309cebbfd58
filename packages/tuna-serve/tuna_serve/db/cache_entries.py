"""Caches that programs share, in SQL: entries by space, key and file, their bounds and eviction,
and the keys that packs hold. The bytes are in the artifact store."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import (
    CacheEntryRow,
    CacheHoldRow,
    Installation,
    TokenRow,
    UtcDateTime,
    check_space,
    parts,
    rows_among,
    upsert,
    utc_now,
    values_among,
)
from tuna.artifacts.signatures import CACHE, Keys
from tuna.errors import BadInput, NotFound, TunaError
from tuna_serve.settings import ServiceSettings

NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._+=@-]{1,255}", re.ASCII)
#: Beginning of the name of Triton's list of a kernel's files.
INDEX = "__grp__"
#: Largest file.
MAX_FILE_BYTES = 64 << 20
#: An entry counts as so many bytes more than it has, so that a bound of bytes bounds the rows too.
_ROW_BYTES = 1024
#: Share of a bound that is evicted beyond what a new entry needs, so that not each one evicts.
_EVICTED_BEYOND = 20
_PAGE = 1000
_columns = CacheEntryRow.__table__.c


@dataclass(frozen=True)
class EntryName:
    """The names of an entry; raises BadInput for one that cannot be."""

    space: str
    key: str
    file: str

    def __post_init__(self) -> None:
        check_space(self.space)
        for what, name in (("key", self.key), ("file", self.file)):
            if not NAME.fullmatch(name):
                raise BadInput(
                    f"{name[:80]!a} is not a name of a {what} in a cache.",
                    hint="up to 255 letters, digits, and . _ + = @ -",
                )

    def signed(self, digest: str, keys: Keys) -> str:
        """Return the id of the key that signs, and the signature of names and digest, in hex."""
        text = "\0".join((self.space, self.key, self.file, digest))
        return f"{keys.ids[0]} {keys.sign(text, CACHE).hex()}"


@dataclass(frozen=True)
class CacheEntry:
    """A file in a cache."""

    id: int
    space: str
    key: str
    file: str
    digest: str
    size_bytes: int
    refused: int
    created_at: datetime
    used_at: datetime

    @property
    def name(self) -> EntryName:
        """Its names."""
        return EntryName(self.space, self.key, self.file)


_FIELDS = [_columns[name] for name in CacheEntry.__dataclass_fields__]
#: Made once, for each of many questions a second would take longer to put than to answer.
_OF_SPACE = (
    sa.select(*_FIELDS)
    .where(_columns.space == sa.bindparam("space"))
    .order_by(_columns.key, _columns.file)
)
_OF_KEY = _OF_SPACE.where(_columns.key == sa.bindparam("key"))
_OF_FILES = _OF_KEY.where(_columns.file.in_(sa.bindparam("files", expanding=True)))


@dataclass(frozen=True)
class CacheBounds:
    """Bytes that a space may have, and those that one token may have put there."""

    space_bytes: int
    token_bytes: int

    @classmethod
    def of(cls, settings: ServiceSettings) -> CacheBounds:
        """Return the bounds of these settings."""
        return cls(settings.space_mib << 20, settings.space_token_mib << 20)


class PutOutcome(Enum):
    """Outcomes of putting an entry."""

    STORED = "stored"
    SAME = "same"  #: equal bytes were stored already
    OTHER = "other"  #: other bytes were stored already, and stay; counted


class CacheFull(TunaError):
    """A bound of the cache is reached, and packs hold what would have to go."""


def entries_of(
    connection: sa.Connection, space: str, key: str | None = None, files: Collection[str] = ()
) -> list[CacheEntry]:
    """Return the entries of a space, of one key and of that with these files if they are given, by
    name."""
    given = {"space": space, "key": key, "files": sorted(files)}
    query = _OF_SPACE if key is None else _OF_FILES if files else _OF_KEY
    return [CacheEntry(*row) for row in connection.execute(query, given)]


def put(
    connection: sa.Connection,
    name: EntryName,
    digest: str,
    size_bytes: int,
    token_id: str,
    bounds: CacheBounds,
    lost: Sequence[CacheEntry] = (),
) -> tuple[PutOutcome, list[str]]:
    """Store an entry, whose bytes are in the store; return what came of it, and the digests of
    entries that went for it. `lost`: entries whose bytes are not there, which go."""
    _lock(connection)
    remove(connection, (entry.id for entry in lost))
    stored = entries_of(connection, name.space, name.key, [name.file])
    if stored and stored[0].digest != digest:
        refuse(connection, stored[0])
        return PutOutcome.OTHER, []
    if stored:
        return PutOutcome.SAME, []
    evicted = [entry.digest for entry in lost]
    for most, scope in (
        (bounds.token_bytes, [_columns.token_id == token_id]),
        (bounds.space_bytes, []),
    ):
        total = sa.func.sum(TokenRow.space_bytes)  # of the entries it would be slow
        owners = [TokenRow.id == token_id] if scope else [TokenRow.space == name.space]
        there_bytes = int(connection.execute(sa.select(total).where(*owners)).scalar() or 0)
        excess = there_bytes + size_bytes + _ROW_BYTES - most
        if excess > 0:
            evicted += _evict(connection, name.space, scope, excess, most)
    row = {**vars(name), "digest": digest, "size_bytes": size_bytes, "token_id": token_id}
    connection.execute(sa.insert(CacheEntryRow).values(row))
    _count(connection, token_id, size_bytes + _ROW_BYTES)
    return PutOutcome.STORED, evicted


def _lock(connection: sa.Connection) -> None:
    """Let others who put or prune wait for the end of this transaction, so that bounds hold."""
    connection.execute(sa.select(Installation.id).with_for_update())


def _count(connection: sa.Connection, token_id: str, more_bytes: int) -> None:
    update = sa.update(TokenRow).where(TokenRow.id == token_id)
    connection.execute(update.values(space_bytes=TokenRow.space_bytes + more_bytes))


def _evict(
    connection: sa.Connection, space: str, scope: Sequence[Any], excess: int, most: int
) -> list[str]:
    """Remove the entries that are least used, and that no pack holds; return their digests. Raises
    CacheFull."""
    query = sa.select(_columns.id, _columns.digest, _columns.size_bytes)
    query = query.where(_columns.space == space, *scope, ~_held()).order_by(_columns.used_at)
    digests, freed = {}, 0
    rows = connection.execute(query)
    for row in rows:
        digests[row.id] = row.digest
        freed += row.size_bytes + _ROW_BYTES
        if freed >= excess + most // _EVICTED_BEYOND:
            break
    rows.close()
    if freed < excess:
        whose = "of this token in the space" if scope else "of the space"
        raise CacheFull(
            f"The entries {whose} {space} would take more than {most >> 20} MiB, and packs hold"
            " what is there.",
            hint="the owner of the service sets TUNA_SPACE_MIB and TUNA_SPACE_TOKEN_MIB",
        )
    remove(connection, digests)
    return list(digests.values())


def _held() -> sa.ColumnElement[bool]:
    same = CacheHoldRow.space == _columns.space, CacheHoldRow.key == _columns.key
    return sa.select(CacheHoldRow.pack).where(*same).exists()


def digests(connection: sa.Connection, among: Collection[str] | None = None) -> set[str]:
    """Return the artifacts that entries name, of `among` if it is given."""
    query = sa.select(_columns.digest)
    if among is None:
        return set(connection.execute(query).scalars())
    return values_among(connection, query, CacheEntryRow.digest, among)


def refuse(connection: sa.Connection, entry: CacheEntry) -> None:
    """Count that other bytes were put where this entry is."""
    update = sa.update(CacheEntryRow).where(_columns.id == entry.id)
    connection.execute(update.values(refused=_columns.refused + 1))


def touch(connection: sa.Connection, ids: Collection[int]) -> None:
    """Write down that these entries were used now."""
    for some in parts(sorted(ids)):
        update = sa.update(CacheEntryRow).where(_columns.id.in_(some))
        connection.execute(update.values(used_at=utc_now()))


def remove(connection: sa.Connection, ids: Iterable[int]) -> None:
    """Delete the rows of entries."""
    freed = sa.func.sum(_columns.size_bytes + _ROW_BYTES)
    query = sa.select(_columns.token_id, freed).group_by(_columns.token_id)
    for some in parts(sorted(ids)):
        for token_id, size_bytes in connection.execute(query.where(_columns.id.in_(some))).all():
            _count(connection, token_id, -int(size_bytes))
        connection.execute(sa.delete(CacheEntryRow).where(_columns.id.in_(some)))


def newest(
    connection: sa.Connection, space: str, limit: int, suffix: str = ""
) -> list[dict[str, Any]]:
    """Return the keys of a space with the sizes of their files, the key that was put last first;
    those with a file whose name ends with `suffix`."""
    put_at = sa.func.max(_columns.created_at)
    query = sa.select(_columns.key, put_at.label("put_at")).where(_columns.space == space)
    if suffix:
        query = query.where(_columns.file.endswith(suffix, autoescape=True))
    query = query.group_by(_columns.key).order_by(sa.desc("put_at"), _columns.key).limit(limit)
    keys = [row.key for row in connection.execute(query)]
    files = sa.select(*_FIELDS).where(_columns.space == space)
    by_key = defaultdict(list)
    for row in rows_among(connection, files, _columns.key, keys):
        by_key[row.key].append(row)
    return [
        {
            "key": key,
            "files": {row.file: row.size_bytes for row in sorted(by_key[key], key=_file)},
            "created_at": max(row.created_at for row in by_key[key]),
            "used_at": max(row.used_at for row in by_key[key]),
        }
        for key in keys
    ]


def _file(row: Any) -> str:
    return str(row.file)


@dataclass(frozen=True)
class CacheSpace:
    """A space with what it has."""

    space: str
    keys: int
    files: int
    size_bytes: int
    refused: int  #: times that other bytes were put where some are
    held: int  #: keys that packs hold
    used_at: datetime


def spaces(connection: sa.Connection) -> list[CacheSpace]:
    """Return the spaces that have entries."""
    pairs = sa.select(CacheHoldRow.space, CacheHoldRow.key).distinct().subquery()
    query = sa.select(pairs.c.space, sa.func.count()).group_by(pairs.c.space)
    held = {row[0]: row[1] for row in connection.execute(query)}
    figures = (
        sa.func.count(_columns.key.distinct()).label("keys"),
        sa.func.count().label("files"),
        sa.func.sum(_columns.size_bytes).label("size_bytes"),
        sa.func.sum(_columns.refused).label("refused"),
        sa.func.max(_columns.used_at, type_=UtcDateTime()).label("used_at"),
    )
    rows = connection.execute(
        sa.select(_columns.space, *figures).group_by(_columns.space).order_by(_columns.space)
    )
    return [
        CacheSpace(
            space=row.space,
            keys=row.keys,
            files=row.files,
            size_bytes=int(row.size_bytes),
            refused=int(row.refused),
            held=held.get(row.space, 0),
            used_at=row.used_at,
        )
        for row in rows
    ]


def prune(
    connection: sa.Connection, space: str, keys: Collection[str], unused_since: datetime | None
) -> list[CacheEntry]:
    """Remove the entries of these keys, and those that no pack holds and that were not used since
    a time; return them."""
    _lock(connection)
    conditions: list[Any] = [_columns.key.in_(sorted(keys))]
    if unused_since is not None:
        conditions.append(sa.and_(_columns.used_at < unused_since, ~_held()))
    query = sa.select(*_FIELDS).where(_columns.space == space, sa.or_(*conditions))
    found = [CacheEntry(*row) for row in connection.execute(query)]
    remove(connection, (one.id for one in found))
    for some in parts(sorted(keys)):
        mine = CacheHoldRow.space == space, CacheHoldRow.key.in_(some)
        connection.execute(sa.delete(CacheHoldRow).where(*mine))
    return found


def page(connection: sa.Connection, after: int, space: str | None = None) -> list[CacheEntry]:
    """Return the next thousand entries, of a space if it is given, behind the id `after`."""
    query = sa.select(*_FIELDS).where(_columns.id > after).order_by(_columns.id).limit(_PAGE)
    if space is not None:
        query = query.where(_columns.space == space)
    return [CacheEntry(*row) for row in connection.execute(query)]


def hold(connection: sa.Connection, space: str, keys: Collection[str], pack: str) -> None:
    """Let a pack hold these keys of a space, in place of those that it held before: their entries
    are not evicted, nor pruned for want of use."""
    connection.execute(sa.delete(CacheHoldRow).where(*_held_by(space, pack)))
    rows = [{"space": space, "key": key, "pack": pack} for key in sorted(set(keys))]
    upsert(connection, CacheHoldRow, rows, key=("space", "key", "pack"))


def let_go(connection: sa.Connection, space: str, pack: str) -> None:
    """Let a pack hold nothing of a space; raises NotFound where it holds nothing, with those that
    do."""
    if connection.execute(sa.delete(CacheHoldRow).where(*_held_by(space, pack))).rowcount == 0:
        of_space = sa.select(CacheHoldRow.pack).where(CacheHoldRow.space == space).distinct()
        names = sorted(connection.execute(of_space).scalars())
        raise NotFound(
            f"No pack {pack} holds anything of {space}.",
            hint=f"packs: {', '.join(names) or 'none'}",
        )


def _held_by(space: str, pack: str) -> tuple[sa.ColumnElement[bool], ...]:
    return CacheHoldRow.space == space, CacheHoldRow.pack == pack
