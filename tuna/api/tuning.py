"""A list of layers, tuned in one call: session, import, solvers, applicability and jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuna.api.configs import (
    ImportedConfigs,
    Network,
    Storing,
    add_network,
    check_tag,
    read_layers,
    store_parsed,
)
from tuna.api.jobs import LoadedJobs, Options, load_jobs, nothing_to_tune
from tuna.api.preparation import (
    StartedSession,
    init_session,
    session_environment,
    update_applicability,
    update_solvers,
)
from tuna.configs import Config
from tuna.db.solvers import Applicability
from tuna.libraries.base import Environment, Library
from tuna.libraries.options import check
from tuna.libraries.registry import get_library


@dataclass(frozen=True)
class Tuning:
    """A session that is wanted, and its jobs."""

    library: str = "tvm"
    reason: str = ""  #: default: made from the tag
    options: Options = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    solvers: Sequence[str] = ()  #: default: every applicable one


_TVM = Tuning()


@dataclass(frozen=True)
class PreparedTuning:
    """A session that can be run, and what was done for it."""

    session: StartedSession
    imported: ImportedConfigs
    solvers: int
    applicability: Applicability
    loaded: LoadedJobs


def prepare_tuning(
    path: Path,
    tag: str,
    wanted: Tuning = _TVM,
    *,
    strict: bool = False,
    network: Network | None = None,
) -> PreparedTuning:
    """A session with the jobs of all layers of a file; called again, the same one, with what is
    missing.

    Everything is checked first: raises what `read_layers`, `init_session` and `load_jobs` raise for
    bad values, and then nothing is stored.
    """
    check_tag(tag)
    library = get_library(wanted.library)
    check(library.options, wanted.options, library.name)
    parsed = read_layers(path, strict=strict)
    reason = wanted.reason or f"tune {tag}"
    _check_solvers(
        library,
        parsed.configs,
        session_environment(library.name, conditions=wanted.conditions),
    )
    session = init_session(library.name, reason, conditions=wanted.conditions)
    if network is not None:
        add_network("model", network.model, network.md_version)
        add_network("framework", network.framework, network.fw_version)
    imported = store_parsed(parsed, tag, Storing(network=network))
    solvers = update_solvers(library.name)
    applicability = update_applicability(session.id, tag)
    loaded = load_jobs(
        session.id, tag=tag, reason=reason, solvers=wanted.solvers, options=wanted.options
    )
    return PreparedTuning(session, imported, solvers, applicability, loaded)


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
        library.name, [(one.label, f"no solver for {library.unsupported(one)}") for one in configs]
    )
