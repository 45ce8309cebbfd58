"""Layers, imported from files, and the networks that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tuna.common.messages import counted
from tuna.configs import (
    Config,
    LineCounts,
    ParsedFile,
    Rejection,
    parse_file,
    parse_lines,
)
from tuna.configs.sources import read_source, source_of
from tuna.configs.values import MAX_SIZE
from tuna.db import configs, networks
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.networks import Named
from tuna.errors import BadInput


@dataclass(frozen=True)
class Network:
    """The model and framework that have the layers of an import, and on how many GPUs they ran."""

    model: str
    md_version: str
    framework: str
    fw_version: str
    gpu_count: int = 1


@dataclass(frozen=True)
class Storing:
    """Marks of layers that are stored."""

    recurrent: bool = False  #: true to have the layers tuned again whenever the library changes
    tag_only: bool = False  #: true to leave out configs that are not stored yet
    network: Network | None = None  #: network that has the layers; None: none


_PLAIN = Storing()


@dataclass(frozen=True)
class ImportedConfigs:
    """Counts of an import: read and stored."""

    counts: LineCounts
    rejections: tuple[Rejection, ...]  #: rejected and unsupported lines
    configs: int  #: number of distinct configs that were read
    added: int  #: number of configs that are new
    tagged: int  #: number of configs that did not carry the tag before
    missing: int  #: number of unknown configs that `tag_only` left out
    #: number of lines of a log by what they ask for beside their layers, such as a bias
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Networks:
    """The stored models, each with the number of its layers, and frameworks."""

    models: tuple[tuple[Named, int], ...]
    frameworks: tuple[Named, ...]


class NothingImported(BadInput):
    """A file without a single layer that can be imported; `rejections` says why."""

    def __init__(self, message: str, rejections: Sequence[Rejection]) -> None:
        super().__init__(message)
        self.rejections = tuple(rejections)


def import_configs(
    path: Path | None,
    tag: str,
    *,
    driver: str | None = None,
    strict: bool = False,
    batches: Sequence[int] = (),
    command: str | None = None,
    shapes: Path | None = None,
    storing: Storing = _PLAIN,
) -> ImportedConfigs:
    """Import the layers of a text file or a log, or the one in the driver command `driver`, under a
    tag; or the kernel of a Python file at the shapes of a JSON file.

    `batches`: each layer once for each of these batch sizes; `command`: the precision of all lines
    (conv, convfp16, convbfp16). Raises NothingImported if no layer is left, or with `strict` if
    any line is rejected; BadInput for a file that is neither a list of layers nor a kernel.
    """
    check_tag(tag)
    if path is None:
        parsed = parse_lines([driver or ""], "-d", batches=tuple(batches), command=command)
        _check(parsed, "-d", strict=strict)
    else:
        parsed = read_layers(path, strict=strict, batches=batches, command=command, shapes=shapes)
    return store_parsed(parsed, tag, storing)


def read_layers(
    path: Path,
    *,
    strict: bool = False,
    batches: Sequence[int] = (),
    command: str | None = None,
    shapes: Path | None = None,
) -> ParsedFile:
    """The layers of a file, with the arguments and the errors of `import_configs`; nothing is
    stored."""
    if source := source_of(path):
        return read_source(source, path, shapes)
    if shapes is not None:
        raise BadInput(f"{path} is a list of layers: leave --shapes out.")
    parsed = parse_file(path, batches=tuple(batches), command=command)
    _check(parsed, str(path), strict=strict)
    return parsed


def _check(parsed: ParsedFile, source: str, *, strict: bool) -> None:
    if strict:
        try:
            parsed.check_strict()
        except BadInput as error:
            raise NothingImported(str(error), parsed.rejections) from None
    if not parsed.configs:
        message = (
            f"{source} holds no layer that can be imported"
            f" ({counted(parsed.counts.total, 'line')})."
        )
        raise NothingImported(message, parsed.rejections)


def check_tag(tag: str) -> None:
    """Raise BadInput for an empty tag or one that is too long."""
    if not tag.strip() or len(tag) > 128:
        raise BadInput("A tag has 1 to 128 characters.", hint="give it with -t")


def store_parsed(parsed: ParsedFile, tag: str, storing: Storing = _PLAIN) -> ImportedConfigs:
    """Store the layers that were read; the network must be there."""
    network = storing.network
    with writing(open_database()) as connection:
        ids = network and networks.ids(
            connection,
            networks.Named(network.model, network.md_version),
            networks.Named(network.framework, network.fw_version),
        )
        stored = configs.store(
            connection,
            parsed.configs,
            tag,
            recurrent=storing.recurrent,
            tag_only=storing.tag_only,
            bodies=parsed.bodies,
        )
        if network and ids:
            pairs = zip(stored.ids, parsed.weights, strict=True)
            weights = {
                config_id: min(weight, MAX_SIZE)
                for config_id, weight in pairs
                if config_id is not None
            }
            networks.set_weights(connection, *ids, network.gpu_count, weights)
    return ImportedConfigs(
        counts=parsed.counts,
        rejections=parsed.rejections,
        configs=len(parsed.configs),
        added=stored.added,
        tagged=stored.tagged,
        missing=stored.missing,
        left_out=parsed.left_out,
    )


def list_configs(tag: str) -> list[Config]:
    """The layers that carry a tag; raises NotFound for an unknown tag."""
    with reading(open_database()) as connection:
        return list(configs.tagged(connection, tag))


def add_network(what: Literal["model", "framework"], name: str, version: str) -> bool:
    """Store a model or a framework; False if it is there already."""
    add = {"model": networks.add_model, "framework": networks.add_framework}[what]
    with writing(open_database()) as connection:
        return add(connection, networks.Named(name, version))


def store_network(network: Network) -> None:
    """Store the model and the framework of a network, as far as they are not there."""
    add_network("model", network.model, network.md_version)
    add_network("framework", network.framework, network.fw_version)


def list_networks() -> Networks:
    """All models and frameworks."""
    with reading(open_database()) as connection:
        return Networks(tuple(networks.models(connection)), tuple(networks.frameworks(connection)))
