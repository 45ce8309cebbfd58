"""Marks tests by what they need, `service` or `tvm`, and fails a test that starts a server without
the mark.

A test needs what its own code, its fixtures, or the helpers in `tests` that they call refer to.
What is started in another way is marked by hand: `@pytest.mark.service`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

#: Whatever starts servers, or processes of other programs.
SERVICES = {
    "multiprocessing",
    "psutil",
    "subprocess",
    "fin_double.rocm.install",
    "tuna.sandbox.processes.Child",
    "tuna.sandbox.processes.run",
    "tuna.services.embedded_redis.EmbeddedRedis",
    "private_servers.install_mariadb",
    "private_servers.mariadb_server",
    "private_servers.rabbitmq_server",
    "private_servers.redis_server",
    "private_servers.running",
}
#: TVM in this process, or in those of these fixtures.
TVM = {"tvm", "tvm_ffi", "conftest.quick_timing", "conftest.tvm_forks", "conftest.tvm_here"}
#: Programs that a test without the mark does not start.
_SERVERS = {
    "celery",
    "mariadb-install-db",
    "mariadbd",
    "rabbitmq-server",
    "redis-server",
    "valkey-server",
}
_ROOT = Path(__file__).parents[1]


def add_markers(item: pytest.Item) -> None:
    """Mark a test by what it needs."""
    if not isinstance(item, pytest.Function):
        return
    fixtures = (one for found in item._fixtureinfo.name2fixturedefs.values() for one in found)
    needs = _reached(item.function, *(one.func for one in fixtures))
    if needs & SERVICES or parameters(item) & {"mariadb", "redis"}:
        item.add_marker("service")
    if needs & TVM:
        item.add_marker("tvm")


def parameters(item: pytest.Item) -> set[str]:
    """Return the words that a test is parametrised with."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {value for value in values if isinstance(value, str)}


@functools.cache  # the cases of a test reach the same
def _reached(*functions: Any) -> frozenset[str]:
    """Return the names of all that functions refer to, directly or through code in `tests`."""
    found: set[str] = set()
    todo = list(functions)
    while todo:
        one = todo.pop()
        name = _name(one)
        if name not in found:
            found.add(name)
            todo += _referred(one)
    return frozenset(found)


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0]
    return f"{value.__module__}.{value.__qualname__}"


@functools.cache
def _referred(value: Any) -> list[Any]:
    """Return the modules, classes and functions that a function or class in `tests` refers to."""
    if isinstance(value, type):
        inside = _is_ours(sys.modules.get(value.__module__))
        methods = [getattr(one, "__wrapped__", one) for one in vars(value).values()]
        return [one for one in methods if isinstance(one, FunctionType)] if inside else []
    value = getattr(value, "__wrapped__", value)
    # what `given` was applied to is no attribute of what it made
    value = getattr(getattr(value, "hypothesis", None), "inner_test", value)
    if not isinstance(value, FunctionType) or not _is_ours(sys.modules.get(value.__module__)):
        return []
    found = []
    names = set(_names(value.__code__))
    for one in [value.__globals__[name] for name in names if name in value.__globals__]:
        if isinstance(one, ModuleType):
            found += [vars(one)[name] for name in names & vars(one).keys()]
        found.append(one)
    found = [one for one in found if isinstance(one, ModuleType | FunctionType | type)]
    return [*found, *(names & TVM)]  # imported where it is used


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


@functools.cache
def _is_ours(module: ModuleType | None) -> bool:
    path = Path(getattr(module, "__file__", None) or "/")
    return path.is_relative_to(_ROOT) and bool(
        {"tests", "conftest.py"} & {*path.relative_to(_ROOT).parts}
    )


class ServiceGuard:
    """A plug-in that fails a test without the mark `service` that starts a server itself."""

    def __init__(self) -> None:
        self._started: list[str] | None = None
        sys.addaudithook(self._look)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._started = []
        result = yield
        self._started = None
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        if self._started:
            add_markers(item)
        if self._started and not item.get_closest_marker("service"):
            lines = "\n  ".join(self._started)
            pytest.fail(f"without the mark `service` it started\n  {lines}", pytrace=False)
        return result

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "subprocess.Popen" or self._started is None:
            return
        words = [str(word) for word in args[1]] if isinstance(args[1], list | tuple) else [args[1]]
        if "--version" not in words and any(Path(word).name in _SERVERS for word in words):
            self._started.append(" ".join(words))
