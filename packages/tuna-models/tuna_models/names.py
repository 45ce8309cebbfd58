"""Names: bounded ones of what is made of a model, and those of operators in messages. Imports no
TVM."""

from __future__ import annotations

import hashlib
from typing import Any

from tuna.common.messages import one_line

#: Maximum of characters of a function's name, which leaves room for a number within the limits of
#: configs and of answers (255); of a longer name the first ones are kept, and a hash of all
MAX_CHARS, _PREFIX_CHARS, _HASH_DIGITS = 250, 80, 16
#: Domains of ONNX's own operators.
OWN_DOMAINS = ("", "ai.onnx")
#: Characters of a name in messages
NAME_CHARS = 120


def bounded(name: str, most: int = MAX_CHARS) -> str:
    """The name, or if it has more than `most` characters, its first ones and a hash of all of it,
    so that different names stay different."""
    if len(name) <= most:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: min(_PREFIX_CHARS, most - _HASH_DIGITS - 1)]}_{digest}"


def title(node: Any) -> str:
    """An operator and its node's name, or its first output's, for messages."""
    return "{} ({})".format(*names_of(node))


def names_of(node: Any) -> tuple[str, str]:
    """The parts of `title`."""
    name = node.name or next(filter(None, node.output), "") or "without a name"
    operator = operator_name(node.domain, node.op_type)
    return one_line(operator, NAME_CHARS), one_line(name, NAME_CHARS)


def quoted(name: str) -> str:
    """A name of a file, for messages."""
    return repr(one_line(name, NAME_CHARS))


def operator_name(domain: str, operator: str) -> str:
    """Return an operator's name in messages."""
    return operator if domain in OWN_DOMAINS else f"{domain}.{operator}"
