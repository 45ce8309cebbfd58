"""Files of MIOpenDriver commands: every line is accounted for, and a bad one never loses the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tuna.configs.config import Config
from tuna.configs.driver import UnsupportedCommand, parse_line
from tuna.errors import BadInput

#: A rejected line, and the reason, are shown up to this many characters.
TEXT_CHARS = 200


@dataclass(frozen=True)
class Rejection:
    """A line that gave no config, and why."""

    source: str
    line: int  #: counted from 1
    reason: str
    text: str  #: the line, cut to TEXT_CHARS
    unsupported: bool = False  #: a command for a kind of layer that Tuna does not tune, not a mistake

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class LineCounts:
    """What became of the lines: total = accepted + ignored + rejected + unsupported."""

    total: int = 0
    accepted: int = 0
    ignored: int = 0  #: blank lines and comments
    rejected: int = 0  #: lines with a mistake
    unsupported: int = 0  #: commands for kinds of layers that Tuna does not tune
    expanded: int = 0  #: accepted lines whose -F names several directions
    duplicates: int = 0  #: configs (not lines) that an earlier line had named already


@dataclass(frozen=True)
class ParsedFile:
    """The distinct configs of a file in the order in which they first appear, and the account of its lines."""

    configs: tuple[Config, ...]
    counts: LineCounts
    rejections: tuple[Rejection, ...]  #: the rejected and the unsupported lines

    def check_strict(self) -> None:
        """Raise BadInput if a line was rejected or is unsupported."""
        if self.rejections:
            more = f" (and {len(self.rejections) - 1} more)" if len(self.rejections) > 1 else ""
            raise BadInput(f"{self.rejections[0]}{more}")


def parse_file(path: str | Path) -> ParsedFile:
    """Read the MIOpenDriver commands in the text file `path`; raises BadInput if it is empty or no UTF-8 text."""
    try:
        with open(path, encoding="utf-8-sig") as lines:
            parsed = parse_lines(lines, str(path))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not a text file: it is not valid UTF-8") from error
    if parsed.counts.total == 0:
        raise BadInput(f"{path} is empty")
    return parsed


def parse_lines(lines: Iterable[str], source: str) -> ParsedFile:
    """Read MIOpenDriver commands, one a line; `source` names them in messages. A NUL character raises BadInput."""
    configs: dict[str, Config] = {}
    rejections: list[Rejection] = []
    total = accepted = ignored = unsupported = expanded = duplicates = 0
    for total, line in enumerate(lines, 1):
        if "\0" in line:
            raise BadInput(f"{source} is not a text file: line {total} holds a NUL character")
        text = line.strip()
        if not text or text[0] == "#":
            ignored += 1
            continue
        try:
            found = parse_line(text)
        except BadInput as error:
            skipped = isinstance(error, UnsupportedCommand)
            unsupported += skipped
            rejections.append(Rejection(source, total, _cut(str(error)), _cut(text), skipped))
            continue
        accepted += 1
        expanded += len(found) > 1
        for config in found:
            if configs.setdefault(config.canonical(), config) is not config:
                duplicates += 1
    counts = LineCounts(total, accepted, ignored, len(rejections) - unsupported, unsupported, expanded, duplicates)
    return ParsedFile(tuple(configs.values()), counts, tuple(rejections))


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"
