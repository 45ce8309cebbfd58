"""The words of the program that is run are its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from command_lines import Ended


@pytest.mark.parametrize("words", [("", "true"), ("--x=",)])
def test_empty_words_of_the_program_are_passed_on(
    type_in: Callable[..., Ended], words: tuple[str, ...]
) -> None:
    ended = type_in("tuna", "capture", "-t", "x", "sh", "-c", "exit 3", *words)
    assert ended.code == 3
