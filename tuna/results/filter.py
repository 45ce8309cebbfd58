"""The conditions of a `ResultFilter` as SQL: on configs, and on the results of sessions and golden
versions."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import sqlalchemy as sa

from tuna.common.messages import choices
from tuna.db import known_sessions
from tuna.db.types import tagged
from tuna.errors import BadInput, NotFound
from tuna.results.core_tables import (
    config,
    device,
    environment,
    model_config,
    session,
    solver,
    step_result,
)
from tuna.results.result_rows import MAX_LIMIT, ResultFilter
from tuna.results.selectable import Results

_Condition = sa.ColumnElement[bool]
#: Minimum of digits with which a config key is named
_KEY_DIGITS = 8


@dataclass(frozen=True)
class Conditions:
    """A filter as SQL. `sessions` and `solvers` are ids; None: all."""

    wanted: ResultFilter
    configs: tuple[_Condition, ...]
    sessions: tuple[int, ...] | None
    device: str | None  #: name of one of several devices of an environment
    solvers: tuple[int, ...] | None

    def of(self, results: Results, *, of_layers: bool = False) -> list[_Condition]:
        """On results of one provenance, without what concerns configs; `of_layers`: these are named
        beside it."""
        found: list[_Condition] = []
        # a sum keeps SQLite from an index that has far more rows than the layers have
        if self.sessions is not None:
            column = results["session_id"]
            found.append(
                (column + 0 if of_layers and results.released else column).in_(self.sessions)
            )
        if self.solvers is not None:
            column = results["solver_id"]
            found.append((column + 0 if of_layers else column).in_(self.solvers))
        if self.wanted.since is not None:
            found.append(results["kept_at"] >= self.wanted.since)
        if self.device is not None:
            found.append(_measured_on(results, self.device))
        return found


def _measured_on(results: Results, name: str) -> _Condition:
    if results.released:
        return cast("_Condition", results["device"] == name)
    attempt = step_result.alias("attempt_here")
    return sa.exists().where(attempt.c.job_id == results["measured_by"], attempt.c.device == name)


def conditions(connection: sa.Connection, wanted: ResultFilter) -> Conditions:
    """The filter as SQL; raises NotFound for an unknown name, with the known ones, and
    BadInput."""
    if not 1 <= wanted.limit <= MAX_LIMIT:
        raise BadInput(
            f"1 to {MAX_LIMIT} rows can be asked for, not {wanted.limit}.",
            hint="all results: `tuna export`",
        )
    if wanted.n_best is not None and wanted.n_best < 1:
        raise BadInput(f"At least the best trial can be asked for, not {wanted.n_best}.")
    on_configs = tuple(_on_configs(connection, wanted))
    solvers = _solvers(connection, wanted)
    return Conditions(wanted, on_configs, *_sessions(connection, wanted), solvers)


def _on_configs(connection: sa.Connection, wanted: ResultFilter) -> Iterator[_Condition]:
    if wanted.model is not None:
        from tuna.db import networks

        model_id, _ = networks.find(connection, wanted.model)
        yield config.c.id.in_(
            sa.select(model_config.c.config_id).where(model_config.c.model_id == model_id)
        )
    if wanted.tag is not None:
        from tuna.db import configs

        configs.require_tag(connection, wanted.tag)
        yield tagged(config.c.id, wanted.tag)
    if wanted.layer is not None:
        yield _named(wanted.layer)
    if wanted.op is not None:
        kind = _kind(wanted.op)
        yield sa.or_(
            config.c.kind == kind, sa.and_(config.c.kind == "task", _holds(f'"kind":"{kind}"'))
        )
    for text in wanted.shape:
        yield _shape(text)
    if wanted.dtype is not None:
        from tuna.configs import DataType

        name = wanted.dtype.upper()
        if name not in DataType.__members__:
            raise BadInput(
                f"Unknown data type {wanted.dtype!r}.",
                hint=f"there are {', '.join(DataType.__members__)}",
            )
        yield _holds(f'"data_type":"{DataType[name].value}"')


def _holds(text: str) -> _Condition:
    """Whether the config's JSON, which is written without spaces, or that of a task's core contains
    this."""
    return sa.func.instr(config.c.json, text) > 0


def _kind(op: str) -> str:
    from tuna.configs import KINDS

    names = sorted(KINDS.names())
    found = [op] if op in names else [name for name in names if name.startswith(op)]
    if len(found) != 1:
        raise NotFound(f"Unknown kind of layer {op!r}.", hint=f"kinds: {', '.join(names)}")
    return found[0]


def _shape(text: str) -> _Condition:
    name, mark, value = text.partition("=")
    if not mark:
        return sa.func.instr(config.c.label, text) > 0
    from tuna.configs import KINDS

    fields = {field for kind in KINDS.all().values() for field in kind.config.field_names()}
    if name not in fields:
        raise BadInput(
            f"No kind of layer has a field {name!r}.", hint=f"fields: {', '.join(sorted(fields))}"
        )
    values = [json.dumps(value)]
    with contextlib.suppress(ValueError):
        values.append(json.dumps(json.loads(value), separators=(",", ":")))
    return sa.or_(*(_holds(f'"{name}":{one}{end}') for one in values for end in ",}"))


def _named(text: str) -> _Condition:
    from tuna.configs import read_line

    names = [config.c.label == text, config.c.problem_key == text, config.c.driver == text]
    if len(text) >= _KEY_DIGITS and re.fullmatch("[0-9a-f]+", text):
        names.append(config.c.key.startswith(text))
    with contextlib.suppress(BadInput):
        names += [config.c.key == layer.key for layer in read_line(text)]
    return sa.or_(*names)


def _solvers(connection: sa.Connection, wanted: ResultFilter) -> tuple[int, ...] | None:
    if wanted.solver is None:
        return None
    query = sa.select(solver.c.id).where(solver.c.name == wanted.solver)
    if wanted.library is not None:
        query = query.where(solver.c.library == wanted.library)
    found = tuple(connection.execute(query).scalars())
    if not found:
        known = connection.execute(sa.select(solver.c.name).distinct()).scalars()
        raise NotFound(
            f"Unknown solver {wanted.solver!r}.", hint=choices(wanted.solver, known, "solvers")
        )
    return found


def _sessions(
    connection: sa.Connection, wanted: ResultFilter
) -> tuple[tuple[int, ...] | None, str | None]:
    """The sessions, and the name of the device if one of several is meant."""
    if wanted.session_id is not None:
        known_sessions.require(connection, wanted.session_id)
    values = [wanted.library, wanted.arch, wanted.device, wanted.environment, wanted.session_id]
    if all(value is None for value in values):
        return None, None
    query = sa.select(session.c.id).join(environment, environment.c.id == session.c.environment_id)
    of_key = environment.c.key.startswith(wanted.environment or "", autoescape=True)
    for what, value, condition in (
        ("session", wanted.session_id, session.c.id == wanted.session_id),
        ("library", wanted.library, environment.c.library == wanted.library),
        ("architecture", wanted.arch, environment.c.arch == wanted.arch),
        ("environment", wanted.environment, of_key),
    ):
        if value is not None:
            query = query.where(condition)
            if connection.execute(query.limit(1)).first() is None:
                raise NotFound(f"No session has the {what} {value!r}.", hint=_there(connection))
    if wanted.device is None:
        return tuple(connection.execute(query).scalars()), None
    described = sa.func.instr(sa.func.lower(environment.c.device), wanted.device.lower()) > 0
    ids = tuple(connection.execute(query.where(described)).scalars())
    if ids:
        return ids, None
    named = sa.select(device.c.environment_id).where(device.c.name == wanted.device)
    ids = tuple(connection.execute(query.where(environment.c.id.in_(named))).scalars())
    if not ids:
        raise NotFound(f"No session has the device {wanted.device!r}.", hint=_there(connection))
    return ids, wanted.device


def _there(connection: sa.Connection) -> str:
    columns = (environment.c.library, environment.c.arch, environment.c.device, environment.c.key)
    rows = connection.execute(sa.select(*columns).order_by(environment.c.id.desc()).limit(10))
    return "environments: " + (
        "; ".join(" ".join(filter(None, map(str, row))) for row in rows) or "none yet"
    )
