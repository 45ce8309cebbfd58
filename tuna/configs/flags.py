"""Flags of MIOpenDriver commands: pairs of flag and value, and values as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from reprlib import repr as shown

from tuna.errors import BadInput

#: The numbers that nearly every flag has, read on the fast path.
SMALL = {str(number): number for number in range(4097)}


def both_forms(flags: dict[str, str]) -> dict[str, str]:
    """The name of each flag by its short and by its long form."""
    return {f"-{short}": name for short, name in flags.items()} | {
        f"--{name}": name for name in flags.values()
    }


def fixed_forms(flags: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """The name and the only value of each flag with a fixed value, by both its forms."""
    return {
        form: (name, value)
        for short, (name, value) in flags.items()
        for form in (f"-{short}", f"--{name}")
    }


class Flags:
    """The flags of a command."""

    def __init__(self, others: Iterable[str], ignored: frozenset[str]) -> None:
        """`ignored` are the flags that do not describe the layer, `others` all that do."""
        self.ignores = ignored.__contains__
        self._known = ignored.union(others)

    def pairs(self, words: list[str]) -> Iterable[tuple[str, str]]:
        """Yield the flags after the command (the first word) with their values; raises BadInput.

        A flag that does not describe the layer may stand without its value at the very end.
        """
        flags = words[1::2]
        if len(words) % 2 and self._known.issuperset(flags):
            return zip(flags, words[2::2], strict=True)
        return self._irregular_pairs(words[1:])

    def _irregular_pairs(self, words: list[str]) -> Iterator[tuple[str, str]]:
        """Yield pairs from words with `flag=value`, a trailing comment or a mistake."""
        rest = iter(words)
        for word in rest:
            if word[0] == "#":
                return
            if word[0] != "-":
                raise BadInput(f"{shown(word)} is where a flag is expected")
            flag, equals, value = word.partition("=")
            if not equals:
                following = next(rest, None)
                if following is None:
                    if self.ignores(word):
                        return
                    raise BadInput(f"flag {word} has no value")
                value = following
            yield flag, value


def whole_number(flag: str, value: str) -> int:
    """`value` as a whole number; its limits are checked with the config."""
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise BadInput(f"flag {flag} needs a whole number, got {shown(value)}")
    if len(digits) > 20:
        raise BadInput(
            f"flag {flag} must be at most 2147483647, got a number of {len(digits)} digits"
        )
    return int(value)


def decimal_number(flag: str, value: str) -> float:
    """`value` as a number, with or without a fraction; the config checks that it is finite."""
    try:
        if not value.isascii() or "_" in value:
            raise ValueError
        return float(value)
    except ValueError:
        raise BadInput(f"flag {flag} needs a number, got {shown(value)}") from None


def check_fixed(fixed: dict[str, tuple[str, str]], flag: str, value: str) -> None:
    """Accept a flag that could make it another layer only with the value that does not."""
    if flag not in fixed:
        raise BadInput(f"unknown flag {flag[:40]}")
    name, neutral = fixed[flag]
    try:
        same = float(value) == float(neutral)
    except ValueError:
        same = False
    if not same:
        raise BadInput(f"flag {flag} ({name}) is supported only with {neutral}, got {shown(value)}")
