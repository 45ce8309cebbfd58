"""The file zoo: hostile, broken and good ONNX files, each imported under limits.

Each file is imported as `tuna model import` does, under a limit of 2 GiB and 60 s of CPU time, into
a database of its own. A refusal is one sentence that names operator and node, or says what the file
is, and leaves nothing behind; a good file is accepted. Each twentieth is imported by the command as
a user types it, each twentieth given to `tuna tune FILE -o`, and each twentieth sent to a service,
with hostile requests. What breaks a rule goes to stderr, with the command that repeats it.
"""

from __future__ import annotations

import collections
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.drills import (  # noqa: F401  kinds are in KINDS
    costs,
    doors,
    encoding,
    foreign,
    healthy,
    operators,
    served,
    structure,
    zoo,
)
from benchmarks.drills.judging import RULES, Fault, Run, faults
from benchmarks.drills.zoo import Expected, Numbered
from benchmarks.harness import Outcome, command_line

#: Of so many files one is imported by a typed command, one tuned, one sent to the service.
_SHARE = 20
#: Variants of each request.
_VARIANTS = 4
_IMPORT = ("model", "import", "zoo", "{file}")
_TUNE = ("tune", "{file}", "-o", "{out}", "--minutes", "0")

Verdict = tuple[Numbered, str, Run, list[Fault]]


def main() -> int:
    """Command line: which files."""
    parser = command_line(__doc__, seed=1, count=405, processes=2)
    parser.add_argument("--only", default="", metavar="KIND[:NUMBER]", help="of this kind alone")
    options = parser.parse_args()
    name = options.only.partition(":")[0]
    if name not in ("", "requests", *zoo.KINDS):
        parser.error(f"--only: kinds are requests, {', '.join(zoo.KINDS)}")
    numbered = []
    if name != "requests":
        numbered = list(zoo.chosen(options.seed, options.count, options.only))
    # exits through the `with` blocks, which stop the service
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    places = list(enumerate(numbered))
    parts = [places[first :: options.processes] for first in range(options.processes)]
    started = time.monotonic()
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        verdicts = [
            verdict
            for part_verdicts in pool.map(judged, filter(None, parts))
            for verdict in part_verdicts
        ]
    if options.only in ("", "requests"):
        verdicts += by_service(options.seed, [] if options.only else numbered)
    return outcome(verdicts, time.monotonic() - started).print()


def judged(places: Sequence[tuple[int, Numbered]]) -> list[Verdict]:
    """Judge specimens, with their places in the zoo, in this process."""
    with doors.opened() as door:
        return [verdict for place in places for verdict in _judged(door, *place)]


def _judged(door: doors.Door, place: int, numbered: Numbered) -> list[Verdict]:
    specimen = numbered.make()
    ways: list[tuple[str, Sequence[str], bool]] = [("import", _IMPORT, False)]
    if place % _SHARE == 0:
        ways.append(("typed", _IMPORT, True))
    if place % _SHARE == _SHARE // 2 and specimen.expected is Expected.REFUSED:
        ways.append(("tune", _TUNE, True))
    found = []
    for way, words, typed in ways:
        run = door.run(specimen, words, typed=typed)
        found.append(shown((numbered, way, run, list(faults(specimen, run)))))
    return found


def _requests(seed: int) -> Iterator[served.Sent]:
    for variant in range(_VARIANTS):
        yield from served.requests(random.Random(f"{seed} {variant}"))  # noqa: S311


def by_service(seed: int, numbered: Sequence[Numbered]) -> list[Verdict]:
    """Judge hostile requests, and a share of the specimens, by the answers of a service."""
    found: list[Verdict] = []
    share = [each for each in numbered[3::_SHARE] if served.can_be_sent(each.make())]
    with (
        tempfile.TemporaryDirectory(prefix="tuna-drill-") as folder,
        served.serving(Path(folder) / "home") as (visitor, memory),
    ):
        for place, sent in enumerate(_requests(seed)):
            text, broken = served.send(visitor, sent)
            run = Run(
                2, f"{sent.method} {sent.path[:40]} {sent.content[:60]!r}: {text}", 0, 0, 0, ()
            )
            found.append(shown((Numbered("requests", place, seed), "serve", run, broken)))
        for each in share:
            run, broken = served.submit(visitor, memory, str(each), each.make())
            found.append(shown((each, "serve", run, broken)))
    return found


def shown(verdict: Verdict) -> Verdict:
    """Print the rules that a run broke, return the verdict."""
    numbered, way, run, broken = verdict
    if not broken:
        return verdict
    rules = "; ".join(f"{fault.rule}: {fault.text}" for fault in broken)
    print(
        f"{numbered} ({way}) {rules}",
        f"exit code {run.code}, {run.seconds:.1f} s of CPU, {run.peak_bytes >> 20} MiB:"
        f" {' '.join(run.text.split())[:400]}",
        f"repeat: scripts/drill files --seed {numbered.seed} --only"
        f" {'requests' if numbered.kind == 'requests' else numbered}",
        sep="\n    ",
        file=sys.stderr,
    )
    return verdict


def outcome(verdicts: Sequence[Verdict], seconds: float) -> Outcome:
    counts = collections.Counter(fault.rule for *_, broken in verdicts for fault in broken)
    runs = [run for _, _, run, _ in verdicts]
    imports = [verdict for verdict in verdicts if verdict[1] == "import"]
    figures = {
        "files": float(len(imports)),
        "kinds": float(len({numbered.kind for numbered, *_ in verdicts})),
        "runs": float(len(runs)),
        "by_service": float(sum(way == "serve" for _, way, *_ in verdicts)),
        "refused": float(sum(run.code == 2 for _, _, run, _ in imports)),
        "accepted": float(sum(run.code == 0 for _, _, run, _ in imports)),
        "files_with_faults": float(sum(bool(broken) for *_, broken in imports)),
        "largest_mib": max(run.peak_bytes for run in runs) / (1 << 20),
        "longest_cpu_s": max(run.seconds for run in runs),
        "median_cpu_s": statistics.median(run.seconds for run in runs),
        "seconds": seconds,
        **{rule: float(counts[rule]) for rule in RULES},
    }
    limits = {**dict.fromkeys(RULES, 0.0)}
    return Outcome("drill files", figures, limits=limits)


if __name__ == "__main__":
    raise SystemExit(main())
