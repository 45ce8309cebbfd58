"""Functions of other rooms as parts of the API: it opens the database of the settings for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from tuna.db.database import open_database
from tuna.db.engine import reading

P = ParamSpec("P")
T = TypeVar("T")


def on_connection(function: Callable[Concatenate[sa.Connection, P], T]) -> Callable[P, T]:
    """Return a function that opens the database to read, for the first parameter of this one."""

    def opened(*args: P.args, **kwargs: P.kwargs) -> T:
        with reading(open_database()) as connection:
            return function(connection, *args, **kwargs)

    return _without_first(function, opened)


def on_engine(function: Callable[Concatenate[sa.Engine, P], T]) -> Callable[P, T]:
    """Return a function that opens the database for the first parameter of this one."""

    def opened(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(open_database(), *args, **kwargs)

    return _without_first(function, opened)


def _without_first(function: Callable[..., Any], opened: Callable[P, T]) -> Callable[P, T]:
    """Name and describe `opened` as the function, whose first parameter it lacks."""
    functools.update_wrapper(opened, function)
    known = inspect.signature(function)
    lacking = known.replace(parameters=[*known.parameters.values()][1:])
    opened.__signature__ = lacking  # type: ignore[attr-defined]
    return opened
