"""Configs in SQL: storing them once by their key, tagging them, reading them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tuna.configs import Config, ConvConfig, parse_line
from tuna.db import models
from tuna.db.models import ConfigTag
from tuna.db.types import utc_now
from tuna.db.upsert import upsert
from tuna.errors import NotFound

_BATCH = 2000


@dataclass(frozen=True)
class Stored:
    """What storing configs changed."""

    added: int  #: configs that were not there before
    tagged: int  #: configs that did not carry the tag before


def store(connection: sa.Connection, configs: Sequence[Config], tag: str) -> Stored:
    """Store `configs` (distinct) and tag them all; one that is there already is only tagged."""
    added = tagged = 0
    for start in range(0, len(configs), _BATCH):
        part = configs[start : start + _BATCH]
        known = _ids(connection, [config.key for config in part])
        new = [config for config in part if config.key not in known]
        _insert(connection, new)
        known |= _ids(connection, [config.key for config in new])
        added += len(new)
        ids = [known[config.key] for config in part]
        has = set(
            connection.execute(
                sa.select(ConfigTag.config_id).where(ConfigTag.tag == tag, ConfigTag.config_id.in_(ids))
            ).scalars()
        )
        rows = [{"tag": tag, "config_id": config_id} for config_id in ids if config_id not in has]
        upsert(connection, ConfigTag, rows, key=("tag", "config_id"))
        tagged += len(rows)
    return Stored(added, tagged)


def _ids(connection: sa.Connection, keys: Sequence[str]) -> dict[str, int]:
    statement = sa.select(models.Config.key, models.Config.id).where(models.Config.key.in_(keys))
    return {row.key: row.id for row in connection.execute(statement)} if keys else {}


def _insert(connection: sa.Connection, configs: Sequence[Config]) -> None:
    now = utc_now()
    rows = [{"key": c.key, "kind": c.kind, "driver": c.driver(), "label": c.label, "created_at": now} for c in configs]
    upsert(connection, models.Config, rows, key=("key",))  # somebody else may be storing the same ones
    ids = _ids(connection, [config.key for config in configs])
    for table, kind in ((models.ConvConfig, True), (models.GemmConfig, False)):
        fields = [_fields(config, ids) for config in configs if isinstance(config, ConvConfig) is kind]
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
