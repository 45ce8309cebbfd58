"""Lines of MIOpen's log without a MIOpenDriver command; the others are read as that command."""

from __future__ import annotations

import re

from tuna.configs.lines import LineForm
from tuna.errors import BadInput

_START = re.compile(
    r"(\d+ )*MIOpen(\([A-Za-z]+\))?: (Error|Warning|Info2?|Command|Function|Trace) "
)


def _read(line: str) -> list[object]:
    raise BadInput("the MIOpen log line holds no MIOpenDriver command")


LINE_FORM = LineForm(
    "MIOpen log line",
    recognises=lambda line: _START.match(line) is not None,
    read=_read,  # type: ignore[arg-type]
    asks_for=lambda _line: None,
)
