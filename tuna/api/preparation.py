"""Sessions before they run: environment, solvers, applicability; or all of it for a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuna.api.configs import (
    ImportedConfigs,
    Network,
    Storing,
    check_tag,
    read_layers,
    store_network,
    store_parsed,
)
from tuna.api.jobs import LoadedJobs, Options, load_jobs, nothing_to_tune, session_library
from tuna.common import logs
from tuna.configs import Config
from tuna.db import sessions, solvers
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.solvers import Applicability, StoredSolver
from tuna.libraries import registry
from tuna.libraries.abilities import environment_of, unsupported_feature
from tuna.libraries.base import Environment, Library
from tuna.libraries.options import Condition, check, chosen, describe
from tuna.libraries.registry import get_library
from tuna.settings import get_settings


@dataclass(frozen=True)
class StartedSession:
    """The requested session; `new` unless it existed already."""

    id: int
    reason: str
    environment: Environment
    new: bool


@dataclass(frozen=True)
class Tuning:
    """A session that is wanted, and its jobs."""

    library: str = "tvm"
    reason: str = ""  #: reason of the session; empty: made from the tag
    options: Options = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    solvers: Sequence[str] = ()  #: names of solvers; empty: every applicable one


_TVM = Tuning()


@dataclass(frozen=True)
class PreparedTuning:
    """A session that can be run, and what was done for it."""

    session: StartedSession
    tag: str
    imported: ImportedConfigs
    solvers: int
    applicability: Applicability
    loaded: LoadedJobs


def init_session(
    library: str,
    reason: str,
    facts: Mapping[str, str] | None = None,
    conditions: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
) -> StartedSession:
    """The session for (environment, reason), created if there is none.

    The environment is this machine's, or the one of `facts` (`arch`, `num_cu`, `rocm_v`, `miopen_v`
    for MIOpen), where the library allows that. `conditions` say how results are measured; raises
    BadInput for one that the library does not offer. `options`: those of the session
    (`SessionOptions`), also for one that is there.
    """
    environment = session_environment(library, facts, conditions)
    with writing(open_database()) as connection:
        session_id, new = sessions.create(connection, environment, reason)
        if options:
            sessions.set_options(connection, session_id, options)
    return StartedSession(session_id, reason, environment, new)


def session_environment(
    library: str,
    facts: Mapping[str, str] | None = None,
    conditions: Mapping[str, str] | None = None,
) -> Environment:
    """The environment that `init_session` with these arguments is in; raises what it raises.
    Nothing is stored."""
    logs.configure(get_settings().log_level, get_settings().log_format)  # a target may be a warning
    found = get_library(library)
    kept = chosen(found.conditions, conditions or {}, library)
    here = environment_of(found, facts or {})
    return replace(here, conditions=kept)


def update_solvers(library: str) -> int:
    """Store the solvers that the library has now; returns how many."""
    with writing(open_database()) as connection:
        return solvers.update_solvers(connection, get_library(library))


def known_libraries() -> list[str]:
    """The libraries that are installed here."""
    return registry.names()


def list_job_options(library: str) -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each job option of the library."""
    return describe(get_library(library).options)


def list_conditions(library: str) -> list[Condition]:
    """Return the conditions of measurement that sessions of the library may choose."""
    return list(get_library(library).conditions)


def list_solvers(library: str) -> list[StoredSolver]:
    """The stored solvers of the library; raises BadInput before `update_solvers`."""
    with reading(open_database()) as connection:
        return solvers.list_solvers(connection, get_library(library).name)


def update_applicability(
    session_id: int, tag: str | None = None, *, library: str | None = None
) -> Applicability:
    """Determine which solvers can run which layers (those with `tag`, or all) in the session.

    Raises BadInput if the session is not of `library`, should one be named.
    """
    tuned = get_library(session_library(session_id, library))
    return solvers.update_applicability(open_database(), tuned, session_id, tag)


def prepare_tuning(
    path: Path,
    tag: str | None,
    wanted: Tuning = _TVM,
    *,
    strict: bool = False,
    shapes: Path | None = None,
    network: Network | None = None,
) -> PreparedTuning:
    """A session with the jobs of all layers of a file; called again, the same one, with what is
    missing.

    Without a tag it is that of the file with a kernel, which another version of it does not have.

    Everything is checked first: raises what `read_layers`, `init_session` and `load_jobs` raise for
    bad values, and then nothing is stored.
    """
    if tag is not None:
        check_tag(tag)
    library = get_library(wanted.library)
    check(library.options, wanted.options, library.name)
    parsed = read_layers(path, strict=strict, shapes=shapes)
    tag = parsed.tag if tag is None else tag
    reason = wanted.reason or f"tune {tag}"
    _check_solvers(
        library,
        parsed.configs,
        session_environment(library.name, conditions=wanted.conditions),
    )
    session = init_session(library.name, reason, conditions=wanted.conditions)
    if network is not None:
        store_network(network)
    imported = store_parsed(parsed, tag, Storing(network=network))
    solvers = update_solvers(library.name)
    applicability = update_applicability(session.id, tag)
    loaded = load_jobs(
        session.id, tag=tag, reason=reason, solvers=wanted.solvers, options=wanted.options
    )
    return PreparedTuning(session, tag, imported, solvers, applicability, loaded)


def _check_solvers(library: Library, configs: Sequence[Config], environment: Environment) -> None:
    """Raise BadInput that names the layers if the library has a solver for none; most libraries are
    asked of one layer."""
    known = [config for config in configs if config.kind in library.kinds]
    first, number = 0, 1
    while first < len(known):
        if any(
            names is None or names
            for _, names in library.applicable(known[first : first + number], environment)
        ):
            return
        first, number = first + number, 2 * number
    raise nothing_to_tune(
        library.name,
        [(one.label, f"no solver for {unsupported_feature(library, one)}") for one in configs],
    )
