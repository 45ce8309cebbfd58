"""`tuna predictor`: cost models that are trained from the trials of this database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import click

from tuna.cli import options
from tuna.cli.console import Column, print_json, print_list, print_table, say
from tuna.cli.groups import Group
from tuna.cli.query import since
from tuna.common.messages import counted
from tuna_predict import api
from tuna_predict.predictors import StoredPredictor
from tuna_predict.training import Seen

_FIGURES = ("regret@1", "regret@8", "regret@32", "ndcg@8")
_library = click.option("--library", default="tvm", show_default=True, help="Library.")


def _seen(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say which trials are learned from."""
    for option in (
        options.as_json,
        click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True),
        click.option("--since", callback=since, metavar="TIME", help="Only trials since TIME."),
        click.option("--arch", help="Only trials measured on this architecture."),
        _library,
    ):
        command = option(command)
    return command


@click.group(cls=Group)
def predictor() -> None:
    """Train a cost model from the trials of this database, and use it.

    It answers for layers that were never tuned (`tuna query --predict`), and searches begin with
    it. `train` keeps one, `use` uses it.
    """


@predictor.command()
@_seen
def train(library: str, arch: str | None, since: datetime | None, seed: int, as_json: bool) -> None:
    """Train a predictor and keep it; prints how good it is on layers that it has not seen."""
    trained = api.train_predictor(Seen(library, arch, since), seed)
    if as_json:
        print_json(trained)
        return
    _print_evaluation(trained.evaluation)
    say(
        f"{trained.name}: {counted(trained.trials, 'trial')} of {counted(trained.layers, 'layer')}."
        f" `tuna predictor use {trained.name}` uses it."
    )


@predictor.command()
@_seen
def evaluate(
    library: str, arch: str | None, since: datetime | None, seed: int, as_json: bool
) -> None:
    """Print how good a predictor of these trials is on layers that it has not seen; keep nothing.

    Layers are held out with all of their trials.
    """
    evaluation = api.evaluate_predictor(Seen(library, arch, since), seed).as_json()
    if as_json:
        print_json(evaluation)
    else:
        _print_evaluation(evaluation)


def _print_evaluation(evaluation: Mapping[str, Any]) -> None:
    layers = counted(evaluation["layers"], "layer")
    _print_ways(f"{layers} held out", evaluation["ways"])
    if evaluation["searched"]:
        layers = counted(evaluation["searched"], "layer")
        _print_ways(f"{layers} of these, which are searched", evaluation["searched_ways"])
    if answers := evaluation["answers"]:
        over = ", ".join(
            f"{answers[name]:.2f} of {words}"
            for name, words in (
                ("over_found", "the best of 32 trials'"),
                ("over_random", "a random candidate's"),
                ("low", "the predicted time at least"),
                ("high", "at most"),
            )
        )
        say(
            f"Answers: of {counted(answers['layers'], 'layer')} with a similar one, in"
            f" {answers['measured']} the predicted configuration was measured. Its time is {over}."
        )
    say(f"In answers: {_verdict(evaluation['beats_nearest'], 'the nearest layer')}.")
    say(f"In searches: {_verdict(evaluation['beats_built_in'], 'the built-in prior')}.")


def _verdict(good: bool, other: str) -> str:
    return f"no worse than {other} in regret@8" if good else f"not used, worse than {other}"


def _print_ways(title: str, ways: Mapping[str, Mapping[str, float]]) -> None:
    rows = [(way, *(f"{figures[name]:.3f}" for name in _FIGURES)) for way, figures in ways.items()]
    print_table(("order", *_FIGURES), rows, (1, 2, 3, 4), title=title)


@predictor.command("list")
@options.as_json
def list_predictors(as_json: bool) -> None:
    """List the predictors that were trained, the latest first."""
    predictors = api.list_predictors()
    if as_json:
        print_json(predictors)
        return
    columns: list[Column[StoredPredictor]] = [
        Column("name", lambda row: row.name),
        Column("version", lambda row: row.library_version, 4),
        Column("arch", lambda row: row.arch or "any", 3),
        Column("layers", lambda row: str(row.layers), 2, right=True),
        Column("trials", lambda row: str(row.trials), right=True),
        Column("seed", lambda row: str(row.seed), 5, right=True),
        Column("date", lambda row: f"{row.created_at:%Y-%m-%d}", 1),
        Column("used in", lambda row: row.used_in),
    ]
    print_list(columns, predictors, "There is no predictor yet: `tuna predictor train`.")


@predictor.command()
@click.argument("name", default="")
@_library
@click.option("--force", is_flag=True, help="Search with it even if the built-in prior is better.")
def use(name: str, library: str, force: bool) -> None:
    """Use the predictor NAME, by default the latest, in answers and new searches; `builtin` stops
    using any of the library.

    One that is worse than the table of the nearest layer gives no answers, one that is worse than
    the built-in prior is not used in searches.
    """
    chosen = api.use_predictor(name, library, force=force)
    if chosen is None:
        say(f"Searches of {library} begin with its built-in prior, and there are no predictions.")
        return
    say(f"{chosen.name} is used in {chosen.used_in}.")
    if not chosen.in_searches:
        say("Searches keep the built-in prior, which is better: --force uses this one.")
    if not chosen.in_answers:
        say("It gives no answers: the table of the nearest layer is better.")
    elif chosen.in_searches and not chosen.evaluation["beats_built_in"]:
        say("It is worse than the built-in prior, and was forced.")
