"""`tuna compare`: the results of sessions side by side."""

from __future__ import annotations

import click

from tuna import api
from tuna.cli import options
from tuna.cli.console import print_json, print_table, say
from tuna.messages import counted


@click.command()
@click.option(
    "--session-id",
    "session_ids",
    type=options.ID,
    multiple=True,
    required=True,
    help="Repeat it; the first is the baseline.",
)
@click.option("-t", "--tag", help="Only layers with this tag.")
@options.as_json
def compare(session_ids: tuple[int, ...], tag: str | None, as_json: bool) -> None:
    """Compare the results of sessions, layer by layer.

    Shown are the time of each session's fastest solver, and its ratio to the first session's time
    with the 95 % confidence interval of the ratio of medians: below 1 it is faster than the first.
    A session is called the fastest of a layer if the interval excludes 1.
    """
    found = api.compare_sessions(session_ids, tag)
    for sentence in found.differences:
        say(f"not like for like: {sentence}", err=True)
    if as_json:
        print_json(found.as_json())
    else:
        _show(found)


def _show(found: api.Comparison) -> None:
    for session in found.sessions:
        where = f"{session.device or session.arch} x {session.num_cu}"
        chosen = [f"{name} {value}" for name, value in session.conditions.items()]
        say(
            f"session {session.session_id}: {session.library} {session.library_version},"
            f" {session.reason!r}, {', '.join([where, *chosen, counted(session.layers, 'layer')])}"
        )
    first = found.sessions[0].session_id
    columns = ["layer", *(f"{one.session_id} {one.library} ms" for one in found.sessions)]
    columns += [f"{one.session_id} / {first}" for one in found.sessions[1:]]
    numbers = range(1, len(columns))
    print_table(
        "", [*columns, "fastest"], [_row(found, layer) for layer in found.layers], right=numbers
    )
    rows = [
        (
            f"{total.name}, {counted(total.runs, 'run')}",
            *map(_ms, total.times_ms),
            *map(_times, total.ratios[1:]),
        )
        for total in found.totals
    ]
    rows.append(
        ("geometric mean", *("" for _ in found.sessions), *map(_times, found.geometric_means[1:]))
    )
    print_table(
        "",
        [counted(len(found.common), "layer that all have", "layers that all have"), *columns[1:]],
        rows,
        right=numbers,
    )
    wins = ", ".join(
        f"session {session.session_id} ({session.library}): {wins}"
        for session, wins in zip(found.sessions, found.wins, strict=True)
    )
    say(f"fastest for so many layers: {wins}")


def _row(found: api.Comparison, layer: api.ComparedLayer) -> list[str]:
    times = [
        _ms(best.time_ms) if best else why
        for best, why in zip(layer.bests, layer.missing, strict=True)
    ]
    names = {
        session.session_id: f"{session.session_id} {best.solver}"
        for session, best in zip(found.sessions, layer.bests, strict=True)
        if best
    }
    fastest = (
        names[layer.fastest]
        if layer.fastest
        else f"only {', '.join(names.values())}"
        if len(names) == 1
        else "tie"
    )
    return [layer.label, *times, *map(_ratio, layer.ratios[1:]), fastest]


def _ratio(ratio: api.Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return _times(ratio.value)
    return f"{_times(ratio.value)} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _ms(time_ms: float) -> str:
    return f"{time_ms:.4g}"


def _times(ratio: float) -> str:
    return f"{ratio:.3f}"
