"""A session of `tuna tune`: worked through, its winners printed and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import say
from tuna.cli.report import print_winners
from tuna.cli.work import work_through
from tuna.errors import NotFound


def tuned(
    prepared: api.PreparedTuning,
    forms: Iterable[str],
    output: Path | None,
    stored: options.OnStored,
) -> int:
    """Run a session, print its winners and write them; returns the exit code."""
    number = prepared.session.id
    work_through([number], workers=True, on_stored=stored)
    figures = api.report(number)
    print_winners(figures)
    if output is not None and figures.with_winner:
        show.exported(*_exports(number, forms, output), marks=False)
        say(str(api.write_report(figures, output / "report.html")))
    say(f"all results: `tuna results --session-id {number}`", err=True)
    done = figures.with_winner + len(prepared.loaded.met)
    return 0 if done and done >= len(figures.layers) else 1


def _exports(number: int, forms: Iterable[str], folder: Path) -> Iterator[api.ExportReport]:
    """Export each form that these layers are for, and say which are not written."""
    for form in forms:
        try:
            yield api.export(number, form, folder)
        except NotFound as error:
            say(f"no {form}: {error}", err=True)
