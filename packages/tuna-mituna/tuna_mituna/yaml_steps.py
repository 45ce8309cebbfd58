"""`go_fish.py --yaml FILE`: several steps in one file, checked as a whole before the first of them
runs.

Top-level keys with plain values hold for every step that has such an option. Each other key is a
step, with its options and `enabled: true`; a list of mappings is the same step several times. Steps
run in the order in which they stand.

    library: miopen
    session_id: 1
    import_configs: {enabled: true, tag: resnet50, file_name: resnet50.txt}
    fin_steps:
      - {enabled: true, fin_steps: miopen_find_compile, enqueue_only: true}
      - {enabled: true, fin_steps: miopen_find_eval, enqueue_only: true}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import click
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from tuna.cli.console import say
from tuna.cli.main import check_words
from tuna.common.files import read_text
from tuna.errors import BadInput

#: Words for steps that are options of go_fish.py, beside the options' own names
_OTHER_WORDS = {"check_status": "status", "execute_cmd": "exec"}
_MAX_BYTES = 1 << 20


def run_file(path: Path, library: str, program: click.Group) -> int:
    """Run the steps of the file, until one fails; returns its exit code. Raises BadInput before
    anything is run.

    `program` is go_fish.py's command, whose sub-commands are libraries; it runs the steps.
    """
    lines = command_lines(_load(path), library, program)
    for line in lines:
        say(f"-- go_fish.py {' '.join(line)}", err=True)
        code = program.main(args=line, prog_name="go_fish.py", standalone_mode=False)
        if code:
            return int(code)
    return 0


def command_lines(
    document: Mapping[str, Any], library: str, program: click.Group
) -> list[list[str]]:
    """The command line of `program` for each enabled step; raises BadInput for an unknown step or
    no option."""
    everywhere = {
        name: value for name, value in document.items() if not isinstance(value, dict | list)
    }
    library = str(everywhere.pop("library", library))
    group = _library_group(program, library)
    lines: list[list[str]] = []
    used: set[str] = set()
    for name, blocks in document.items():
        for block in _blocks(name, blocks):
            if not block.pop("enabled", False):
                continue
            command, words = _start(group, name)
            known = {
                option
                for param in command.params
                for option in param.opts
                if option.startswith("--")
            }
            options = {
                key: value for key, value in everywhere.items() if f"--{key}" in known
            } | block
            used |= options.keys()
            for key in block:
                if f"--{key}" not in known:
                    raise BadInput(f"The step {name} has no option {key!r}.")
            lines.append([library, *words, *_words(command, name, options)])
    unused = everywhere.keys() - used
    if unused:
        raise BadInput(f"No enabled step has an option {', '.join(sorted(unused))}.")
    if not lines:
        raise BadInput("The file has no step with 'enabled: true'.")
    for line in lines:
        _check(program, line)
    return lines


def _blocks(name: str, blocks: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(blocks, dict | list):
        return
    for block in blocks if isinstance(blocks, list) else [blocks]:
        if not isinstance(block, dict):
            raise BadInput(f"The step {name} must be a mapping, or a list of mappings.")
        yield dict(block)


def _library_group(program: click.Group, library: str) -> click.Group:
    group = program.get_command(click.Context(program), library)
    assert isinstance(group, click.Group)
    return group


def _start(group: click.Group, name: str) -> tuple[click.Command, list[str]]:
    """The command of a step, and the words before its options."""
    if name in group.commands:
        return group.commands[name], [name]
    option = f"--{_OTHER_WORDS.get(name, name)}"
    for param in group.params:
        if option in param.opts:
            return group, [option] if getattr(param, "is_flag", False) else []
    raise BadInput(
        f"Unknown step {name!r}.",
        hint=f"steps: {', '.join(sorted(group.commands))}, and go_fish.py's options",
    )


def _words(command: click.Command, name: str, options: Mapping[str, Any]) -> Iterator[str]:
    flags = {
        option
        for param in command.params
        if getattr(param, "is_flag", False)
        for option in param.opts
    }
    for key, value in options.items():
        option = f"--{key}"
        if option in flags:
            if not isinstance(value, bool):
                raise BadInput(f"{key} of the step {name} must be true or false.")
            if value:
                yield option
        elif value is not None:
            yield option
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                if not isinstance(part, str | int | float | date):
                    raise BadInput(
                        f"{key} of the step {name} must be one value or a list of values."
                    )
            yield ",".join(map(str, parts))


def _check(program: click.Group, line: list[str]) -> None:
    """Parse a command line without running it."""
    check_words(line)
    try:
        library, *rest = _rest(program, line, None)
        group = _library_group(program, library)
        words = _rest(group, rest, library)
        if words:
            _, command, rest = group.resolve_command(click.Context(group), words)
            assert command is not None
            command.make_context(words[0], rest, parent=click.Context(group, obj=library))
    except click.UsageError as error:
        raise BadInput(
            f"The step {' '.join(line)} cannot be run: {error.format_message()}"
        ) from None


def _rest(group: click.Group, words: list[str], name: str | None) -> list[str]:
    """Return the words after the group's own options: a command with its own. Raises click's
    UsageError for bad options."""
    context = click.Context(group, info_name=name)
    return click.Command.parse_args(group, context, list(words))


def _load(path: Path) -> dict[str, Any]:
    """The document, read without making objects of it; duplicate keys are refused."""
    text = read_text(path, _MAX_BYTES)
    try:
        document = YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadInput(
            f"{path}: {where}a key is given twice; give a list of mappings for several such steps."
        ) from None
    except (YAMLError, ValueError) as error:
        raise BadInput(f"{path} is not YAML: {str(error).splitlines()[0]}.") from None
    except RecursionError:
        raise BadInput(f"{path} is nested too deeply for a list of steps.") from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise BadInput(f"{path} must be a mapping of steps.")
    return document
