"""docs/plugins.md shows the files of examples/plugin, whole and as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text()
FILES = sorted(
    path
    for path in (ROOT / "examples" / "plugin").rglob("*")
    if path.suffix in (".py", ".toml") and "build" not in path.relative_to(ROOT).parts
)


def shown(name: str) -> list[str]:
    """The lines of a file as the page has them, in one block or in several; blank ones left out."""
    blocks = re.findall(
        rf"^`{re.escape(name)}`(?: goes on)?:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_page_shows_the_file(path: Path) -> None:
    assert shown(str(path.relative_to(ROOT))) == [
        line for line in path.read_text().splitlines() if line
    ]


def test_every_block_of_code_is_of_a_file() -> None:
    names = set(re.findall(r"^`(\S+)`(?: goes on)?:\n\n```", PAGE, re.MULTILINE))
    assert {ROOT / name for name in names} == set(FILES)
    named = len(re.findall(r"^`\S+`(?: goes on)?:\n\n```", PAGE, re.MULTILINE))
    assert PAGE.count("\n```\n") == named
