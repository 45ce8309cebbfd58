"""What a box is tried with: a program that tries to get out, and what it would do harm to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

from tuna.sandbox.box import Box
from tuna.sandbox.processes import run

HERE = Path(__file__).parent
LIMIT_S = 60.0
SECRET = "hunter2"  # noqa: S105 (nobody's)


class Place:
    """A TUNA_HOME with secrets in it, and a folder that a box may write to."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home, self.room = home, folder / "room"
        self.room.mkdir()
        self.secret = home / "tuna.sqlite"
        self.secret.parent.mkdir(parents=True, exist_ok=True)
        self.secret.write_text(SECRET)
        self.secret.chmod(0o600)
        self.readable = folder / "library"
        self.readable.write_text("code")
        self.box = Box(writable=(self.room,), readable=(self.readable,))
        self._others = set(_below())

    @property
    def harmed(self) -> bool:
        mode = self.secret.stat().st_mode & 0o777
        return (self.secret.read_text(), mode, self.readable.read_text()) != (SECRET, 0o600, "code")

    def left_behind(self, allowed: int = 0) -> list[str]:
        """Command lines of processes that were started below this one since, but for the victim and
        so many `allowed` ones."""
        found = [" ".join(process.cmdline()) for process in _below() if process not in self._others]
        return [
            line for line in found if not line.endswith("wait 0") and "resource_tracker" not in line
        ][allowed:]


def _below() -> list[psutil.Process]:
    processes = psutil.Process().children(recursive=True)
    return [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]


def perform(acts: Path, wanted: Mapping[str, object], place: Place) -> dict[str, str]:
    """What each act came to: DONE, or why not."""
    words = [word for name, argument in wanted.items() for word in (name, str(argument))]
    done = run([str(acts), *words], timeout_s=LIMIT_S, box=place.box, cwd=place.room)
    return dict(line.split(": ", 1) for line in done.output.splitlines())
