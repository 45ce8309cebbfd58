"""The judgement of one run of Tuna on one specimen: what came out, and which rules it breaks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.drills.zoo import Expected, Specimen

#: Bounds of a run.
LIMIT_BYTES, LIMIT_S = 2 << 30, 60.0
#: Exit code of a refusal.
_REFUSED = 2
#: Most characters of a refusal and its hint.
_CHARS = 2000
#: A traceback, or an exception's bare text
_TRACEBACK = re.compile(
    r"Traceback \(|\b[A-Za-z.]*(?:Error|Exception)\b(?!:? )|\b[A-Z][A-Za-z]*(?:Error|Exception):"
)
_RAW = re.compile(
    r"Wire format|[Cc]heck failed|InternalError|NoneType|object has no attribute|0x[0-9a-f]{6}"
    r"|bad_alloc|<class|\b\w+\.(?:py|cc|cpp|h):\d+|\[ShapeInferenceError\]|no such key"
    r"|fault of Tuna|cannot be processed|--debug|run_error|garbage"
    r"|cannot be imported: (?:\S+|'[^']*')\.(?:\s|$)"
)
#: Characters that no terminal may get, but for the end of a line
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Run:
    """What came out of one run."""

    code: int  #: exit code; negative: the signal that ended it
    text: str  #: of both streams
    seconds: float  #: of CPU time
    peak_bytes: int  #: the largest process
    rows: int  #: that are new in all tables
    files: Sequence[str]  #: that are new, in TUNA_HOME and the folder of temporary files


@dataclass(frozen=True)
class Fault:
    """A rule that a run breaks."""

    rule: str
    text: str


#: Rules by name, each a figure of the drill.
RULES = (
    *("over_memory", "over_time", "tracebacks", "bare_texts", "exit_codes", "unnamed", "long"),
    *("control_characters", "left_rows", "left_files", "refused_wrongly", "accepted_wrongly"),
    "answers",
)


def text_faults(text: str) -> Iterator[Fault]:
    """Yield the rules that a text for a person breaks."""
    if found := _TRACEBACK.search(text):
        yield Fault("tracebacks", found[0])
    elif found := _RAW.search(text):
        yield Fault("bare_texts", found[0])
    if found := _CONTROL.search(text):
        yield Fault("control_characters", repr(found[0]))
    if len(text) > _CHARS:
        yield Fault("long", f"{len(text)} characters")


def faults(specimen: Specimen, run: Run) -> Iterator[Fault]:
    """Yield the rules that a run on a specimen breaks."""
    if run.peak_bytes > LIMIT_BYTES:
        yield Fault("over_memory", f"{run.peak_bytes >> 20} MiB")
    if run.seconds > LIMIT_S:
        yield Fault("over_time", f"{run.seconds:.0f} s")
        return
    text = " ".join(run.text.split())
    if run.code not in (0, _REFUSED):
        yield Fault("exit_codes", f"exit code {run.code}")
    if run.code == 0:
        if specimen.expected is Expected.REFUSED:
            yield Fault("accepted_wrongly", text[-200:])
        return
    yield from text_faults(run.text)
    if specimen.expected is Expected.ACCEPTED:
        yield Fault("refused_wrongly", text[:300])
    missing = [
        part
        for part in specimen.says
        if not any(word.lower() in text.lower() for word in part.split("|"))
    ]
    if missing:
        yield Fault("unnamed", f"lacks {', '.join(missing)[:100]}")
    if run.rows:
        yield Fault("left_rows", f"{run.rows} rows")
    if run.files:
        yield Fault("left_files", ", ".join(run.files[:3]))
