"""A finding of the doctor, and how versions and clocks are judged."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

_CLOCK_S = 2.0


@dataclass(frozen=True)
class Finding:
    """Result of one check. Not `ok`: something fails or would lose data; `warning`: it works, but
    see the hint."""

    what: str
    ok: bool
    text: str
    hint: str = ""
    warning: bool = False
    #: true for a library or an extra that this machine cannot use, which is not a fault
    absent: bool = False


def judge(what: str, bad: bool, text: str, hint: str, *, warning: bool = False) -> Finding:
    """Return a finding with `hint` where it is `bad`; a mere `warning` stays ok."""
    return Finding(what, warning or not bad, text, hint if bad else "", warning and bad)


def judge_version(what: str, name: str, found: tuple[Any, ...], least: tuple[int, ...]) -> Finding:
    """Return whether a server's version is at least the oldest that has what Tuna needs."""
    numbers = tuple(part for part in found if isinstance(part, int))
    old = numbers[: len(least)] < least
    hint = f"Tuna needs {name} {'.'.join(map(str, least))} or newer"
    return judge(what, old, f"{name} {'.'.join(map(str, numbers[:3]))}", hint)


def judge_clock(what: str, there: float, before: float) -> Finding:
    """Return how far a server's clock is off, by the midpoint of the round trip."""
    ahead_s = there - (before + time.time()) / 2
    bad, hint = abs(ahead_s) >= _CLOCK_S, "set the clocks by NTP"
    return judge(what, bad, f"{ahead_s:+.1f} s against this machine", hint, warning=True)
