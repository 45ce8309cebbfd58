"""Runs of `tuna` on specimens, each in a process of its own under limits."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.drills.judging import LIMIT_S, Run
from benchmarks.drills.zoo import FILE, Specimen

ROOT = Path(__file__).resolve().parents[2]
#: Bytes of data of any process, beyond which the machine would suffer: more than the drill allows,
#: so that it is seen whose limit holds.
_SAFETY_BYTES = 3 << 30
#: CPU seconds in a quarter of the limit below which a process counts as hanging.
_IDLE_S = 0.05
_TICK_S = 0.005


class Door:
    """Gives specimens to `tuna`.

    With `typed` a run is a program as a user starts it, else a fork of one that has imported Tuna
    and TVM, which takes a tenth of the time.
    """

    def __init__(
        self, folder: Path, forking: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        """`folder` is empty; within `forking` programs are forks. Made with `opened`."""
        self._folder, self._home, self._forking = folder, folder / "first", forking
        self._number = 0

    def prepare(self) -> None:
        """Make the database, and what is known of this machine, from which each run starts."""
        self._home.mkdir()
        nothing = self._folder / FILE
        nothing.write_bytes(b"")
        run = self._run(
            ["model", "import", "nothing", str(nothing)], self._home, self._folder, typed=True
        )
        assert run[0] == 2, run

    def run(self, specimen: Specimen, words: Sequence[str], *, typed: bool) -> Run:
        """Run `tuna WORDS`, in which {file} is the specimen and {out} a place for a library."""
        self._number += 1
        place = self._folder / str(self._number)
        home, files, temporary = place / "home", place / "files", place / "tmp"
        shutil.copytree(self._home, home)
        files.mkdir()
        temporary.mkdir()
        path = specimen.write(files)
        rows, before = _rows(home), _listed(home)
        said = [word.format(file=path, out=temporary / "model.so") for word in words]
        code, text, seconds, peak = self._run(
            [*said, *specimen.options], home, temporary, typed=typed
        )
        left = [*(_listed(home) - before), *_listed(temporary)]
        run = Run(code, text, seconds, peak, _rows(home) - rows, sorted(left))
        shutil.rmtree(place)
        return run

    def _run(
        self, words: Sequence[str], home: Path, temporary: Path, *, typed: bool
    ) -> tuple[int, str, float, int]:
        """Return exit code, text of both streams, CPU seconds, bytes of the largest process."""
        env = {name: text for name, text in os.environ.items() if not name.startswith("TUNA_")}
        env |= {"TUNA_HOME": str(home), "TMPDIR": str(temporary), "NO_COLOR": "1"}
        with (
            tempfile.TemporaryFile() as stream,
            contextlib.nullcontext() if typed else self._forking(),
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "tuna", *words], env=env, cwd=temporary,
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            )  # fmt: skip
            code, seconds, peak = _wait(process)
            stream.seek(0)
            return code, stream.read(1 << 20).decode(errors="replace"), seconds, peak


@contextlib.contextmanager
def opened() -> Iterator[Door]:
    """Yield a door whose processes have a limit of memory, as this process has from now on."""
    sys.path[:0] = [str(ROOT / "tests")]
    from fork_server import PROGRAM_MODULES, TVM_MODULES, fork_server, forking  # type: ignore[import-not-found]

    resource.setrlimit(resource.RLIMIT_DATA, (_SAFETY_BYTES, _SAFETY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with (
        tempfile.TemporaryDirectory(prefix="tuna-drill-") as folder,
        fork_server([*PROGRAM_MODULES, *TVM_MODULES], one_thread) as server,
    ):
        door = Door(Path(folder), lambda: forking(server))
        door.prepare()
        yield door


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, float, int]:
    """Wait for the end of a process; return exit code, CPU seconds and the largest one's bytes.

    It is killed after the limit of CPU seconds, or of seconds without any, so that other work on
    the machine does not count.
    """
    used_s, checked = 0.0, time.monotonic()
    while True:
        found, status, usage = os.wait4(process.pid, os.WNOHANG)
        if found:
            process.returncode = os.waitstatus_to_exitcode(status)
            cpu_s = max(usage.ru_utime + usage.ru_stime, used_s)
            return process.returncode, cpu_s, usage.ru_maxrss << 10
        if time.monotonic() - checked > LIMIT_S / 4:
            before_s, used_s, checked = used_s, _cpu_s(process.pid), time.monotonic()
            idle = used_s - before_s < _IDLE_S
            if idle or used_s > LIMIT_S:
                process.kill()  # its children end with it
                used_s = float("inf")
        time.sleep(_TICK_S)


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and all that it started."""
    total, main = 0.0, psutil.Process(pid)
    for process in [main, *main.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended, and its parent counts it
            total += sum(process.cpu_times()[:4])
    return total


def _rows(home: Path) -> int:
    """Count the rows of all tables."""
    with contextlib.closing(sqlite3.connect(f"file:{home}/tuna.sqlite?mode=ro", uri=True)) as base:
        names = base.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()
        counts = [f'SELECT count(*) FROM "{name}"' for (name,) in names]  # noqa: S608  of our own
        return sum(base.execute(count).fetchone()[0] for count in counts)


def _listed(folder: Path) -> set[str]:
    """The files below a folder, but for those of SQLite, of Redis, and logs of workers."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}
    return {
        str(path)
        for path in found
        if path.parts[0] not in ("run", "logs") and "sqlite-" not in path.name
    }
