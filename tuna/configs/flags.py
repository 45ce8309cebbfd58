"""Flags of MIOpenDriver commands: their names, pairs of flag and value, and values as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from reprlib import repr as shown
from typing import Any

from tuna.errors import BadInput

#: Numbers by their text: nearly every flag has one of these, read on the fast path
_SMALL = {str(number): number for number in range(4097)}
#: Long names of flags by their short form, for one kind of value
Names = Mapping[str, str]
_NONE: Names = {}


class Flags:
    """The flags of a command, which name the fields of a layer by a short and by a long form."""

    def __init__(
        self,
        *,
        numbers: Names,
        ignored: Names,
        fixed: Mapping[str, tuple[str, str]],
        words: Names = _NONE,
        decimals: Names = _NONE,
    ) -> None:
        """`numbers` are whole, `decimals` may have a fraction, `words` are texts.

        `ignored` are flags that do not describe the layer. `fixed` are those that would make it
        another layer: name, and the value that does not.
        """
        self._numbers, self._words = _both_forms(numbers), _both_forms(words)
        self._decimals = _both_forms(decimals)
        self._fixed = {
            form: (name, value)
            for short, (name, value) in fixed.items()
            for form in (f"-{short}", f"--{name}")
        }
        self._ignored = _both_forms(ignored).keys()
        self._known = {
            *(*self._numbers, *self._words, *self._decimals),
            *(*self._fixed, *self._ignored),
        }

    def read(self, words: list[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values by name of the flags after the command, which is the first word.

        The last of repeated flags counts. Raises BadInput.
        """
        values, numbers = dict(defaults), self._numbers
        for flag, value in self._pairs(words):
            name = numbers.get(flag)
            if name is not None:
                number = _SMALL.get(value)
                values[name] = whole_number(flag, value) if number is None else number
            elif flag in self._words:
                values[self._words[flag]] = value
            elif flag in self._decimals:
                values[self._decimals[flag]] = _decimal_number(flag, value)
            elif flag not in self._ignored:
                self._check_fixed(flag, value)
        return values

    def _pairs(self, words: list[str]) -> Iterable[tuple[str, str]]:
        """Yield the flags with their values.

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
                    if word in self._ignored:
                        return
                    raise BadInput(f"flag {word} has no value")
                value = following
            yield flag, value

    def _check_fixed(self, flag: str, value: str) -> None:
        """Accept a flag that could make it another layer only with the value that does not."""
        if flag not in self._fixed:
            raise BadInput(f"unknown flag {flag[:40]}")
        name, neutral = self._fixed[flag]
        try:
            same = float(value) == float(neutral)
        except ValueError:
            same = False
        if not same:
            raise BadInput(
                f"flag {flag} ({name}) is supported only with {neutral}, got {shown(value)}"
            )


def _both_forms(names: Names) -> dict[str, str]:
    return {f"-{short}": name for short, name in names.items()} | {
        f"--{name}": name for name in names.values()
    }


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


def _decimal_number(flag: str, value: str) -> float:
    """`value` as a number, with or without a fraction; the config checks that it is finite."""
    try:
        if not value.isascii() or "_" in value:
            raise ValueError
        return float(value)
    except ValueError:
        raise BadInput(f"flag {flag} needs a number, got {shown(value)}") from None
