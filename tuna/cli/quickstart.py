"""`tuna quickstart`: a few real layers, tuned with TVM on this machine, end to end."""

from __future__ import annotations

import sys
from importlib.resources import as_file, files
from pathlib import Path

import click

from tuna import api
from tuna.cli import show
from tuna.cli.winners import print_winners
from tuna.cli.work import work_through

TAG = "resnet50-quick"
#: Per layer and solver; the layers of the list have four solvers or more, so at least 24 a layer.
CANDIDATES = 6
FORMS = ("find", "perf", "kernel", "tvm")


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), default=Path("quickstart-results"))
@click.option(
    "--candidates", type=click.IntRange(min=1), default=CANDIDATES, show_default=True, help="Per layer and solver."
)
def quickstart(output: Path, candidates: int) -> int:
    """Tune the layers of a small ResNet-50 list on this machine, and write databases and a report.

    A second start resumes; nothing is measured twice.
    """
    output.mkdir(parents=True, exist_ok=True)  # an unwritable folder is reported before the tuning, not after it
    session = api.init_session("tvm", "quickstart")
    session_id = session.id
    show.started(session)
    with as_file(files("tuna.data") / "resnet50_quick.txt") as path:
        show.imported(lambda: api.import_configs(path, TAG), TAG)
    click.echo(f"tvm has {api.update_solvers('tvm')} solvers")
    show.applicability(api.update_applicability(session_id, TAG))
    show.loaded(api.load_jobs(session_id, tag=TAG, reason="quickstart", options={"candidates": candidates}))
    errored = work_through(session_id, workers=True)
    figures = api.report(session_id)
    print_winners(figures)
    click.echo("\nDatabases:")
    for form in FORMS:
        show.exported(api.export(session_id, form, output))
    click.echo("\nReport:")
    click.echo(str(api.write_report(figures, output / "report.html")))
    if errored:
        click.echo(f"\n{errored} jobs failed; see why: tuna status --session-id {session_id}", err=True)
    click.echo(f"\nTry the result with TVM alone: {sys.executable} examples/use_exported_db.py {output}/*.tvm")
    return 0 if figures.with_winner == len(figures.layers) else 1
