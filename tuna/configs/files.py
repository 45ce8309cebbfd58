"""Files of layers: every line is counted, and a bad one does not affect the others."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import TypeAlias

from tuna.common.files import open_plain, text_encoding
from tuna.configs.config import Config
from tuna.configs.conv import COMMANDS, ConvConfig
from tuna.configs.kind import Workload
from tuna.configs.lines import LINE_FORMS, PROGRAM, LineForm, UnsupportedLine, read_line
from tuna.configs.values import DataType, check_sizes
from tuna.errors import BadInput

#: Commands that may override the precision of convolutions, with that precision
PRECISIONS: dict[str, DataType] = {
    COMMANDS[data_type]: data_type for data_type in (DataType.FP32, DataType.FP16, DataType.BF16)
}
_EXAMPLE = (
    "a list has a layer in each line, such as"
    " `MIOpenDriver conv -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1`"
)
#: Maximum of characters shown of a rejected line, and of its reason
TEXT_CHARS = 200
#: Maximum of characters in a line, and of rejected lines, above which a file is not read as layers
LINE_LIMIT, REJECTION_LIMIT = 1 << 20, 100_000
#: Maximum of overlong pieces of lines that are skipped in a log
_LONG_LIMIT = 16
#: Maximum of distinct lines whose outcome is cached
_CACHED_LINES = 100_000


@dataclass(frozen=True)
class Rejection:
    """A line that gave no config, and why; in a log, the first of the lines with that reason."""

    source: str
    line: int  #: number of the line, counted from 1
    reason: str
    text: str  #: text of the line, cut to TEXT_CHARS
    #: true for a command or key of a kind of layer that Tuna does not tune, which is not a mistake
    unsupported: bool = False
    lines: int = 1  #: number of lines of the log with this reason

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class LineCounts:
    """Counts of lines by outcome: total = accepted + ignored + rejected + unsupported."""

    total: int = 0
    accepted: int = 0
    ignored: int = 0  #: number of blank lines, comments, and lines of a log that name no layer
    rejected: int = 0  #: number of lines with a mistake
    unsupported: int = 0  #: number of commands and keys for kinds of layers that Tuna does not tune
    expanded: int = 0  #: number of accepted lines whose -F names several directions
    duplicates: int = 0  #: number of configs (not lines) that an earlier line had named already


@dataclass(frozen=True)
class ParsedFile:
    """The distinct configs of a file, in the order of their first lines, and the line counts."""

    configs: tuple[Config, ...]
    counts: LineCounts
    rejections: tuple[Rejection, ...]  #: rejected and unsupported lines
    weights: tuple[int, ...]  #: number of lines that named each of the configs, at least 1
    #: number of lines by operation of accepted log lines that is not part of a config
    left_out: Mapping[str, int] = field(default_factory=dict)
    bodies: Mapping[str, bytes] = field(default_factory=dict)  #: bodies of configs by their SHA-256
    tag: str = ""  #: tag that the file itself gives its configs; empty: none

    def with_others(self, others: ParsedFile) -> ParsedFile:
        """The account of both; what both name has the weight that it has here."""
        own_texts = {config.canonical() for config in self.configs}
        new = [
            pair
            for pair in zip(others.configs, others.weights, strict=True)
            if pair[0].canonical() not in own_texts
        ]
        weights = (*self.weights, *(weight for _, weight in new))
        counts = LineCounts(
            *(a + b for a, b in zip(astuple(self.counts), astuple(others.counts), strict=True))
        )
        repeated = sum(others.weights) - len(new) - others.counts.duplicates
        left_out = {
            what: self.left_out.get(what, 0) + others.left_out.get(what, 0)
            for what in {**self.left_out, **others.left_out}
        }
        return ParsedFile(
            configs=(*self.configs, *(config for config, _ in new)),
            counts=replace(counts, duplicates=counts.duplicates + repeated),
            rejections=(*self.rejections, *others.rejections),
            weights=weights,
            left_out=left_out,
            bodies={**self.bodies, **others.bodies},
        )

    def check_strict(self) -> None:
        """Raise BadInput if a line was rejected or is unsupported."""
        if self.rejections:
            others = self.counts.rejected + self.counts.unsupported - 1
            raise BadInput(f"{self.rejections[0]}{f' (and {others} more)' if others else ''}")


@dataclass
class _Accepted:
    """The configs that equal lines name, and the number of those lines."""

    texts: tuple[str, ...]  #: canonical texts of the configs
    several: bool  #: true if the line named several configs, before they were changed
    left_out: Sequence[str] = ()
    lines: int = 0


#: Index of a rejection in the list, or -1 for a line that names no layer
_Outcome: TypeAlias = "_Accepted | int"


class LineReader:
    """Account of lines that are added one by one; equal lines of a log are parsed once."""

    def __init__(
        self,
        source: str,
        change: Callable[[Sequence[Config]], Sequence[Config]] = lambda configs: configs,
    ) -> None:
        """`source` names the lines in messages; `change` maps configs, and may raise BadInput."""
        self._source, self._change = source, change
        self._logs = [form for form in LINE_FORMS.all().values() if form.asks_for is not None]
        self._configs: dict[str, Config] = {}
        self._bodies: dict[str, bytes] = {}
        self._accepted: dict[tuple[object, ...], _Accepted] = {}
        self._known: dict[str, _Outcome] = {}
        self._rejections: list[Rejection] = []
        self._rejected_lines: list[int] = []
        self._reasons: dict[tuple[str, bool], int] = {}
        self._total = self._ignored = self._long = 0
        self._is_log = False
        self._last: LineForm | None = None

    def add(self, line: str) -> None:
        """Read another line; raises BadInput for a file that is not a text with layers."""
        self._total += 1
        text = line.strip()
        if not text or text[0] == "#":
            self._check_text(line)
            self._ignored += 1
            return
        form = self._form_of(text)
        if form is None:
            self._check_text(line)
            key = text
        else:
            self._is_log = True
            assert form.asks_for is not None
            asked = form.asks_for(text)
            if asked is None:
                self._ignored += 1
                return
            key = asked
        outcome = self._known.get(key)
        if outcome is None:
            outcome = self._read(line, text, form)
            if len(self._known) < _CACHED_LINES and (
                form is not None or isinstance(outcome, _Accepted)
            ):
                self._known[key] = outcome
        if isinstance(outcome, _Accepted):
            outcome.lines += 1
        else:
            self._rejected_lines[outcome] += 1

    def _form_of(self, text: str) -> LineForm | None:
        """The form of log that the line has; most have that of the line before."""
        if PROGRAM in text or text[0] == "{":
            return None
        if self._last is None or not self._last.recognises(text):
            self._last = next((form for form in self._logs if form.recognises(text)), None)
        return self._last

    def _read(self, line: str, text: str, form: LineForm | None) -> _Outcome:
        try:
            if defect := _defect(line):
                raise BadInput(f"the line {defect}")
            named = self._named(text) if form is None else form.read(text)
            found = self._change(named)
        except BadInput as error:
            return self._reject(_cut(str(error)), text, isinstance(error, UnsupportedLine))
        for config in found:
            self._configs.setdefault(config.canonical(), config)
        texts = tuple(config.canonical() for config in found)
        several = len(named) > 1
        left_out = () if form is None else tuple(form.left_out(text))
        return self._accepted.setdefault(
            (texts, several, left_out), _Accepted(texts, several, left_out)
        )

    def _named(self, text: str) -> Sequence[Config]:
        if not text.startswith("{"):
            return read_line(text)
        found = Workload.parse(text)
        self._bodies |= found.bodies
        return [found.config]

    def _reject(self, reason: str, text: str, unsupported: bool) -> int:
        place = self._reasons.get((reason, unsupported)) if self._is_log else None
        if place is None:
            place = len(self._rejections)
            if place >= REJECTION_LIMIT:
                raise BadInput(
                    f"{self._source} is not a file of layers: more than {REJECTION_LIMIT} lines"
                    " name none"
                )
            self._rejections.append(
                Rejection(self._source, self._total, reason, _cut(text), unsupported)
            )
            self._rejected_lines.append(0)
            if self._is_log:
                self._reasons[reason, unsupported] = place
        return place

    def _check_text(self, line: str) -> None:
        """Raise BadInput for a line that no text holds.

        A log may have some: programs crash, and disks fill up.
        """
        if self._is_log:
            self._long += len(line) >= LINE_LIMIT
            if self._long <= _LONG_LIMIT:
                return
        if defect := _defect(line):
            raise BadInput(f"{self._source} is not a text of layers: line {self._total} {defect}")

    def finish(self) -> ParsedFile:
        """The account of all lines so far."""
        weights = dict.fromkeys(self._configs, 0)
        left_out: dict[str, int] = {}
        for accepted in self._accepted.values():
            for text in accepted.texts:
                weights[text] += accepted.lines
            for what in accepted.left_out:
                left_out[what] = left_out.get(what, 0) + accepted.lines
        pairs = zip(self._rejections, self._rejected_lines, strict=True)
        rejections = tuple(replace(rejection, lines=lines) for rejection, lines in pairs)
        counts = LineCounts(
            total=self._total,
            accepted=sum(accepted.lines for accepted in self._accepted.values()),
            ignored=self._ignored,
            rejected=sum(r.lines for r in rejections if not r.unsupported),
            unsupported=sum(r.lines for r in rejections if r.unsupported),
            expanded=sum(
                accepted.lines for accepted in self._accepted.values() if accepted.several
            ),
            duplicates=sum(weights.values()) - len(weights),
        )
        return ParsedFile(
            tuple(self._configs.values()),
            counts,
            rejections,
            tuple(weights.values()),
            left_out,
            self._bodies,
        )


def _defect(line: str) -> str:
    """Return what is wrong with a line as text, to end a sentence with; empty if nothing is."""
    if "\0" in line:
        return "holds a NUL character"
    if len(line) >= LINE_LIMIT:
        return f"does not end within {LINE_LIMIT} characters"
    if not line.isascii() and line.encode(errors="replace").decode() != line:
        return "is not valid UTF-8"
    return ""


def _cut(text: str) -> str:
    text = text if text.isascii() else text.encode(errors="replace").decode()
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"


def parse_file(
    path: str | Path, *, batches: Sequence[int] = (), command: str | None = None
) -> ParsedFile:
    """Read the layers in the text file `path` (`-`: standard input).

    Raises BadInput if it is empty, endless or no UTF-8 text.

    `batches` and `command` are those of `parse_lines`.
    """
    try:
        standard = str(path) == "-"
        name = "standard input" if standard else str(path)
        with (
            open(sys.stdin.fileno(), "rb", closefd=False)
            if standard
            else open_plain(Path(path), pipes=True) as raw,
            io.TextIOWrapper(raw, text_encoding(raw.peek(2)), "surrogateescape") as stream,
        ):
            lines = iter(partial(stream.readline, LINE_LIMIT), "")
            parsed = parse_lines(lines, name, batches=batches, command=command)
    except OSError as error:
        hint = _EXAMPLE if isinstance(error, FileNotFoundError) else ""
        raise BadInput(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    except UnicodeError as error:  # of UTF-16; what is wrong in UTF-8 belongs to its line
        raise BadInput(f"{name} is not a text: {error}") from error
    if parsed.counts.total == 0:
        raise BadInput(f"{name} is empty")
    return parsed


def parse_lines(
    lines: Iterable[str], source: str, *, batches: Sequence[int] = (), command: str | None = None
) -> ParsedFile:
    """Read layers from MIOpenDriver commands, JSON objects, find-db keys and lines of logs.

    `source` names the lines in messages. With `batches` each layer comes at these batch sizes
    instead of the given one; one without a `batchsize`, such as a matrix product, then is rejected.
    `command` (one of PRECISIONS) overrides the precision of the convolutions. Raises BadInput for
    wrong options and, before the first line of a log, for a NUL character.
    """
    reader = LineReader(source, _change(batches, command))
    for line in lines:
        reader.add(line)
    return reader.finish()


def _change(
    batches: Sequence[int], command: str | None
) -> Callable[[Sequence[Config]], Sequence[Config]]:
    """Return what these options make of the layers of a line; raises BadInput."""
    if batches:
        check_sizes(("a batch size",) * len(batches), tuple(batches), 1)
    if command is not None and command not in PRECISIONS:
        raise BadInput(
            f"only {', '.join(PRECISIONS)} can override the precision, got {shown(command)}"
        )

    def changed(configs: Sequence[Config]) -> Sequence[Config]:
        if command is not None:
            configs = [_with_type(config, PRECISIONS[command]) for config in configs]
        if not batches:
            return configs
        distinct = dict.fromkeys(batches)
        return [_at_batch(config, batch) for config in configs for batch in distinct]

    return changed


def _with_type(config: Config, data_type: DataType) -> Config:
    return replace(config, data_type=data_type) if isinstance(config, ConvConfig) else config


def _at_batch(config: Config, batch: int) -> Config:
    if "batchsize" not in config.field_names():
        raise BadInput(f"a {config.kind} has no batch size that another could replace")
    return replace(config, **{"batchsize": batch})
