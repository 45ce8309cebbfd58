"""Layers, imported from programs that run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tuna.api.configs import (
    ImportedConfigs,
    Network,
    Storing,
    check_tag,
    store_network,
    store_parsed,
)
from tuna.api.rows import open_database
from tuna.configs import Config, LineReader, ParsedFile
from tuna.errors import BadInput
from tuna_capture import passthrough

#: The framework that captured models have in the database.
_FRAMEWORK, _VERSION = "tuna capture", "1"
#: Beginnings of MIOpen's commands on stderr; ROCm 7 and later name no back-end.
_MIOPEN = (b"MIOpen(HIP): Command [", b"MIOpen(OpenCL): Command [", b"MIOpen: Command [")


@dataclass(frozen=True)
class CapturedProgram:
    """The exit status of a program, and the layers that it asked for."""

    status: int  #: exit status; -N: signal N ended the program
    layers: tuple[tuple[Config, int], ...]  #: layers, calls; most FLOPs in all first
    imported: ImportedConfigs | None  #: None if no layer was logged: nothing is stored
    parsed: ParsedFile  #: layers and counts of the logged lines
    stopped: str = ""  #: reason why later lines were not read; empty if all were

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
            "No command was given.", hint="such as: `tuna capture -t TAG -- python prog.py`"
        )
    if model is not None and not 0 < len(model.strip()) <= 128:
        raise BadInput("A model's name has 1 to 128 characters.", hint="give it with --model")
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
        self.stopped = ""  #: reason why later lines were not read; empty if all were

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
