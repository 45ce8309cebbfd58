"""The tables of an archive, and their rows as JSON."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.configs import Config, from_json_text
from tuna.db import configs, sessions
from tuna.db.models import Base
from tuna.db.types import UtcDateTime
from tuna.errors import BadInput

#: Tables with the columns of each kind of config; files of older versions have their rows, which
#: are computed
DETAILS = ("conv_config", "gemm_config", "batch_norm_config")
#: Tables in the order in which rows can be inserted; rows of `SHARED` do not belong to a session,
#: and existing ones stay
SHARED = ("environment", "device", "solver", "kernel", "config", *DETAILS, "config_tag")
OWN = (
    *("session", "solver_applicability", "no_solver", "search", "job"),
    *("step_result", "trial", "find_db", "find_db_kernel", "warm_start"),
)
_INT64 = 1 << 63
#: Number of rows of a table that are in memory together
_FETCH_ROWS = 1000
#: Tables whose ids are the session's own
WITH_IDS = ("search", "job", "step_result", "trial", "find_db")


def table(name: str) -> sa.Table:
    """A table of the schema."""
    return Base.metadata.tables[name]


def rows(connection: sa.Connection, name: str, *where: Any, more: Sequence[Any] = ()) -> Any:
    """Yield rows of a table, with `more` columns, by its primary key."""
    query = sa.select(table(name), *more).where(*where)
    query = query.order_by(*table(name).primary_key.columns)
    return connection.execute(query, execution_options={"yield_per": _FETCH_ROWS})


def jobs(connection: sa.Connection, *where: Any) -> Sequence[sa.Row[Any]]:
    """Jobs by id, each with `uuid` of its session, `key`, `json`, `body` and `label` of its layer,
    `solver`, and `search_stopped`: why its search ended."""
    job, session, search = table("job"), table("session"), table("search")
    config, solver = table("config"), table("solver")
    of_layer = (config.c.key, config.c.json, config.c.body, config.c.label)
    others = (session.c.uuid, search.c.stopped.label("search_stopped"))
    query = (
        sa.select(job, *of_layer, solver.c.name.label("solver"), *others)
        .join(session, session.c.id == job.c.session_id)
        .join(config, config.c.id == job.c.config_id)
        .join(solver, solver.c.id == job.c.solver_id)
        .outerjoin(search, search.c.id == job.c.search_id)
    )
    return connection.execute(query.where(*where).order_by(job.c.id)).all()


def columns() -> dict[str, list[str]]:
    """The columns of each table, in the order in which `values` gives them."""
    return {name: [column.name for column in table(name).columns] for name in (*SHARED, *OWN)}


def values(row: Iterable[Any]) -> list[Any]:
    """Convert a row for JSON: times in ISO format, bytes in base64."""
    return [_plain(value) for value in row]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


class RowReader:
    """Reads rows of one table from an archive that has these columns."""

    def __init__(self, name: str, names: Sequence[str], without: Collection[str] = ()) -> None:
        """Raises ValueError for unknown columns, and for missing ones without a default.

        `without`: columns that may be missing, because the caller fills them.
        """
        known = {field.name: field for field in table(name).columns if field.name not in without}
        if unknown := set(names) - known.keys():
            raise ValueError(f"table {name} has no column {min(unknown)}")
        missing = [
            field.name
            for field in known.values()
            if field.name not in names and not field.nullable and not _default(field)
        ]
        if missing:
            raise ValueError(f"column {missing[0]} of table {name} is missing")
        self._width = len(names)
        self._checked = _CHECKED.get(name, _as_it_is)
        self._columns: list[tuple[int, str, bool, Callable[[Any], Any]]] = [
            (place, field, bool(known[field].nullable), _reader(known[field]))
            for place, field in enumerate(names)
        ]

    def read(self, row: Any) -> dict[str, Any]:
        """The row by column; raises ValueError for values that the columns cannot have."""
        if not isinstance(row, list) or len(row) != self._width:
            raise ValueError("a row does not have one value for each column")
        found: dict[str, Any] = {}
        for place, name, nullable, reader in self._columns:
            value = row[place]
            if value is None and not nullable:
                raise ValueError(f"{name} is missing")
            found[name] = None if value is None else reader(value)
        return self._checked(found)


def _as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _config(row: dict[str, Any]) -> dict[str, Any]:
    """The row of a config, whose key must be that of its JSON, which no version has changed; texts
    and MIOpen's key are computed, which older versions wrote in other ways."""
    try:
        layer = from_json_text(row["json"])
        computed = configs.computed_columns(layer)
    except BadInput as error:
        raise ValueError(error) from None
    require_key(layer, row["key"])
    return row | computed


def require_key(layer: Config, key: str) -> None:
    """Raise ValueError for the key of another layer."""
    if layer.key != key:
        raise ValueError(f"the key of {layer.label} is {layer.key}, not {key:.64}")


def _environment(row: dict[str, Any]) -> dict[str, Any]:
    """The row of an environment, whose keys must be those of its facts."""
    environment = sessions.environment_of(row)
    if environment.key != row["key"]:
        raise ValueError(
            f"the key of the environment {environment} is {environment.key}, not {row['key']:.16}"
        )
    return row | {"machine_key": environment.machine_key}


#: Tables with columns that others of the same row determine
_CHECKED: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "config": _config,
    "environment": _environment,
}


def _default(column: sa.Column[Any]) -> bool:
    return column.default is not None or column.server_default is not None


def _reader(column: sa.Column[Any]) -> Callable[[Any], Any]:
    if isinstance(column.type, UtcDateTime):
        return _moment
    kind: Any = dict if isinstance(column.type, sa.JSON) else column.type.python_type
    if kind is bytes:
        return _bytes
    kinds: Mapping[type, Any] = {float: (int, float), int: int, bool: (bool, int)}
    expected = kinds.get(kind, kind)

    def check(value: Any) -> Any:
        if not isinstance(value, expected) or (kind is int and not -_INT64 <= value < _INT64):
            raise ValueError(f"{column.name} cannot be {value!r:.100}")
        return kind(value)

    return check


def _moment(value: Any) -> datetime:
    found = datetime.fromisoformat(value)
    if found.tzinfo is None:
        raise ValueError(f"{value} has no time zone")
    return found


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError) as error:
        raise ValueError(str(error)) from None
