"""Files of layers, one or more a line: every line is counted, and a bad one does not affect the
others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from reprlib import repr as shown

from tuna.configs.config import Config
from tuna.configs.conv import COMMANDS, ConvConfig
from tuna.configs.tally import LINE_LIMIT, ParsedFile, Tally
from tuna.configs.values import DataType, check_sizes
from tuna.errors import BadInput

#: The commands that may override the precision of convolutions.
PRECISIONS: dict[str, DataType] = {
    COMMANDS[data_type]: data_type for data_type in (DataType.FP32, DataType.FP16, DataType.BF16)
}


def parse_file(
    path: str | Path, *, batches: Sequence[int] = (), command: str | None = None
) -> ParsedFile:
    """Read the layers in the text file `path` (`-`: standard input); raises BadInput if it is
    empty, no UTF-8 text or endless.

    `batches` and `command` are those of `parse_lines`.
    """
    try:
        standard = str(path) == "-"
        name = "standard input" if standard else str(path)
        place = sys.stdin.fileno() if standard else path
        with open(
            place, encoding="utf-8-sig", errors="surrogateescape", closefd=not standard
        ) as stream:
            lines = iter(partial(stream.readline, LINE_LIMIT), "")
            parsed = parse_lines(lines, name, batches=batches, command=command)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    if parsed.counts.total == 0:
        raise BadInput(f"{name} is empty")
    return parsed


def parse_lines(
    lines: Iterable[str], source: str, *, batches: Sequence[int] = (), command: str | None = None
) -> ParsedFile:
    """Read layers, one a line: MIOpenDriver commands, JSON objects, lines of a find db, of which
    only the key counts, and logs.

    `source` names the lines in messages. With `batches` each layer comes at these batch sizes
    instead of the given one; one without a `batchsize`, such as a matrix product, then is rejected.
    `command` (one of PRECISIONS) overrides the precision of the convolutions. Raises BadInput for
    wrong options and, before the first line of a log, for a NUL character.
    """
    tally = Tally(source, _Change.checked(batches, command).apply)
    for line in lines:
        tally.add(line)
    return tally.finish()


@dataclass(frozen=True)
class _Change:
    """Changes that an import makes to the layers that it reads."""

    batches: tuple[int, ...]  #: batch sizes instead of a layer's own; empty to keep that
    data_type: DataType | None  #: of convolutions; None to keep theirs

    @classmethod
    def checked(cls, batches: Sequence[int], command: str | None) -> _Change:
        """The change that these options ask for; raises BadInput."""
        if batches:
            check_sizes(("a batch size",) * len(batches), tuple(batches), 1)
        if command is not None and command not in PRECISIONS:
            raise BadInput(
                f"only {', '.join(PRECISIONS)} can override the precision, got {shown(command)}"
            )
        return cls(
            tuple(dict.fromkeys(batches)), PRECISIONS[command] if command is not None else None
        )

    def apply(self, configs: Sequence[Config]) -> Sequence[Config]:
        """The configs after the change; raises BadInput if one cannot be changed so."""
        if self.data_type is not None:
            configs = [_with_type(config, self.data_type) for config in configs]
        if not self.batches:
            return configs
        return [_at_batch(config, batch) for config in configs for batch in self.batches]


def _with_type(config: Config, data_type: DataType) -> Config:
    return replace(config, data_type=data_type) if isinstance(config, ConvConfig) else config


def _at_batch(config: Config, batch: int) -> Config:
    if "batchsize" not in config.field_names():
        raise BadInput(f"a {config.kind} has no batch size that another could replace")
    return replace(config, **{"batchsize": batch})
