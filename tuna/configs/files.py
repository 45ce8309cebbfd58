"""Files of layers, one or more a line: every line is counted, and a bad one does not affect the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from reprlib import repr as shown

from tuna.configs.config import Config
from tuna.configs.conv import COMMANDS, ConvConfig
from tuna.configs.driver import UnsupportedLine
from tuna.configs.lines import read_line
from tuna.configs.values import DataType, check_sizes
from tuna.errors import BadInput

#: A rejected line, and the reason, are shown up to this many characters.
TEXT_CHARS = 200
#: The commands that may override the precision of convolutions.
PRECISIONS: dict[str, DataType] = {
    COMMANDS[data_type]: data_type for data_type in (DataType.FP32, DataType.FP16, DataType.BF16)
}
#: A file with a longer line, or with more lines that are rejected, is no file of layers.
LINE_LIMIT, REJECTION_LIMIT = 1 << 20, 100_000


@dataclass(frozen=True)
class Rejection:
    """A line that gave no config, and why."""

    source: str
    line: int  #: counted from 1
    reason: str
    text: str  #: the line, cut to TEXT_CHARS
    unsupported: bool = False  #: a command or key for a layer of a kind that Tuna does not tune, not a mistake

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class LineCounts:
    """Counts of lines by outcome: total = accepted + ignored + rejected + unsupported."""

    total: int = 0
    accepted: int = 0
    ignored: int = 0  #: blank lines and comments
    rejected: int = 0  #: lines with a mistake
    unsupported: int = 0  #: commands and keys for kinds of layers that Tuna does not tune
    expanded: int = 0  #: accepted lines whose -F names several directions
    duplicates: int = 0  #: configs (not lines) that an earlier line had named already


@dataclass(frozen=True)
class ParsedFile:
    """The distinct configs of a file in the order in which they first appear, and the counts of its lines."""

    configs: tuple[Config, ...]
    counts: LineCounts
    rejections: tuple[Rejection, ...]  #: the rejected and the unsupported lines
    weights: tuple[int, ...]  #: how many lines named each of the configs, at least 1

    def check_strict(self) -> None:
        """Raise BadInput if a line was rejected or is unsupported."""
        if self.rejections:
            more = f" (and {len(self.rejections) - 1} more)" if len(self.rejections) > 1 else ""
            raise BadInput(f"{self.rejections[0]}{more}")


def parse_file(path: str | Path, *, batches: Sequence[int] = (), command: str | None = None) -> ParsedFile:
    """Read the layers in the text file `path`; raises BadInput if it is empty, no UTF-8 text or endless.

    `batches` and `command` are those of `parse_lines`.
    """
    try:
        with open(path, encoding="utf-8-sig") as stream:
            lines = iter(partial(stream.readline, LINE_LIMIT), "")
            parsed = parse_lines(lines, str(path), batches=batches, command=command)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not a text file: it is not valid UTF-8") from error
    if parsed.counts.total == 0:
        raise BadInput(f"{path} is empty")
    return parsed


def parse_lines(
    lines: Iterable[str], source: str, *, batches: Sequence[int] = (), command: str | None = None
) -> ParsedFile:
    """Read layers, one a line: MIOpenDriver commands, JSON objects, lines of a find db, of which only the key counts.

    `source` names the lines in messages. With `batches` each layer comes at these batch sizes instead of the given one; one
    without a `batchsize`, such as a matrix product, then is rejected. `command` (one of PRECISIONS) overrides the precision of the
    convolutions. Raises BadInput for wrong options and for a NUL character.
    """
    change = _Change.checked(batches, command)
    configs: dict[str, Config] = {}
    weights: dict[str, int] = {}
    rejections: list[Rejection] = []
    total = accepted = ignored = unsupported = expanded = 0
    for total, line in enumerate(lines, 1):
        if "\0" in line:
            raise BadInput(f"{source} is not a text file: line {total} holds a NUL character")
        if len(line) >= LINE_LIMIT:
            raise BadInput(f"{source} is no file of layers: line {total} does not end")
        text = line.strip()
        if not text or text[0] == "#":
            ignored += 1
            continue
        try:
            named = read_line(text)
            found = change.apply(named)
        except BadInput as error:
            skipped = isinstance(error, UnsupportedLine)
            unsupported += skipped
            rejections.append(Rejection(source, total, _cut(str(error)), _cut(text), skipped))
            if len(rejections) > REJECTION_LIMIT:
                raise BadInput(f"{source} is no file of layers: more than {REJECTION_LIMIT} lines are none") from None
            continue
        accepted += 1
        expanded += len(named) > 1
        for config in found:
            canonical = config.canonical()
            configs.setdefault(canonical, config)
            weights[canonical] = weights.get(canonical, 0) + 1
    duplicates = sum(weights.values()) - len(configs)
    counts = LineCounts(total, accepted, ignored, len(rejections) - unsupported, unsupported, expanded, duplicates)
    return ParsedFile(tuple(configs.values()), counts, tuple(rejections), tuple(weights.values()))


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
            raise BadInput(f"only {', '.join(PRECISIONS)} can override the precision, got {shown(command)}")
        return cls(tuple(dict.fromkeys(batches)), PRECISIONS[command] if command is not None else None)

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


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"
