"""Rows of benchmarks/networks.py: a network in a type on so many threads, kept as JSON lines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuna.common.messages import counted

TYPES = ("fp32", "bf16", "int8")
#: Peers of a type: those that compute in it, or in a finer one.
PEERS = {
    "fp32": ("onnxruntime", "openvino_f32"),
    "bf16": ("onnxruntime", "openvino_f32", "openvino"),
    "int8": ("onnxruntime", "openvino_f32", "openvino"),
}
#: Peers as they come: OpenVINO takes bf16 where the CPU has it.
AS_THEY_COME = ("onnxruntime", "openvino")
#: Ratio above which the functions that take the time are told, and how many of them.
_SLOW, _MAX_FUNCTIONS, _MAX_WORST = 0.95, 6, 5
#: Largest error of an answer that is not marked, by type.
_ERRORS = {"fp32": 1e-4, "bf16": 3e-2, "int8": 5e-2}


@dataclass
class Row:
    """A network in a type on so many threads."""

    network: str
    type: str
    threads: int
    commit: str
    kind: str = ""
    refused: str = ""  #: Sentence of the refusal; empty: it is built
    absent: dict[str, str] = field(default_factory=dict)  #: Why a peer does not take part
    times_ms: dict[str, float] = field(default_factory=dict)  #: By runtime, ours is `tuna`
    shares: dict[str, float] = field(default_factory=dict)  #: Our time over that of a peer
    precisions: dict[str, str] = field(default_factory=dict)  #: By peer
    #: Largest error over largest value of the answers beside onnxruntime's on the same file
    errors: dict[str, float] = field(default_factory=dict)
    #: Label, share of the time and reason of each function, the slowest first
    functions: list[tuple[str, float, str]] = field(default_factory=list)
    run_ms: float = 0.0  #: A run when its functions were timed
    build_s: float = 0.0  #: Import and build
    load: float = 0.0  #: Load of the machine when it began

    @property
    def key(self) -> tuple[str, str, int, str]:
        """A row that is there with the same key is not measured again."""
        return self.network, self.type, self.threads, self.commit

    @property
    def ratio(self) -> float | None:
        """Our time over that of the fastest peer of the type; None: not measured."""
        return _largest(self.shares, PEERS[self.type])

    @property
    def as_they_come(self) -> float | None:
        """The same of the fastest peer as it comes."""
        return _largest(self.shares, AS_THEY_COME)

    @property
    def is_slow(self) -> bool:
        """True if the functions that take the time are to be told."""
        return (self.ratio or 0.0) > _SLOW

    @property
    def is_wrong(self) -> bool:
        """True if an answer is further from onnxruntime's than is usual in this type, and than
        OpenVINO's is."""
        error, others = self.errors.get("tuna", 0.0), {**self.errors, "tuna": 0.0}
        return not error <= max(_ERRORS[self.type], 2 * max(others.values(), default=0.0))

    def __str__(self) -> str:
        return f"{self.network} {self.type}, {counted(self.threads, 'thread')}"

    def cells(self) -> list[str]:
        """The row of the table."""
        first = [self.network, self.type, str(self.threads)]
        if self.refused:
            return [*first, f"refused: {self.refused}"]
        times = [f"{self.times_ms[name]:.3g}" if name in self.times_ms else "-" for name in _ALL]
        ratios = [f"{each:.2f}" if each else "-" for each in (self.ratio, self.as_they_come)]
        errors = [f"{self.errors[name]:.0e}" if name in self.errors else "-" for name in _JUDGED]
        absent = "; ".join(f"{peer}: {why}" for peer, why in self.absent.items())
        return [*first, *times, *ratios, *errors, "WRONG" * self.is_wrong, absent]


_ALL = ("tuna", "onnxruntime", "openvino_f32", "openvino")
_JUDGED = ("tuna", "openvino_f32", "openvino")
_HEADER = ["network", "type", "threads", *(f"{name} ms" for name in _ALL)]
_HEADER += ["of the fastest", "as they come", *(f"{name} error" for name in _JUDGED), "", "absent"]


def _largest(shares: Mapping[str, float], peers: Sequence[str]) -> float | None:
    return max((shares[peer] for peer in peers if peer in shares), default=None)


def read(path: Path) -> dict[Any, Row]:
    """The rows of a file by key, the last of each; none where there is no file."""
    if not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return {row.key: row for row in rows}


def append(path: Path, row: Row) -> None:
    """Add a row to a file."""
    with path.open("a") as file:
        print(json.dumps(asdict(row)), file=file)


def table(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown, then means, the worst, and where the time of slow ones
    goes."""
    lines = [f"| {' | '.join(cells)} |" for cells in (_HEADER, *(row.cells() for row in rows))]
    lines.insert(1, "|---" * len(_HEADER) + "|")
    for name, mean in means(rows).items():
        lines.append(f"{name}: {mean:.3f}")
    for row in worst(rows):
        lines.append(f"worst: {row}: {row.ratio:.2f}")
    for row in rows:
        if row.is_slow:
            lines.append(f"{row}, {row.ratio:.2f}:")
            for label, share, reason in row.functions[:_MAX_FUNCTIONS]:
                lines.append(f"    {100 * share:4.1f} % {label}: {reason}")
    return "\n".join(lines)


def means(rows: Iterable[Row]) -> dict[str, float]:
    """Geometric means of the ratios by type and threads."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        title = f"geometric mean, {row.type}, {counted(row.threads, 'thread')}"
        for name, ratio in (("", row.ratio), (" as they come", row.as_they_come)):
            if ratio:
                groups.setdefault(title + name, []).append(ratio)
    return {
        f"{title} ({len(ratios)})": statistics.geometric_mean(ratios)
        for title, ratios in groups.items()
    }


def worst(rows: Iterable[Row]) -> list[Row]:
    """The rows with the largest ratios."""
    measured = [row for row in rows if row.ratio]
    return sorted(measured, key=lambda row: -(row.ratio or 0))[:_MAX_WORST]
