"""`tuna doctor`: what this machine and its services can do, and what to change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

import click
import redis
from sqlalchemy.exc import DBAPIError

from tuna.cli import options
from tuna.cli.console import print_json, print_table
from tuna.doctor import Finding
from tuna.errors import ServiceError, TunaError
from tuna.settings import get_settings

_LITTLE_SPACE_BYTES = 1 << 30


@click.command()
@options.as_json
def doctor(as_json: bool) -> int:
    """Check disk, database, Redis, broker, artifact store, cores and libraries; exit 1 if something must change.

    A warning is about what costs time, not data.
    """
    if not as_json:
        return 0 if print_findings() else 1
    findings = _findings()
    print_json([asdict(finding) for finding in findings])
    return 0 if all(finding.ok for finding in findings) else 1


def print_findings(library: str | None = None) -> bool:
    """Print what was found, of libraries only `library` if it is given; says whether all is well."""
    findings = _findings(library)
    rows = [
        (_word(f), f.what, f.text + (f"  ->  {f.hint}" if f.hint and (f.warning or not f.ok) else "")) for f in findings
    ]
    print_table("", ("", "what", "found"), rows)
    return all(finding.ok for finding in findings)


def _word(finding: Finding) -> str:
    return "CHANGE" if not finding.ok else "warning" if finding.warning else "ok"


def _findings(library: str | None = None) -> list[Finding]:
    found = [finding for what, check in _CHECKS.items() for finding in _look(what, check)]
    return found + list(_libraries(library))


def _look(what: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except (TunaError, redis.RedisError, DBAPIError) as error:
        hint = "start it, or correct its URL" if isinstance(error, ServiceError) else getattr(error, "hint", "")
        return [Finding(what, False, str(error).splitlines()[0], hint)]


def _disk() -> Iterator[Finding]:
    home = get_settings().home
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{home}: {free / 1e9:.1f} GB free"
    yield Finding("disk", free >= _LITTLE_SPACE_BYTES, text, "make room, or set TUNA_HOME to another disk")


def _database() -> Iterator[Finding]:
    from tuna import doctor
    from tuna.cli.database import open_database

    return doctor.of_sql(open_database())


def _redis() -> Iterator[Finding]:
    from tuna import doctor
    from tuna.pipeline.connection import ensure_services

    ensure_services(get_settings())
    return doctor.of_redis(get_settings())


def _broker() -> Iterator[Finding]:
    from tuna import doctor
    from tuna.pipeline.connection import broker_url, redis_url

    settings = get_settings()
    if settings.broker_url is not None and broker_url(settings) != redis_url(settings):
        yield from doctor.of_broker(settings)


def _artifacts() -> Iterator[Finding]:
    from tuna import doctor

    return doctor.of_artifacts(get_settings())


def _cores() -> Iterator[Finding]:
    from tuna.sandbox.cores import compile_cpus, eval_cpus

    measuring, compiling = eval_cpus(), compile_cpus()
    text = f"measure on {', '.join(map(str, measuring))}; compile on {', '.join(map(str, compiling))}"
    shared = bool(set(measuring) & set(compiling))
    yield Finding("cores", not shared, text, "compiling disturbs measuring here: use a machine with two cores or more")


_CHECKS = {
    "disk": _disk,
    "database": _database,
    "redis": _redis,
    "broker": _broker,
    "artifacts": _artifacts,
    "cores": _cores,
}


def _libraries(only: str | None) -> Iterator[Finding]:
    from tuna.cli.actions import describe
    from tuna.libraries.registry import get_library, names

    for name in [only] if only else names():
        try:
            yield Finding(f"library {name}", True, describe(get_library(name).environment()))
        except TunaError as error:  # a library that is not here is not a fault
            yield Finding(f"library {name}", True, f"not usable here: {error} {error.hint}".strip())
