"""`tuna model check`: what would become of a file, without building it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from tuna.cli import options
from tuna.cli.console import print_json, print_table, say
from tuna.common.messages import counted
from tuna.errors import BadInput
from tuna_models import api
from tuna_models.cli.inputs import Inputs
from tuna_models.manifest import whole_numbers

#: Most nodes of an operator that are named.
_MAX_NODES = 6


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--batch", type=options.COUNT, help="First extent of every input.")
@options.collected(Inputs, into="inputs")
@options.model_cores
@options.as_json
def check(file: Path, batch: int | None, inputs: Inputs, as_json: bool) -> int:
    """Say in seconds whether the model FILE can be imported, and what is in the way; exit code 2:
    something is.

    Also which of its tasks would run without a kernel of Tuna's. Nothing is built or stored: no
    database is needed.
    """
    checked = api.check_file(file, batch=batch, **inputs.arguments())
    if as_json:
        print_json(api.file_check_document(checked))
    else:
        show_check(file, checked)
    return BadInput.exit_code if checked.obstacles else 0


def show_check(file: Path, check: api.FileCheck) -> None:
    """Print what is in the way of a file, or what would become of it."""
    if check.obstacles:
        say(f"{file.name} would be refused:")
        same: dict[tuple[str, str, str], list[str]] = {}
        for each in check.obstacles:
            same.setdefault((each.hint, each.operator, each.reason), []).append(each.node)
        for hint, alike in itertools.groupby(same.items(), key=lambda entry: entry[0][0]):
            for (_, operator, reason), nodes in alike:
                say(f"- {_named(operator, nodes)}{reason}")
            if hint:
                say(f"  {hint}")
    if not check.tasks:
        return
    calls = counted(sum(task.count for task in check.tasks), "call")
    cores = sum(task.task.core is not None for task in check.tasks)
    verdict = f"with {check.assumed} it" if check.assumed else file.name
    sizes = " ".join(f"{one.name}={','.join(map(str, one.shape))}" for one in check.inputs)
    say(
        f"{verdict} can be imported, with {sizes}: {calls} of {counted(len(check.tasks), 'task')},"
        f" {cores} of them convolutions, products and attention with a kernel"
    )
    show_whole_numbers(whole_numbers(check.tasks), check.left_in_fp32)
    show_without_kernel(check)


def show_without_kernel(found: api.FileCheck) -> None:
    """Print the tasks without a kernel of Tuna's, and those that run as scalars, with the
    reasons."""
    if not found.without_kernel:
        say("every task has a kernel or a schedule of Tuna's, in vectors")
        return
    print_table(
        ("task without a kernel of Tuna's", "calls", "of the time, at least", "runs as", "why"),
        [
            (
                *(each.task, each.count, f"{100 * each.share:.1f} %"),
                *("scalars" if each.scalars else "vectors", each.reason),
            )
            for each in found.without_kernel
        ],
        right=(1, 2),
    )


def _named(operator: str, nodes: Sequence[str]) -> str:
    """The operator and its nodes, or the input, to stand in front of a reason."""
    names = ", ".join(nodes[:_MAX_NODES]) + ", ..." * (len(nodes) > _MAX_NODES)
    if operator:
        return f"{operator} ({f'{len(nodes)}: ' if len(nodes) > 1 else ''}{names}): "
    return f"input {names}: " if names else ""


def show_whole_numbers(whole: int, left: Mapping[str, int]) -> None:
    """Print how much of a quantised model is computed with whole numbers, and why not the rest."""
    if whole or left:
        say(
            f"{whole} of {whole + sum(left.values())} convolutions and products of quantised"
            " tensors sum whole numbers"
        )
    for reason, count in left.items():
        say(f"without bytes: {count} x {reason}")
