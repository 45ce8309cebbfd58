"""What goes in and comes out: layers, networks, and databases of kernel libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuna.cli.console import print_table
from tuna.cli.database import open_database
from tuna.errors import BadInput

if TYPE_CHECKING:
    from tuna.configs import Rejection
    from tuna.exports import ExportReport


@dataclass(frozen=True)
class Network:
    """The model and framework that have the layers of an import, and on how many GPUs they ran."""

    model: str
    md_version: str
    framework: str
    fw_version: str
    gpu_count: int = 1


def import_configs(
    path: Path | None,
    tag: str,
    *,
    driver: str | None = None,
    strict: bool = False,
    batches: Sequence[int] = (),
    command: str | None = None,
    recurrent: bool = False,
    tag_only: bool = False,
    network: Network | None = None,
) -> None:
    """Import a file of layers, or the one in `driver`, under a tag; prints the counts and every rejected line."""
    from tuna.configs import parse_file, parse_lines
    from tuna.db import configs, networks
    from tuna.db.engine import writing

    if not tag.strip() or len(tag) > 128:
        raise BadInput("A tag has 1 to 128 characters.", hint="give it with -t")
    wishes: dict[str, Any] = {"batches": tuple(batches), "command": command}
    parsed = parse_lines([driver or ""], "-d", **wishes) if path is None else parse_file(path, **wishes)
    _tell_rejections(parsed.rejections)
    if strict:
        parsed.check_strict()
    if not parsed.configs:
        raise BadInput(f"{path or '-d'} holds no layer that can be imported ({parsed.counts.total} lines).")
    with writing(open_database()) as connection:
        ids = network and networks.ids(
            connection,
            networks.Named(network.model, network.md_version),
            networks.Named(network.framework, network.fw_version),
        )
        stored = configs.store(connection, parsed.configs, tag, recurrent=recurrent, tag_only=tag_only)
        if network and ids:
            pairs = zip(stored.ids, parsed.weights, strict=True)
            weights = {config_id: weight for config_id, weight in pairs if config_id is not None}
            networks.set_weights(connection, *ids, network.gpu_count, weights)
    c = parsed.counts
    click.echo(
        f"{c.total} lines: {c.accepted} accepted ({c.expanded} of them name several directions, {c.duplicates} repeat "
        f"earlier layers), {c.ignored} ignored, {c.unsupported} unsupported, {c.rejected} rejected"
    )
    click.echo(f"{len(parsed.configs)} layers: {stored.added} added, {stored.tagged} newly tagged {tag!r}")
    if stored.missing:
        click.echo(f"{stored.missing} layers are not there and were not tagged", err=True)


def _tell_rejections(rejections: Sequence[Rejection]) -> None:
    """Print each mistake, and for each kind of unsupported line how many there are."""
    unsupported: dict[str, list[Rejection]] = {}
    for rejection in rejections:
        if rejection.unsupported:
            unsupported.setdefault(rejection.reason, []).append(rejection)
        else:
            click.echo(str(rejection), err=True)
    for alike in unsupported.values():
        more = f" (and {len(alike) - 1} more such lines)" if len(alike) > 1 else ""
        click.echo(f"{alike[0]}{more}", err=True)


def add_network(what: str, name: str, version: str) -> None:
    """Store a model or a framework; says so if it is there already."""
    from tuna.db import networks
    from tuna.db.engine import writing

    add = {"model": networks.add_model, "framework": networks.add_framework}[what]
    with writing(open_database()) as connection:
        new = add(connection, networks.Named(name, version))
    click.echo(f"{what} {name} {version}: {'added' if new else 'already there'}")


def print_networks() -> None:
    """List models with the number of their layers, and frameworks."""
    from tuna.db import networks
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        models, frameworks = networks.models(connection), networks.frameworks(connection)
    rows: list[tuple[object, ...]] = [("model", model.name, model.version, count) for model, count in models]
    rows += [("framework", item.name, item.version, "") for item in frameworks]
    print_table("", ("", "name", "version", "layers"), rows, right=(3,))


def export(session_id: int, form: str, directory: Path, **options: Any) -> Path:
    """Write one database of the session; prints what is in it and, last, its path."""
    from tuna.db.engine import reading
    from tuna.exports import export as write

    with reading(open_database()) as connection:
        report = write(connection, session_id, form, directory, **_wanted(options))
    return _tell(report)


def export_golden(
    version: int, form: str, directory: Path, *, arch: str, num_cu: int | None, library: str = "miopen", **options: Any
) -> Path:
    """Write one database of a golden version for a device; prints what is in it and, last, its path."""
    from tuna.db.engine import reading
    from tuna.exports import export_golden as write

    with reading(open_database()) as connection:
        wanted = _wanted(options)
        report = write(connection, version, form, directory, library=library, arch=arch, num_cu=num_cu, **wanted)
    return _tell(report)


def _wanted(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: a form refuses those that it does not have."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _tell(report: ExportReport) -> Path:
    for reason, count in sorted(report.skipped.items()):
        click.echo(f"not exported: {count} ({reason})", err=True)
    click.echo(f"{report.entries} entries of {report.configs} layers")
    click.echo(str(report.path))
    return Path(report.path)


def import_db(
    path: Path, session_id: int | None, reason: str, facts: Mapping[str, str], library: str = "miopen"
) -> int:
    """Import a find db or perf db into a session, a new one unless given; prints the counts, last the session's id."""
    from tuna.db import sessions
    from tuna.db.engine import writing
    from tuna.exports.importer import import_db as read
    from tuna.exports.registry import exporter_of
    from tuna.libraries.miopen.formats import naming
    from tuna.libraries.registry import get_library

    engine = open_database()
    if session_id is None and (exporter := exporter_of(path)).importable:
        raise BadInput(f"A {exporter.title} goes into a session that is there.", hint="give it with --session-id")
    if session_id is None:
        arch, num_cu = naming.parse_name(path.name)
        known = {"arch": arch} | ({} if num_cu is None else {"num_cu": str(num_cu)}) | dict(facts)
        for name, flag in (("rocm_v", "--rocm_v"), ("miopen_v", "--miopen_v"), ("num_cu", "-n")):
            if name not in known:
                raise BadInput(f"{flag} is missing: a new session needs to know what the database was made with.")
        environment = get_library(library).environment_by_hand(known)
        with writing(engine) as connection:
            session_id, _ = sessions.create(connection, environment, reason)
    elif facts:
        raise BadInput("With --session_id the environment is the session's; leave the rest out.")
    report = read(engine, path, session_id)
    for why, count in sorted(report.skipped.items()):
        click.echo(f"not imported: {count} ({why})", err=True)
    click.echo(f"{report.rows} entries of {report.configs} layers ({report.new_configs} of them new)")
    click.echo(f"session {session_id}")
    return session_id


def merge_db(master: Path, target: Path, output: Path, *, keep_keys: bool) -> None:
    """Merge `target` into copies of `master`, a database or a folder of them, in `output`; prints each path."""
    from tuna.exports.merge import merge

    masters = sorted(path for path in master.iterdir() if path.is_file()) if master.is_dir() else [master]
    chosen = [path for path in masters if len(masters) == 1 or path.name == target.name]
    if not chosen:
        raise BadInput(f"{master} holds no {target.name} to merge into.")
    for path in chosen:
        place = output / path.name
        if place.exists() and place.samefile(path):
            raise BadInput(f"The result would replace {path}.", hint="name another folder with --output")
        report = merge(path, target, place, keep_keys=keep_keys)
        click.echo(
            f"{report.kept} kept, {report.replaced} replaced, {report.added} added, "
            f"{report.dropped} dropped with their problems, {report.unusable} without a time"
        )
        click.echo(str(place))
