"""Options from files: `@FILE.yaml` on a command line stands for the options that the file holds.

A file is one YAML mapping of options without their dashes. A list gives an option once for each
element, a mapping is one value, and `true` or `false` is for options without a value. What comes
later on the command line counts. Files are data: tags and aliases are refused, and whatever is
wrong is named with its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tuna.common.messages import choices
from tuna.errors import BadInput
from tuna_remote.cli import safe_yaml
from tuna_remote.cli.safe_yaml import Node


class AtFileCommand(click.Command):
    """A command whose words may be `@FILE`; `refused` has options of other programs, each with the
    reason why it has none."""

    def __init__(self, *args: Any, refused: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refused = refused or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words of all files in their places, then as any command."""
        words: list[str] = []
        for word in args:
            if word.startswith("@") and len(word) > 1:
                words += _words(self, ctx, Path(word[1:]))
                continue
            name = word.partition("=")[0].removeprefix("--")
            if word.startswith("--") and name in self.refused:
                raise BadInput(f"{self.name} has no --{name}: {self.refused[name]}.")
            words.append(word)
        return super().parse_args(ctx, words)


def _words(command: AtFileCommand, ctx: click.Context, path: Path) -> Iterator[str]:
    known = {
        max(one.opts, key=len).removeprefix("--"): one
        for one in command.params
        if isinstance(one, click.Option)
    }
    for key, node in safe_yaml.pairs(safe_yaml.read(path), path):
        where = f"{path}:{safe_yaml.line(key)}"
        name = str(key.value)
        if name in command.refused:
            raise BadInput(f"{where}: {command.name} has no {name}: {command.refused[name]}.")
        if name not in known:
            raise BadInput(
                f"{where}: {command.name} has no option {name!r}.",
                hint=choices(name, known, "options"),
            )
        yield from _option(known[name], ctx, node, path)


def _option(option: click.Option, ctx: click.Context, node: Node, path: Path) -> Iterator[str]:
    flag = max(option.opts, key=len)
    name = flag.removeprefix("--")
    where = f"{path}:{safe_yaml.line(node)}"
    if option.is_flag:
        value = safe_yaml.value(node, path)
        if not isinstance(value, bool):
            raise BadInput(f"{where}: {name} is true or false.")
        yield from [flag] if value else []
        return
    elements: Sequence[Node] = safe_yaml.elements(node) if safe_yaml.is_list(node) else [node]
    if len(elements) != 1 and not option.multiple:
        raise BadInput(f"{where}: {name} takes one value, not {len(elements)}.")
    for element in elements:
        where = f"{path}:{safe_yaml.line(element)}"
        text = _text(element, name, path)
        keys: Sequence[str] = getattr(option.type, "keys", ())
        for key, _ in safe_yaml.pairs(element, path) if keys else ():
            if key.value not in keys:
                hint = choices(str(key.value), keys, "it has")
                raise BadInput(
                    f"{path}:{safe_yaml.line(key)}: {name} has no {key.value!r}.", hint=hint
                )
        try:
            option.type.convert(text, option, ctx)
        except BadInput as error:
            raise BadInput(f"{where}: {name}: {error}", hint=error.hint) from None
        except click.BadParameter as error:
            raise BadInput(f"{where}: {name}: {error.message}") from None
        yield f"{flag}={text}"


def _text(node: Node, name: str, path: Path) -> str:
    """A value as a word of the command line: text and numbers as they stand, a mapping or list as
    JSON in one line."""
    value = safe_yaml.value(node, path)
    if value is None or isinstance(value, bool):
        raise BadInput(f"{path}:{safe_yaml.line(node)}: {name} takes a value, not {node.value!r}.")
    return json.dumps(value) if isinstance(value, dict | list) else str(node.value)
