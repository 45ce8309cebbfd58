"""Refusals of a model: why it cannot be imported, in words for the person who has it, and what to
do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from tuna.common.messages import one_line
from tuna_models.arguments import Obstacles
from tuna_models.child_answers import Obstacle
from tuna_models.names import names_of, title

#: What to do about an operator that the importer lacks in this form
CHANGE_HINT = (
    "correct that part of the network, or write it with other operators, and export it again"
)
#: What to do about a file that no exporter means
DAMAGED = "the file is damaged, or a tool wrote it wrong: export it again"
#: What to do where no file can be at fault
REPORT_HINT = (
    "this is a fault of Tuna or TVM: please report it where you have Tuna from, with the model's"
    " file, this command, and what it prints as `tuna --debug`"
)
#: Characters of a reason
REASON_CHARS = 300
#: Parts of TVM's texts that are not for people, and what takes their place.
_TVM = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r'(?:In )?ir\.Op\(.*?name="relax\.([\w.]+)".*?support_level=\d+\)', r"TVM's \1"),
        (r"metadata\[[^\]]*\]\[\d+\]|# Metadata omitted\.[^\n]*", ""),
        (r"\w*Check failed: .*? is false: ", ""),
        (r"\w*Check failed: .*? \(.*?\) : ", ""),
        (r"(?:T\.int64|T\.int32)\((-?\d+)\)", r"\1"),
        (r"R\.shape\((\[[^\]]*\])\)", r"\1"),
        (r"\s+", " "),
    )
)
#: Words of a text that says what is wrong with an operator, and others that are about TVM itself
_TELLS = re.compile(
    r"\b(expects?|requires?|should|must|broadcast\w*|unsupported|supported|invalid|incompatible)\b",
    re.IGNORECASE,
)
_INTERNAL = re.compile(
    r"null ?ptr|null pointer|AST|Mismatched type|object has no|TypeError|0x[\da-f]+"
)


class Refusal(Exception):
    """Why a model cannot be imported, as a phrase that follows its name, and what to do."""

    def __init__(self, reason: str, hint: str, operator: str = "", node: str = "") -> None:
        """With an operator and its node's name that of an operator."""
        super().__init__(f"the operator {operator} ({node}): {reason}" if operator else reason)
        self.hint = hint
        self.obstacle = Obstacle(operator=operator, node=node, reason=reason, hint=hint)

    @classmethod
    def of(cls, node: Any, reason: str, hint: str) -> Refusal:
        """That of an operator."""
        return cls(reason, hint, *names_of(node))

    @classmethod
    def said_of(cls, node: Any, predicate: str, hint: str) -> Refusal:
        """That of an operator of which a predicate is said, such as `makes a tensor of 7 TiB`."""
        refusal = cls(f"the operator {title(node)} {predicate}", hint)
        refusal.obstacle = obstacle(node, predicate, hint)
        return refusal


class Unsupported(Exception):
    """Why a node cannot be imported, as a phrase that follows its name."""


def obstacle(node: Any, reason: str, hint: str) -> Obstacle:
    """The obstacle that an operator is."""
    operator, name = names_of(node)
    return Obstacle(operator=operator, node=name, reason=reason, hint=hint)


@contextlib.contextmanager
def refusals_of(name: str) -> Iterator[None]:
    """Raise BadInput with the model's name in place of a Refusal."""
    try:
        yield
    except Refusal as error:
        message = f"{name} cannot be imported: {error}."
        raise Obstacles(message, [error.obstacle], hint=error.hint) from error


def tvm_reason(error: BaseException) -> str:
    """Why TVM does not convert an operator, as its text says it; empty where that is for nobody."""
    text = str(error)
    for pattern, words in _TVM:
        text = pattern.sub(words, text)
    text = one_line(text.strip(), REASON_CHARS).rstrip(".")
    text = re.sub(r"^(TVM's \w+),", r"\1:", text)
    return text if _TELLS.search(text) and not _INTERNAL.search(text) else ""
