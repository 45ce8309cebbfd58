"""Signals that come while the handler of the last one runs."""

from __future__ import annotations

import subprocess
import sys

#: A handler interrupts the main thread, and itself, in the middle of `set`, thousands of times.
_BURST = """
import signal
from tuna.common.signals import SignalEvent

event, calls = SignalEvent(), 0

def ask(*_):
    global calls
    calls += 1
    event.set()

signal.signal(signal.SIGALRM, ask)
signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
while calls < 2000:
    event.set()
    event.wait(0)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_handler_may_set_an_event_whatever_it_interrupts() -> None:
    subprocess.run([sys.executable, "-c", _BURST], timeout=60, check=True)
