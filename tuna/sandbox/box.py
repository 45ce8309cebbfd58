"""The sandbox round foreign code, as rules for this machine; `child` applies them.

Files are closed by `landlock`; sockets, signals and other ways out by `seccomp`. Open are, for
reading, the programs and libraries of the system, of Python and of ROCm, and the folders that the
settings name; also the folders and devices of a `Box`. Everything else is closed, TUNA_HOME and the
user's home included.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import structlog

from tuna.common.control_groups import memory_bytes as machine_memory_bytes
from tuna.common.settings_file import settings_paths
from tuna.errors import ServiceError
from tuna.sandbox import landlock, seccomp
from tuna.sandbox.discovery import vendors
from tuna.settings import Settings, get_settings

log = structlog.get_logger(__name__)

#: Folders that a child may read: programs, libraries and the system files that they need. Landlock
#: closes other processes' memory and environment in /proc.
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt"),
    *("/nix/store", "/gnu/store", "/proc", "/sys"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload"),
    *("/etc/alternatives", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/etc/localtime", "/etc/os-release", "/etc/OpenCL"),
)
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
#: Files of the name resolver
_RESOLVER = ("/etc/hosts", "/etc/resolv.conf", "/etc/gai.conf")
#: Device node that drivers of GPUs map shared, which is memory that no limit counts
_SHARED = "zero"
#: Maximum of a child's open files
_OPEN_FILES = 4096
#: Folder that contains Tuna: installed packages, or a checkout
_ROOT = Path(__file__).resolve().parents[2]
_INSTALLED = {"site-packages", "dist-packages"}
#: Entry points of packages that children import
_GROUPS = ("tuna.libraries", "tuna.libraries.simulated", "tuna.kinds")
_HINT = "set TUNA_SANDBOX=auto to run with what this kernel has, or use one that has more"


@dataclass(frozen=True)
class Box:
    """Access of a child beyond the system; HOME and TMPDIR are the first writable folder."""

    writable: Sequence[Path] = ()
    readable: Sequence[Path] = ()
    gpus: bool = False
    #: true to let the child open connections over IPv4 and IPv6; it accepts none
    network: bool = False


def lacking() -> list[str]:
    """Return the gaps of a box on this machine as short phrases; empty when it is complete."""
    found = []
    if not landlock.version():
        found.append(
            "files of this user (no Landlock: it needs Linux 5.13 or newer, with landlock among the"
            " kernel's lsm=)"
        )
    if not seccomp.available():
        found.append("network, signals to other processes, detached sessions (no seccomp filter)")
    return found


def check(settings: Settings) -> None:
    """Log once what stays open here; raises ServiceError if TUNA_SANDBOX is `require`."""
    found = lacking()
    if settings.sandbox == "require" and found:
        raise ServiceError(
            f"Foreign code would not be boxed here; open: {'; '.join(found)}.", hint=_HINT
        )
    _warn_once(settings.sandbox, tuple(found))


@functools.cache
def _warn_once(mode: str, found: tuple[str, ...]) -> None:
    if mode == "off":
        log.warning("sandbox off: built and measured code has this user's rights")
    elif found:
        log.warning("sandbox incomplete", open="; ".join(found))


def facts(box: Box | None, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the limits that `child` applies, None for no box; raises as `check` does.

    `env` is the child's environment.
    """
    settings = get_settings()
    if box is None or settings.sandbox == "off":
        return None
    check(settings)
    abi = landlock.version()
    rules = list(_rules(box, env, settings)) if abi else []
    return {
        "landlock": abi,
        "seccomp": seccomp.available(),
        "rules": rules,
        "network": box.network,
        "gpus": box.gpus,
    }


def resources(box: Box | None, memory_bytes: int | None) -> dict[str, int]:
    """Return a child's limits by their names in module `resource`; without a box, memory alone.

    Memory is limited by RLIMIT_DATA, which counts private writable memory: heap, anonymous maps,
    thread stacks. RLIMIT_AS would also count reservations and mapped files, such as half a gigabyte
    of compiler libraries and 64 MiB per allocator arena, so that a limit tight enough to help would
    stop a program that uses little; measured code gets one after all that is loaded
    (`self_limits.bound_memory`).
    """
    if box is None:
        return {"RLIMIT_DATA": memory_bytes} if memory_bytes else {}
    settings = get_settings()
    limits = {
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_DATA": settings.sandbox_memory_mib << 20 or memory_bytes or machine_memory_bytes(),
        "RLIMIT_FSIZE": settings.sandbox_file_mib << 20,
        "RLIMIT_NPROC": settings.sandbox_processes,
    }
    return {name: most for name, most in limits.items() if most}


def at_home(box: Box | None, env: Mapping[str, str]) -> dict[str, str]:
    """`env` with HOME and TMPDIR inside the box."""
    if box is None or get_settings().sandbox == "off" or not box.writable:
        return dict(env)
    return {**env, **dict.fromkeys(("HOME", "TMPDIR"), str(box.writable[0]))}


def _rules(box: Box, env: Mapping[str, str], settings: Settings) -> Iterator[tuple[str, int]]:
    system = (*_SYSTEM, *_RESOLVER) if box.network else _SYSTEM
    packages, folders = _python()
    libraries = [
        *system,
        *packages,
        *_split(env.get("PYTHONPATH")),
        *_split(env.get("LD_LIBRARY_PATH")),
    ]
    named = [os.path.realpath(settings.rocm_path), *_split(settings.sandbox_read)]
    hidden = _hidden(settings)
    for path in dict.fromkeys([*libraries, *named]):
        yield from _without(path, hidden)
    yield from ((path, int(landlock.LIST)) for path in folders)
    yield from ((str(path), int(landlock.READ)) for path in box.readable)
    writable = [*box.writable, *_split(settings.sandbox_write)]
    yield from ((str(path), int(landlock.WRITE)) for path in writable)
    patterns = [pattern for vendor in vendors() for pattern in vendor.nodes]
    nodes = (str(node) for pattern in (*patterns, _SHARED) for node in Path("/dev").glob(pattern))
    devices = (*_DEVICES, *nodes) if box.gpus else _DEVICES
    yield from ((path, int(landlock.DEVICE)) for path in devices)


def _hidden(settings: Settings) -> list[str]:
    """Return paths that stay closed inside readable folders: settings, databases, the checkout."""
    url = settings.db_url.get_secret_value() if settings.db_url else ""
    kind, _, database = url.partition(":///")
    ends = ("", "-wal", "-shm", "-journal") if kind.startswith("sqlite") else ()
    files = [Path(unquote(database.partition("?")[0]) + end) for end in ends]
    hidden = [settings.home, *settings_paths(), *files]
    return [*(os.path.realpath(path) for path in hidden), *_beside_tuna()]


@functools.cache
def _beside_tuna() -> tuple[str, ...]:
    """Return everything in Tuna's checkout but packages, because PYTHONPATH names all of it."""
    if _INSTALLED & set(_ROOT.parts):
        return ()
    python = os.path.realpath(sys.prefix)
    others = (
        entry.path
        for entry in os.scandir(_ROOT)
        if not entry.is_symlink() and not _is_importable(entry)
    )
    return tuple(path for path in others if not _is_in(python, path))


def _is_in(path: str, folder: str) -> bool:
    """Whether an absolute path is a folder or below it: `os.path.commonpath` takes 10 us."""
    return f"{path}/".startswith(folder.rstrip("/") + "/")


def _without(path: str, hidden: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield rules to read a path without what is hidden in it, and without the links in it."""
    real = os.path.realpath(path)
    inside = [one for one in hidden if _is_in(one, real)]
    if not inside:
        yield path, int(landlock.READ)
    elif real not in inside:
        yield path, int(landlock.LIST)
        for entry in os.scandir(real):
            if not entry.is_symlink():
                yield from _without(entry.path, inside)


@functools.cache
def _python() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the places of Python, its packages, Tuna and plug-ins, and plug-ins' checkouts."""
    # some programs put the working directory into it
    not_ours = {Path.cwd()}
    with contextlib.suppress(RuntimeError):  # of a user without a name and without HOME
        not_ours |= {Path.home(), *Path.home().parents}
    on_path = [place for place in sys.path if Path(place).absolute() not in not_ours]
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    places, folders = [*own, os.path.realpath(sys.executable)], []
    for place in filter(os.path.isabs, on_path):
        if (
            _INSTALLED & set(Path(place).parts)
            or place.startswith(tuple(own))
            or not Path(place).is_dir()
        ):
            places.append(place)
        else:  # a plug-in's checkout
            folders.append(place)
            places += [entry.path for entry in os.scandir(place) if _is_importable(entry)]
    points = [point for group in _GROUPS for point in entry_points(group=group)]
    for top in sorted({point.module.partition(".")[0] for point in points}):
        spec = find_spec(top)
        places += [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    return tuple(dict.fromkeys(filter(os.path.isabs, places))), tuple(folders)


def _is_importable(entry: os.DirEntry[str]) -> bool:
    """Whether a folder's entry is a package, a module, or metadata of installed ones."""
    if entry.is_dir():
        return (
            entry.name.endswith((".egg-info", ".dist-info"))
            or Path(entry.path, "__init__.py").exists()
        )
    return entry.name.endswith((".py", ".so", ".egg-link"))


def _split(paths: str | None) -> list[str]:
    return list(filter(os.path.isabs, (paths or "").split(os.pathsep)))


def found_program(name: str, env: Mapping[str, str]) -> tuple[Path, ...]:
    """The file of a program, if there is one, for the box in which it runs."""
    found = shutil.which(name, path=env.get("PATH"))
    return (Path(found).resolve(),) if found else ()
