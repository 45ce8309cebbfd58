"""Configs in SQL: storing them once by their key, tagging them, reading them back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tuna.common.messages import choices
from tuna.configs import Config, from_json_text
from tuna.configs.problem import text_of
from tuna.db.bulk import upsert
from tuna.db.models import (
    CONFIG_CHARS,
    Base,
    BatchNormConfigRow,
    ConfigRow,
    ConfigTag,
    ConvConfigRow,
    GemmConfigRow,
    KernelRow,
)
from tuna.errors import BadInput, NotFound

_BATCH = 2000
#: Tables with a column for each field, for people's own queries; other kinds have none.
_TYPED_TABLES: dict[str, type[Base]] = {
    "convolution": ConvConfigRow,
    "gemm": GemmConfigRow,
    "batch_norm": BatchNormConfigRow,
}


@dataclass(frozen=True)
class Stored:
    """The changes that storing configs made."""

    added: int  #: number of configs that were not stored before
    tagged: int  #: number of configs that did not carry the tag before
    missing: int = 0  #: number of configs that were to be tagged only and are not stored
    #: ids of the configs, in their order; None: not stored
    ids: tuple[int | None, ...] = field(default=(), compare=False)


def store(
    connection: sa.Connection,
    configs: Sequence[Config],
    tag: str | None,
    *,
    recurrent: bool = False,
    tag_only: bool = False,
    bodies: Mapping[str, bytes] | None = None,
) -> Stored:
    """Store `configs` (distinct) and tag them all; one that is there already is only tagged.

    `recurrent` marks them under the tag as tuned again whenever the library changes, and never
    takes the mark away. With `tag_only` nothing is added. `bodies` are the bodies of configs that
    have one, by their SHA-256; those that the database has already need not be given. Raises
    BadInput for a config without its body, or too long for a column.
    """
    added = tagged = missing = 0
    all_ids: list[int | None] = []
    for start in range(0, len(configs), _BATCH):
        part = configs[start : start + _BATCH]
        known = _ids(connection, [config.key for config in part])
        new = [config for config in part if config.key not in known]
        if tag_only:
            missing += len(new)
        else:
            _insert(connection, new, bodies or {})
            known |= _ids(connection, [config.key for config in new])
            added += len(new)
        all_ids += [known.get(config.key) for config in part]
        if tag is not None:
            tagged += _tag(
                connection, [known[c.key] for c in part if c.key in known], tag, recurrent
            )
    return Stored(added, tagged, missing, tuple(all_ids))


def _tag(connection: sa.Connection, ids: Sequence[int], tag: str, recurrent: bool) -> int:
    has = set(
        connection.execute(
            sa.select(ConfigTag.config_id).where(ConfigTag.tag == tag, ConfigTag.config_id.in_(ids))
        ).scalars()
    )
    rows = [{"tag": tag, "config_id": config_id, "recurrent": recurrent} for config_id in ids]
    upsert(
        connection,
        ConfigTag,
        rows,
        key=("tag", "config_id"),
        update=("recurrent",) if recurrent else (),
    )
    return len(set(ids) - has)


def _ids(connection: sa.Connection, keys: Sequence[str]) -> dict[str, int]:
    statement = sa.select(ConfigRow.key, ConfigRow.id).where(ConfigRow.key.in_(keys))
    return {row.key: row.id for row in connection.execute(statement)} if keys else {}


def _insert(
    connection: sa.Connection, configs: Sequence[Config], bodies: Mapping[str, bytes]
) -> None:
    wanted = {digest for config in configs if (digest := config.body_digest) is not None}
    _keep_bodies(connection, wanted, bodies)
    rows = [computed_columns(config) for config in configs]
    # another import may be storing the same ones
    upsert(connection, ConfigRow, rows, key=("key",))
    write_typed(connection, rows)


def computed_columns(config: Config) -> dict[str, Any]:
    """Return the columns of a config that its fields determine; raises BadInput for one that is too
    long."""
    row: dict[str, Any] = {
        "key": config.key,
        "kind": config.kind,
        "json": config.json_text(),
        "body": config.body_digest,
        "driver": config.text(),
        "label": config.label,
        "problem_key": text_of(config),
    }
    for name, limit in CONFIG_CHARS.items():
        length = len(str(row[name]))
        if length > limit:
            raise BadInput(
                f"the {name} of a {config.kind} config has {length} characters, more than {limit}",
                hint="what is large belongs into the config's body",
            )
    return row


def write_typed(connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the fields of stored configs into the table of their kind, where it has one with a
    column for each of their fields."""
    ids = _ids(connection, [str(row["key"]) for row in rows])
    for kind, table in _TYPED_TABLES.items():
        typed = []
        for row in rows:
            if row["kind"] == kind:
                fields = json.loads(str(row["json"]))
                del fields["kind"]
                if fields.keys() <= set(table.__table__.columns.keys()):
                    typed.append({"config_id": ids[str(row["key"])], **fields})
        upsert(connection, table, typed, key=("config_id",))


def _keep_bodies(connection: sa.Connection, digests: set[str], bodies: Mapping[str, bytes]) -> None:
    missing = digests - set(
        connection.execute(
            sa.select(KernelRow.digest).where(KernelRow.digest.in_(digests))
        ).scalars()
    )
    for digest in sorted(missing):
        if digest not in bodies:
            raise BadInput(
                f"a config needs the body {digest}, which is neither given nor in the database"
            )
        blob = bodies[digest]
        if hashlib.sha256(blob).hexdigest() != digest:
            raise BadInput(f"the body {digest} has another SHA-256")
        upsert(
            connection,
            KernelRow,
            [{"digest": digest, "blob": blob, "size_bytes": len(blob)}],
            key=("digest",),
        )


def body(connection: sa.Connection, digest: str) -> bytes:
    """The body with this SHA-256; raises NotFound."""
    blob = connection.execute(
        sa.select(KernelRow.blob).where(KernelRow.digest == digest)
    ).scalar_one_or_none()
    if blob is None:
        raise NotFound(
            f"The database has no body {digest}.", hint="import the layer with its body first"
        )
    return blob


def tagged(connection: sa.Connection, tag: str) -> Iterator[Config]:
    """The configs that carry `tag`, in the order they were stored; raises NotFound for a tag that
    nothing carries."""
    require_tag(connection, tag)
    statement = (
        sa.select(ConfigRow.json)
        .join(ConfigTag, ConfigTag.config_id == ConfigRow.id)
        .where(ConfigTag.tag == tag)
        .order_by(ConfigRow.id)
    )
    return (from_json_text(text) for text in connection.execute(statement).scalars())


def with_ids(
    connection: sa.Connection, kinds: Iterable[str], tag: str | None
) -> list[tuple[int, Config]]:
    """The id and config of every config of these kinds, or of those that carry `tag`."""
    statement = sa.select(ConfigRow.id, ConfigRow.json).where(ConfigRow.kind.in_(list(kinds)))
    if tag is not None:
        require_tag(connection, tag)
        statement = statement.join(ConfigTag, ConfigTag.config_id == ConfigRow.id).where(
            ConfigTag.tag == tag
        )
    rows = connection.execute(statement.order_by(ConfigRow.id))
    return [(row.id, from_json_text(row.json)) for row in rows]


def kinds_beside(connection: sa.Connection, kinds: Iterable[str], tag: str) -> dict[int, str]:
    """Return the kind of each config that carries `tag` and is of none of these kinds, by its
    id."""
    statement = (
        sa.select(ConfigRow.id, ConfigRow.kind)
        .join(ConfigTag, ConfigTag.config_id == ConfigRow.id)
        .where(ConfigTag.tag == tag, ConfigRow.kind.not_in(list(kinds)))
    )
    return {row.id: row.kind for row in connection.execute(statement)}


def require_tag(connection: sa.Connection, tag: str) -> None:
    """Raise NotFound with the tags there are unless something carries `tag`."""
    if (
        connection.execute(sa.select(ConfigTag.tag).where(ConfigTag.tag == tag).limit(1)).first()
        is None
    ):
        there = connection.execute(sa.select(ConfigTag.tag).distinct().limit(1000)).scalars().all()
        raise NotFound(f"No config has the tag {tag!r}.", hint=choices(tag, there, "tags"))
