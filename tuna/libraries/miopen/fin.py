"""Runs AMD's program fin (`fin -i INPUT -o OUTPUT`) in a private directory, with limits.

Three properties of fin matter here: it empties its kernel cache before each solver, so that two
calls must never share one; an error in one job of its input loses the answers to all of them; it
creates its output file, empty, at its start.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from tuna.common.files import NotPlain, read_plain
from tuna.errors import LibraryMissing
from tuna.sandbox.box import Box
from tuna.sandbox.processes import child_env, run
from tuna.settings import get_settings

#: Maximum of bytes of an answer; fin's largest have some megabytes for hundreds of kernels. Parsed,
#: it can take twenty times as much memory.
MAX_ANSWER_BYTES = 128 << 20
#: Variables that MITuna sets for reproducible answers
_FIXED_ENV = {
    "MIOPEN_LOG_LEVEL": "4",
    "MIOPEN_SQLITE_KERN_CACHE": "ON",
    "MIOPEN_DEBUG_IMPLICIT_GEMM_FIND_ALL_SOLUTIONS": "1",
    "MIOPEN_FIND_MODE": "1",
}


class FinFailed(Exception):
    """fin gave no valid answer; `tail` is the end of its output."""

    def __init__(
        self, reason: str, tail: str, *, timed_out: bool = False, garbled: bool = False
    ) -> None:
        super().__init__(reason)
        self.tail = tail
        self.timed_out = timed_out
        self.garbled = garbled  #: true if it exited normally with an invalid answer

    @property
    def text(self) -> str:
        """The end of the output, then the reason."""
        return f"{self.tail.rstrip()}\n{self}".strip()


@dataclass(frozen=True)
class FinCall:
    """Directory, cores and time limit of a call."""

    scratch: Path  #: folder in which the call's private directory is created
    cpus: tuple[int, ...] = ()
    timeout_s: float = 600.0
    #: variables that make the device visible
    variables: Mapping[str, str] = field(default_factory=dict)
    #: function that returns true to end the call: see `RunContext.cancelled`
    cancelled: Callable[[], bool] = lambda: False


def program() -> Path:
    """The executable; raises LibraryMissing with the path that was tried."""
    path = _path()
    if not os.access(path, os.X_OK) or not path.is_file():
        raise LibraryMissing(
            f"The program {path} (fin, which tunes MIOpen) is missing.",
            hint="install fin into /opt/rocm/bin, or set TUNA_FIN to its path",
        )
    if is_simulated() and not get_settings().simulated:
        raise LibraryMissing(
            f"{path} is Tuna's stand-in for fin, which only pretends to measure.",
            hint=(
                "to try MIOpen without a GPU set TUNA_SIMULATED=1; its results are marked as"
                " simulated"
            ),
        )
    return path


def _path() -> Path:
    settings = get_settings()
    return settings.fin or settings.rocm_path / "bin" / "fin"


def is_simulated() -> bool:
    """True if the executable is the tests' double of fin, which has a marker file beside it."""
    path = _path()
    return path.with_name(f"{path.name}.simulated").exists()


def call(
    jobs: Sequence[Mapping[str, Any]], place: FinCall, *, perf_db: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """fin's answer to each job; raises FinFailed.

    `perf_db` (file name -> text) is written to a private system database from which fin takes
    params.
    """
    fin = program()
    with tempfile.TemporaryDirectory(
        dir=place.scratch, prefix="fin-", ignore_cleanup_errors=True
    ) as folder:
        home = Path(folder)
        request, answer = home / "input.json", home / "output.json"
        request.write_text(json.dumps(jobs))
        done = run(
            [str(fin), "-i", str(request), "-o", str(answer)],
            timeout_s=place.timeout_s,
            env=_environment(home, perf_db, place.variables),
            cpus=place.cpus or None,
            cwd=home,
            cancelled=place.cancelled,
            box=Box(writable=(home,), readable=(fin.resolve().parent,), gpus=True),
        )
        if done.timed_out:
            raise FinFailed(
                f"fin gave no answer within {place.timeout_s:g} s", done.output, timed_out=True
            )
        status = f"signal {done.signal}" if done.signal else f"exit code {done.returncode}"
        if not os.path.lexists(answer) or not answer.lstat().st_size:
            raise FinFailed(f"fin ended with {status} and no answer", done.output)
        if done.returncode:
            raise FinFailed(f"fin ended with {status}", done.output)
        return _read(answer, len(jobs), done.output)


def _environment(
    home: Path, perf_db: Mapping[str, str] | None, variables: Mapping[str, str]
) -> dict[str, str]:
    folders = {
        "MIOPEN_USER_DB_PATH": home / "user-db",
        "MIOPEN_CUSTOM_CACHE_DIR": home / "cache",
        "TMPDIR": home / "tmp",
    }
    if perf_db:
        folders["MIOPEN_SYSTEM_DB_PATH"] = home / "system-db"
    for path in folders.values():
        path.mkdir()
    for name, text in (perf_db or {}).items():
        (home / "system-db" / name).write_text(text)
    return child_env(
        {**_FIXED_ENV, **variables, **{name: str(path) for name, path in folders.items()}}
    )


def _read(path: Path, jobs: int, tail: str) -> list[dict[str, Any]]:
    """Parse the output file; fin's dump of its environment (`process_env`), which may hold secrets,
    is dropped."""
    try:
        # unlike json, limits nesting and rejects lone surrogates
        found = from_json(read_plain(path, MAX_ANSWER_BYTES))
    except (NotPlain, PermissionError) as error:
        raise FinFailed(f"fin's answer cannot be read: {error}", tail, garbled=True) from None
    except ValueError as error:
        raise FinFailed(f"fin's answer is not JSON: {error}", tail, garbled=True) from None
    if not isinstance(found, list) or not all(isinstance(answer, dict) for answer in found):
        raise FinFailed("fin's answer is not a list of objects", tail, garbled=True)
    answers = [answer for answer in found if "process_env" not in answer]
    if len(answers) != jobs:
        raise FinFailed(f"fin answered {len(answers)} of {jobs} jobs", tail, garbled=True)
    return answers


def finite(value: object) -> float | None:
    """`value` as a finite number; None for anything else."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int that exceeds the range of float
        return None
