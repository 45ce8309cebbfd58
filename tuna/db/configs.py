"""Configs in SQL: storing them once by their key, tagging them, reading them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from tuna.configs import Config, parse_line, problem_key
from tuna.db import models
from tuna.db.models import ConfigTag
from tuna.db.types import utc_now
from tuna.db.upsert import upsert
from tuna.errors import NotFound

_BATCH = 2000
_TABLES: dict[str, type[models.Base]] = {
    "convolution": models.ConvConfig,
    "gemm": models.GemmConfig,
    "batch_norm": models.BatchNormConfig,
}


@dataclass(frozen=True)
class Stored:
    """What storing configs changed."""

    added: int  #: configs that were not there before
    tagged: int  #: configs that did not carry the tag before
    missing: int = 0  #: configs that were only to be tagged and are not there
    ids: tuple[int | None, ...] = field(default=(), compare=False)  #: of the configs, in their order


def store(
    connection: sa.Connection,
    configs: Sequence[Config],
    tag: str | None,
    *,
    recurrent: bool = False,
    tag_only: bool = False,
) -> Stored:
    """Store `configs` (distinct) and tag them all; one that is there already is only tagged.

    `recurrent` marks them under the tag as tuned again whenever the library changes, and never takes the mark away.
    With `tag_only` nothing is added.
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
            _insert(connection, new)
            known |= _ids(connection, [config.key for config in new])
            added += len(new)
        all_ids += [known.get(config.key) for config in part]
        if tag is not None:
            tagged += _tag(connection, [known[c.key] for c in part if c.key in known], tag, recurrent)
    return Stored(added, tagged, missing, tuple(all_ids))


def _tag(connection: sa.Connection, ids: Sequence[int], tag: str, recurrent: bool) -> int:
    has = set(
        connection.execute(
            sa.select(ConfigTag.config_id).where(ConfigTag.tag == tag, ConfigTag.config_id.in_(ids))
        ).scalars()
    )
    rows = [{"tag": tag, "config_id": config_id, "recurrent": recurrent} for config_id in ids]
    upsert(connection, ConfigTag, rows, key=("tag", "config_id"), update=("recurrent",) if recurrent else ())
    return len(set(ids) - has)


def _ids(connection: sa.Connection, keys: Sequence[str]) -> dict[str, int]:
    statement = sa.select(models.Config.key, models.Config.id).where(models.Config.key.in_(keys))
    return {row.key: row.id for row in connection.execute(statement)} if keys else {}


def _insert(connection: sa.Connection, configs: Sequence[Config]) -> None:
    now = utc_now()
    rows = [
        {
            "key": config.key,
            "kind": config.kind,
            "driver": config.driver(),
            "label": config.label,
            "problem_key": problem_key.text_of(config),
            "created_at": now,
        }
        for config in configs
    ]
    upsert(connection, models.Config, rows, key=("key",))  # somebody else may be storing the same ones
    ids = _ids(connection, [config.key for config in configs])
    for kind, table in _TABLES.items():
        fields = [_fields(config, ids) for config in configs if config.kind == kind]
        upsert(connection, table, fields, key=("config_id",))


def _fields(config: Config, ids: dict[str, int]) -> dict[str, object]:
    fields: dict[str, object] = dict(config.to_json())
    del fields["kind"]
    return {"config_id": ids[config.key], **fields}


def tagged(connection: sa.Connection, tag: str) -> Iterator[Config]:
    """The configs that carry `tag`, in the order they were stored; raises NotFound for a tag that nothing carries."""
    require_tag(connection, tag)
    statement = (
        sa.select(models.Config.driver)
        .join(ConfigTag, ConfigTag.config_id == models.Config.id)
        .where(ConfigTag.tag == tag)
        .order_by(models.Config.id)
    )
    return (parse_line(driver)[0] for driver in connection.execute(statement).scalars())


def with_ids(connection: sa.Connection, kinds: Iterable[str], tag: str | None) -> list[tuple[int, Config]]:
    """The id and config of every config of these kinds, or of those that carry `tag`."""
    statement = sa.select(models.Config.id, models.Config.driver).where(models.Config.kind.in_(list(kinds)))
    if tag is not None:
        require_tag(connection, tag)
        statement = statement.join(ConfigTag, ConfigTag.config_id == models.Config.id).where(ConfigTag.tag == tag)
    rows = connection.execute(statement.order_by(models.Config.id))
    return [(row.id, parse_line(row.driver)[0]) for row in rows]


def require_tag(connection: sa.Connection, tag: str) -> None:
    """Raise NotFound with the tags there are unless something carries `tag`."""
    if connection.execute(sa.select(ConfigTag.tag).where(ConfigTag.tag == tag).limit(1)).first() is None:
        there = sorted(connection.execute(sa.select(ConfigTag.tag).distinct().limit(20)).scalars())
        raise NotFound(f"No config has the tag {tag!r}.", hint=f"tags: {', '.join(there) or 'none yet'}")
