"""`tuna doctor`: what this machine and its services can do, and what to change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import click

from tuna.cli import options
from tuna.cli.console import print_json, print_table
from tuna.errors import TunaError
from tuna.settings import get_settings

_LITTLE_SPACE_BYTES = 1 << 30
_OLD_REDIS = (6, 2)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    text: str
    hint: str = ""


@click.command()
@options.as_json
def doctor(as_json: bool) -> int:
    """Check settings, disk, database, Redis, artifact store, cores and libraries; exit 1 if something must change."""
    if not as_json:
        return 0 if print_findings() else 1
    findings = _findings()
    print_json([asdict(finding) for finding in findings])
    return 0 if all(finding.ok for finding in findings) else 1


def print_findings(library: str | None = None) -> bool:
    """Print what was found, of libraries only `library` if it is given; says whether all is well."""
    findings = _findings(library)
    rows = [
        ("ok" if f.ok else "CHANGE", f.what, f.text + (f"  ->  {f.hint}" if f.hint and not f.ok else ""))
        for f in findings
    ]
    print_table("", ("", "what", "found"), rows)
    return all(finding.ok for finding in findings)


def _findings(library: str | None = None) -> list[Finding]:
    return [_look(what, check) for what, check in _CHECKS.items()] + list(_libraries(library))


def _look(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except TunaError as error:
        return Finding(what, False, str(error), error.hint)


def _disk() -> Finding:
    home = get_settings().home
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{home}: {free / 1e9:.1f} GB free"
    return Finding("disk", free >= _LITTLE_SPACE_BYTES, text, "make room, or set TUNA_HOME to another disk")


def _database() -> Finding:
    from tuna.cli.database import open_database
    from tuna.db import schema

    engine = open_database()
    return Finding(
        "database", True, f"{engine.url.render_as_string(hide_password=True)}, schema {schema.revision(engine)}"
    )


def _redis() -> Finding:
    from tuna.pipeline.connection import connect, ensure_services, uses_embedded

    settings = get_settings()
    ensure_services(settings)
    info = connect(settings).info()
    version = str(info["redis_version"])
    where = "embedded" if uses_embedded(settings) else "configured"
    new_enough = tuple(int(part) for part in version.split(".")[:2]) >= _OLD_REDIS
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        return Finding("redis", False, f"{where}, {version}, may evict keys", "set maxmemory-policy noeviction")
    return Finding("redis", new_enough, f"{where}, {version}", "Tuna needs Redis 6.2 or newer")


def _artifacts() -> Finding:
    from tuna.artifacts import Artifacts

    store = Artifacts.from_settings(get_settings())
    digest = store.put(b"tuna doctor\n")
    ok = store.get(digest) == b"tuna doctor\n"
    return Finding("artifacts", ok, "can be written and read")


def _cores() -> Finding:
    from tuna.workers.devices import compile_cpus, eval_cpus

    measuring, compiling = eval_cpus(), compile_cpus()
    text = f"measure on {', '.join(map(str, measuring))}; compile on {', '.join(map(str, compiling))}"
    shared = bool(set(measuring) & set(compiling))
    return Finding("cores", not shared, text, "compiling disturbs measuring here: use a machine with two cores or more")


_CHECKS = {"disk": _disk, "database": _database, "redis": _redis, "artifacts": _artifacts, "cores": _cores}


def _libraries(only: str | None) -> Iterator[Finding]:
    from tuna.cli.actions import describe
    from tuna.libraries.registry import get_library, names

    for name in [only] if only else names():
        try:
            yield Finding(f"library {name}", True, describe(get_library(name).environment()))
        except TunaError as error:  # a library that is not here is not a fault
            yield Finding(f"library {name}", True, f"not usable here: {error} {error.hint}".strip())
