"""Standard terms: phrases of a private language do not come back in comments, docstrings, log
events and errors.

Add a phrase to `PRIVATE` once it is gone from everywhere.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

TUNA = Path(__file__).parent.parent / "tuna"
#: Globs below tuna/ that cover all of it; one test each.
SWEPT = (
    "*.py",
    *(f"{folder.parent.name}/**/*.py" for folder in sorted(TUNA.glob("*/__init__.py"))),
)
#: Regular expression -> the term to use instead.
PRIVATE = {
    r"\b(was|is|are|were|be) put out\b": "revoked",
    r"\b(lets?|was|is|be) (\w+ )?let in\b|\blets? (\w+ )?in\b": "admit, join",
    r"\bin hand\b": "current (chunk, jobs)",
    r"\b(is|are|was|were|be|been) told\b": "published, configured, gets",
    r"\basked to (end|leave)\b": "warm shutdown",
    r"\bfor ever\b": "permanently, hangs",
    r"\bwho(ever|soever)\b": "the worker, the process",
    r"\bworth (its|the) while\b": "has an effect",
    r"\bno room\b|\broom (for|is)\b": "no space left",
    r"\b(is|are|was|goes) away\b": "unreachable",
    r"\bwhat (becomes|became|\w+ has) of\b": "outcome; name the thing",
    r"\b(nobody|somebody|everybody)\b": "name the process or the user",
    r"\bof its own\b": "private, its own",
    r"\bgives? back\b": "returned",
    r"\bends? well\b": "succeeds",
    r"\bappears? whole\b": "atomic",
}


def _sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and of every string with a space in it, on one line."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split())


def _found(sentences: Iterator[tuple[int, str]]) -> list[str]:
    return [
        f"{line}: {match.group(0)!r} (write: {better})"
        for line, text in sentences
        for phrase, better in PRIVATE.items()
        if (match := re.search(phrase, text, re.IGNORECASE))
    ]


@pytest.mark.parametrize("pattern", SWEPT)
def test_sentences_use_standard_terms(pattern: str) -> None:
    paths = sorted(TUNA.glob(pattern))
    assert paths, f"nothing matches {pattern}"
    found = {str(path.relative_to(TUNA)): _found(_sentences(path)) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_comments_docstrings_and_log_events_are_searched(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""What a worker has in\nhand."""\n'
        "# Redis is away.\n"
        'log.warning("a worker was put out", worker=name)\n'
        'raise BadInput(f"This worker is not let in: {reason}")\n'
    )
    assert [text.partition(":")[0] for text in _found(_sentences(path))] == ["3", "1", "4", "5"]


#: What is counted in sentences, in the plural.
_NOUNS = (
    "calls|candidates|configs|entries|faults|files|jobs|kernels|keys|layers|lines|pairs|results|runs|sessions|solvers|tasks|"
    "trials|workers"
)


@pytest.mark.parametrize("path", sorted(TUNA.rglob("cli/**/*.py")), ids=lambda path: path.stem)
def test_what_is_counted_is_counted_by_one_function(path: Path) -> None:
    """`f"{number} layers"` says "1 layers"."""
    found = [
        f"{node.lineno}: {ast.unparse(number)} {text.value.split()[0]} (write: sentences.counted)"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr)
        for number, text in itertools.pairwise(node.values)
        if isinstance(number, ast.FormattedValue)
        and isinstance(text, ast.Constant)
        and re.match(rf" (?:{_NOUNS})\b(?!/)", str(text.value))
    ]
    assert found == []
