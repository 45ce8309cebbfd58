"""Runs a program and imports the layers that it asks its libraries for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuna.api.configs import ImportedConfigs, Network, Storing, check_tag, store_parsed
from tuna.configs import Config, LineReader, ParsedFile
from tuna.db import networks
from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna.errors import BadInput
from tuna.sandbox import passthrough

#: The framework that captured models have in the database.
_FRAMEWORK, _VERSION = "tuna capture", "1"
#: What MIOpen's commands begin with on stderr; from ROCm 7 on there is no back-end in the prefix.
_MIOPEN = (b"MIOpen(HIP): Command [", b"MIOpen(OpenCL): Command [", b"MIOpen: Command [")


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
    log = _Log("log")
    with tempfile.TemporaryDirectory(prefix="tuna-capture-") as name:
        folder = Path(name)
        environment = logging_environment(os.environ, folder)
        markers = passthrough.Markers(stdout=(b"onednn_verbose,", b"dnnl_verbose,"), stderr=_MIOPEN)
        fifo = folder / "hipblaslt.log"
        status = passthrough.run(
            command, environment, markers, log.take, fifo=fifo, waiting=waiting
        )
        for path in sorted(folder.glob("untuned*.csv")):
            with open(path, "rb") as rows:
                while row := rows.readline(passthrough.LINE_BYTES):
                    log.take_row(row)
    parsed = log.finish()
    imported = _store(parsed, tag, model or tag) if parsed.configs else None
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
    """Lines of logs, as bytes."""

    def __init__(self, source: str) -> None:
        self._calls, self._rows = LineReader(source), LineReader(source)
        self.stopped = ""  #: why later lines were not read

    def take(self, line: bytes) -> None:
        """Count a line that was logged for a call."""
        self._add(self._calls, line)

    def take_row(self, line: bytes) -> None:
        """Count a row of TunableOp's, which writes each product once for each process."""
        self._add(self._rows, line)

    def _add(self, reader: LineReader, line: bytes) -> None:
        if not self.stopped:
            try:
                reader.add(line.decode(errors="surrogateescape"))
            except BadInput as error:
                self.stopped = str(error)

    def finish(self) -> ParsedFile:
        """The account; rows count for the products only that no call was logged for."""
        return self._calls.finish().with_others(self._rows.finish())


def _store(parsed: ParsedFile, tag: str, model: str) -> ImportedConfigs:
    network = Network(model, "captured", _FRAMEWORK, _VERSION)
    with writing(open_database()) as connection:
        networks.add_model(connection, networks.Named(network.model, network.md_version))
        networks.add_framework(connection, networks.Named(network.framework, network.fw_version))
    return store_parsed(parsed, tag, Storing(network=network))
