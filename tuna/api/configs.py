"""Layers, imported from files and from programs that run, and the networks that have them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from tuna.configs import (
    Config,
    LineCounts,
    LineReader,
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
from tuna.messages import counted
from tuna.sandbox import passthrough

#: The framework that captured models have in the database.
_FRAMEWORK, _VERSION = "tuna capture", "1"
#: What MIOpen's commands begin with on stderr; from ROCm 7 on there is no back-end in the prefix.
_MIOPEN = (b"MIOpen(HIP): Command [", b"MIOpen(OpenCL): Command [", b"MIOpen: Command [")


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

    recurrent: bool = False  #: marked as tuned again whenever the library changes
    tag_only: bool = False  #: unknown ones are left out
    network: Network | None = None  #: that has them


_PLAIN = Storing()


@dataclass(frozen=True)
class ImportedConfigs:
    """Counts of an import: read and stored."""

    counts: LineCounts
    rejections: tuple[Rejection, ...]  #: the rejected and the unsupported lines
    configs: int  #: distinct configs that were read
    added: int  #: those that are new
    tagged: int  #: those that are newly tagged
    missing: int  #: with `tag_only`: unknown ones, which were not tagged
    #: What lines of a log ask for beside their layers, such as a bias, with the number of lines.
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Networks:
    """The stored models, each with the number of its layers, and frameworks."""

    models: tuple[tuple[Named, int], ...]
    frameworks: tuple[Named, ...]


@dataclass(frozen=True)
class CapturedProgram:
    """The exit status of a program, and the layers that it asked for."""

    status: int  #: its exit status; -N: signal N ended it
    layers: tuple[tuple[Config, int], ...]  #: with the number of times, most FLOPs in all first
    imported: ImportedConfigs | None  #: None: there was no layer, and nothing was stored
    parsed: ParsedFile  #: the account of the lines that were logged
    stopped: str = ""  #: why later lines were not read; empty: all were

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would show."""
        return 128 - self.status if self.status < 0 else self.status


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
    """Raise BadInput for what is no tag."""
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


def capture(
    command: Sequence[str],
    tag: str,
    *,
    model: str | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> CapturedProgram:
    """Run `command` with logging switched on in MIOpen, hipBLASLt, oneDNN and TunableOp, and import
    its layers under `tag`.

    stdin, stdout and stderr are those of this process; lines of the logs are taken out. The number
    of times that a layer was asked for is its weight in the model `model` (default: the tag),
    version `captured`. Processes that the program starts are captured too; `waiting` is called if
    they keep its output open for long after its end. Raises BadInput for a program that cannot be
    started; whatever it does, what it logged until its end is imported.
    """
    check_tag(tag)
    if not command:
        raise BadInput(
            "There is no command to run.", hint="such as: `tuna capture -t TAG -- python prog.py`"
        )
    if model is not None and not 0 < len(model.strip()) <= 128:
        raise BadInput("A model has 1 to 128 characters.", hint="give it with --model")
    open_database()  # before the program, which may take long
    log = _Log()
    with tempfile.TemporaryDirectory(prefix="tuna-capture-") as name:
        folder = Path(name)
        environment = logging_environment(os.environ, folder)
        markers = passthrough.Markers(stdout=(b"onednn_verbose,", b"dnnl_verbose,"), stderr=_MIOPEN)
        fifo = folder / "hipblaslt.log"
        take = partial(log.add, to=log.calls)
        status = passthrough.run(command, environment, markers, take, fifo=fifo, waiting=waiting)
        for path in sorted(folder.glob("untuned*.csv")):
            with open(path, "rb") as rows:
                while row := rows.readline(passthrough.LINE_BYTES):
                    log.add(row, log.rows)
    parsed = log.finish()
    imported = None
    if parsed.configs:
        network = Network(model or tag, "captured", _FRAMEWORK, _VERSION)
        store_network(network)
        imported = store_parsed(parsed, tag, Storing(network=network))
    layers = sorted(
        zip(parsed.configs, parsed.weights, strict=True), key=lambda pair: -pair[0].flops * pair[1]
    )
    return CapturedProgram(status, tuple(layers), imported, parsed, log.stopped)


def logging_environment(own: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables of `own` and those that make libraries log: oneDNN to stdout, MIOpen to stderr,
    others to `folder`."""
    environment = dict(own)
    environment.pop("HIPBLASLT_LOG_LEVEL", None)  # it would add other lines
    return environment | {
        "ONEDNN_VERBOSE": "1",
        "DNNL_VERBOSE": "1",
        "MIOPEN_ENABLE_LOGGING_CMD": "1",
        "HIPBLASLT_LOG_MASK": "32",
        "HIPBLASLT_LOG_FILE": str(folder / "hipblaslt.log"),
        # Only records; without a file of results to read, products run as they do without
        # TunableOp.
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "PYTORCH_TUNABLEOP_TUNING": "0",
        "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "1",
        "PYTORCH_TUNABLEOP_UNTUNED_FILENAME": str(folder / "untuned.csv"),
        "PYTORCH_TUNABLEOP_FILENAME": str(folder / "results.csv"),
    }


class _Log:
    """Lines of logs, as bytes: of calls, and rows of TunableOp, which writes each product once for
    each process."""

    def __init__(self) -> None:
        self.calls, self.rows = LineReader("log"), LineReader("log")
        self.stopped = ""  #: why later lines were not read

    def add(self, line: bytes, to: LineReader) -> None:
        """Count a line."""
        if not self.stopped:
            try:
                to.add(line.decode(errors="surrogateescape"))
            except BadInput as error:
                self.stopped = str(error)

    def finish(self) -> ParsedFile:
        """The account; rows count for the products only that no call was logged for."""
        return self.calls.finish().with_others(self.rows.finish())
