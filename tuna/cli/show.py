"""Output of commands for results of `tuna.api`, the same under `tuna` and under the seeds'
programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from tuna import api
from tuna.cli.console import (
    Column,
    by_state,
    fitted,
    print_json,
    print_table,
    say,
    table_width,
)
from tuna.common.messages import COMMAND_CHARS, counted, last_line, one_line
from tuna.errors import TunaError

_T = TypeVar("_T")
#: Columns of sentences without a terminal
_PROSE_WIDTH = 100
#: Minimum of columns of wrapped cells
_NARROWEST = 20


def exported(*reports: api.ExportReport, marks: bool = True) -> None:
    """Print all that exports left out, each sentence once, their counts and their paths.

    `marks`: with the number of noisy and of simulated results.
    """
    sentences: dict[str, None] = {}
    for report in reports:
        sentences |= {
            f"not exported: {count} ({reason})": None
            for reason, count in sorted(report.skipped.items())
        }
        sentences |= {
            f"{counted(count, 'layer')}: {note}": None
            for note, count in sorted(report.notes.items())
        }
        if report.simulated and marks:
            count = counted(report.simulated, "result was", "results were")
            sentences[f"simulated: {count} timed by a stand-in, not by a device"] = None
        if report.noisy and marks:
            count = counted(report.noisy, "result was", "results were")
            sentences[f"noisy: {count} measured on a device that was not quiet"] = None
    for sentence in sentences:
        say(sentence, err=True)
    for report in reports:
        say(f"{counted(report.entries, 'entry', 'entries')} of {counted(report.configs, 'layer')}")
        say(str(report.path))


def imported_database(report: api.ImportReport) -> None:
    """Print what an import left out, what it found and, last, the session."""
    for why, count in sorted(report.skipped.items()):
        say(f"not imported: {count} ({why})", err=True)
    entries, layers = counted(report.rows, "entry", "entries"), counted(report.configs, "layer")
    say(f"{entries} of {layers} ({report.new_configs} of them new)")
    say(f"session {report.session_id}")


def merged(databases: Iterable[api.MergedDatabase]) -> None:
    """Where the entries of each merged database come from, and its path."""
    for database in databases:
        for target, report in database.reports.items():
            name = f"{target}: " if len(database.reports) > 1 else ""
            say(
                f"{name}{report.kept} kept, {report.replaced} replaced, {report.added} added, "
                f"{report.dropped} dropped with their problems, {report.unusable} without a time"
            )
        say(str(database.path))


def started(session: api.StartedSession) -> None:
    """Id and environment of a session."""
    say(
        f"session {session.id} ({'new' if session.new else 'already there'}): {session.environment}"
    )


def prepared(prepare: Callable[[], api.PreparedTuning], library: str) -> api.PreparedTuning:
    """Print what was done for a session that can be run, also where nothing is imported."""
    found = _with_rejections(prepare)
    started(found.session)
    _imported(found.imported, found.tag)
    say(f"{library} has {counted(found.solvers, 'solver')}")
    applicability(found.applicability)
    loaded(found.loaded)
    return found


def imported(read: Callable[[], api.ImportedConfigs], tag: str) -> None:
    """Print what `read` imports: rejected lines, also where nothing is imported, and counts."""
    _imported(_with_rejections(read), tag)


def _with_rejections(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except api.NothingImported as error:
        rejections(error.rejections)
        raise


def _imported(found: api.ImportedConfigs, tag: str) -> None:
    rejections(found.rejections)
    left_out(found.left_out)
    c = found.counts
    if c.total:
        say(
            f"{counted(c.total, 'line')}: {c.accepted} accepted ({c.expanded} of them name several"
            f" directions, {c.duplicates} repeat earlier layers), {c.ignored} ignored,"
            f" {c.unsupported} unsupported, {c.rejected} rejected"
        )
    say(
        f"{counted(found.configs, 'layer')}: {found.added} added, {found.tagged} newly tagged"
        f" {tag!r}"
    )
    if found.missing:
        say(
            f"{counted(found.missing, 'layer is', 'layers are')} not there and not tagged", err=True
        )


def rejections(found: Sequence[api.Rejection]) -> None:
    """Each mistake, and for each kind of unsupported line how many there are, in the order of the
    lines."""
    unsupported: Counter[str] = Counter()
    for rejection in found:
        unsupported[rejection.reason] += rejection.lines if rejection.unsupported else 0
    for rejection in found:
        lines = unsupported.pop(rejection.reason, 0) if rejection.unsupported else rejection.lines
        if lines:
            more = f" (and {lines - 1} more such lines)" if lines > 1 else ""
            say(f"{rejection}{more}", err=True)


def left_out(found: Mapping[str, int]) -> None:
    """Print what lines asked for beside their layers."""
    for what, lines in sorted(found.items()):
        say(f"left out: {what} ({counted(lines, 'line')})", err=True)


def networks(found: api.Networks) -> None:
    """Models with the number of their layers, and frameworks."""
    rows: list[tuple[object, ...]] = [
        ("model", model.name, model.version, count) for model, count in found.models
    ]
    rows += [("framework", item.name, item.version, "") for item in found.frameworks]
    print_table(("", "name", "version", "layers"), rows, right=(3,))


def solvers(found: Iterable[api.StoredSolver]) -> None:
    """A table of solvers."""
    rows = [
        (
            "-" if s.number is None else s.number,
            s.name,
            ",".join(s.kinds),
            _yes(s.tunable),
            _yes(s.dynamic),
        )
        for s in found
    ]
    print_table(("id", "solver", "kinds", "tunable", "dynamic"), rows, right=(0,))


def conditions(offered: Sequence[api.Condition], as_json: bool) -> None:
    """Print the conditions of measurement that sessions of a library may choose."""
    if as_json:
        print_json(offered)
        return
    rows = [
        (condition.name, ", ".join(condition.values), condition.meaning) for condition in offered
    ]
    print_table(("condition", "values, the default first", "meaning"), rows)


def job_options(library: str, rows: Sequence[tuple[str, str, str, str]], as_json: bool) -> None:
    """Print the options that `load-jobs --option` takes."""
    names = ("option", "type", "default", "meaning")
    if as_json:
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif rows:
        print_table(names, rows)
    else:
        say(f"{library} has no job options.")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def applicability(answer: api.Applicability) -> None:
    """Print the numbers of layers and solvers that fit together, and what was left out; raise
    TunaError if the library failed for some."""
    say(
        f"{counted(answer.configs, 'layer')}: {counted(answer.pairs, 'combination')} of layer and"
        " solver can run"
    )
    for reason, count in sorted(answer.without.items()):
        say(f"{counted(count, 'layer')} left out: {reason}", err=True)
    for name, count in sorted(answer.unknown.items()):
        say(
            f"left out: {name} applies to {counted(count, 'layer')} but is an unknown solver",
            err=True,
        )
    if answer.unanswered:
        first = "; ".join(answer.unanswered[:3])
        raise TunaError(
            f"The library failed to answer for {len(answer.unanswered)} of"
            f" {counted(answer.configs, 'layer')}, such as {first}.",
            hint=(
                "the log has the reason for each; the other layers are done, and the same command"
                " asks again for all"
            ),
        )


def loaded(found: api.LoadedJobs) -> None:
    """Print the number of new jobs, and why there may be none."""
    say(f"New jobs added: {found.added}")
    if found.met:
        more = f", and {len(found.met) - 1} more" if len(found.met) > 1 else ""
        say(
            f"{counted(len(found.met), 'layer')} without a trial: known results are fast enough"
            f" ({found.met[0]}{more})"
        )
    if not found.added:
        pairs = f"{found.pairs} combinations of layer and solver"
        say(
            f"each of the {pairs} has its job already, or is not among those that were asked for",
            err=True,
        )


def failed(jobs: int, session_id: int) -> None:
    """Say that jobs failed, if any did, the most frequent reason, and where all are."""
    if not jobs:
        return
    (session,) = api.status(session_id, commands=False)
    most = next(iter(session.failures), None)
    why = f", most often by {most.cause}: {last_line(most.output_tail)}" if most else ""
    say(f"{counted(jobs, 'job')} failed{why}", err=True)
    say(f"all reasons: `tuna status --session-id {session_id}`", err=True)


def findings(found: Sequence[api.Finding]) -> None:
    """Print the findings of `tuna doctor`."""
    rows = [
        (
            _verdict(f),
            f.what,
            f.text + (f"  ->  {f.hint}" if f.hint and (f.warning or f.absent or not f.ok) else ""),
        )
        for f in found
    ]
    print_table(("", "what", "found"), rows, width=_PROSE_WIDTH)


def _verdict(finding: api.Finding) -> str:
    if finding.absent:
        return "absent"
    return "CHANGE" if not finding.ok else "warning" if finding.warning else "ok"


def option_texts(chosen: api.SessionOptions, outlook: api.Outlook | None) -> dict[str, str]:
    """The options of a session that are not as by default, and whether its deadline can be kept."""
    texts = chosen.texts()
    if "deadline" in texts and outlook is not None:
        kept = {True: ", can be kept", False: ", cannot be kept", None: ""}
        texts["deadline"] += kept[outlook.can_be_kept]
    return texts


def _marked(session: api.Overview) -> str:
    outlook = api.outlook(session.session_id) if session.options.deadline else None
    texts = option_texts(session.options, outlook)
    marks = [f"{name} {text}" for name, text in texts.items()]
    marks += ["simulated"] if session.simulated else []
    marks += [
        f"{number} {name}"
        for number, name in ((session.noisy, "noisy"), (session.undrained, "undrained"))
        if number
    ]
    return f"{session.library} ({', '.join(marks)})" if marks else session.library


def jobs_text(session: api.Overview) -> str:
    """Numbers of jobs by state, and of layers that have none since no solver takes them."""
    without = session.without_solver
    lacking = [f"{counted(without, 'layer')} without a solver"] if without else []
    return ", ".join(filter(None, [by_state(session.jobs), *lacking]))


def searches(found: api.Searches) -> str:
    """Return the number of searches that go on, why the others ended, and their rounds; "" if
    none."""
    if not found.total:
        return ""
    words = [f"{found.going_on} going on"] if found.going_on else []
    words += [f"{count} ended: {why}" for why, count in found.ended.items()]
    rounds = counted(sum(found.rounds.values()), "round")
    return f"{found.total}: {'; '.join(words)}; {rounds}: {by_state(found.rounds)}"


def aside(found: Mapping[str, str]) -> None:
    """A line for each worker that takes nothing for the moment, with the reason."""
    for name, reason in found.items():
        say(f"{one_line(name)} is aside: {one_line(reason)}")


def _states(session: api.Overview) -> str:
    return jobs_text(session) or ("-" if session.searches.total else "no jobs")


def _failed_attempts(session: api.Overview) -> str:
    return ", ".join(f"{one.attempts} {one.cause}" for one in session.failures) or "-"


def waits(found: Mapping[int, str]) -> None:
    """A line for each session whose published jobs wait for something."""
    for session_id, what in found.items():
        say(wait(session_id, what))


def wait(session_id: int, what: str) -> str:
    """Return the sentence of what a session's published jobs wait for."""
    return f"session {session_id} waits for: {one_line(what)}"


def sessions(overviews: Sequence[api.Overview], *, details: bool = False) -> None:
    """A table of sessions; with `details` the failures of the first, with the commands that
    reproduce them."""
    if not overviews:
        say("No sessions yet. Start one with: `tuna init-session LIBRARY -l REASON`")
        return
    columns: list[Column[api.Overview]] = [
        Column("session", lambda one: str(one.session_id), right=True),
        Column("library", _marked, 2),
        Column("arch", lambda one: one.arch, 5),
        Column("reason", lambda one: one.reason, 3),
        Column("jobs", lambda one: str(sum(one.jobs.values())), 4, right=True),
        Column("in flight", lambda one: str(one.in_flight), 6, right=True),
        Column("by state", _states, most=_NARROWEST),
        Column("failed attempts", _failed_attempts, most=_NARROWEST),
    ]
    if any(session.searches.total for session in overviews):
        columns.insert(
            -1, Column("searches", lambda one: searches(one.searches) or "-", 1, most=_NARROWEST)
        )
    print_table(*fitted(columns, overviews, table_width()))
    for session in overviews:
        if session.fault:
            say(f"session {session.session_id} is set aside: {one_line(session.fault)}")
    for failure in overviews[0].failures if details else ():
        say(f"{failure.cause} ({failure.attempts}): {last_line(failure.output_tail)}")
        if failure.reproduce:
            say(f"  reproduce: {one_line(failure.reproduce, COMMAND_CHARS)}", wrap=False)
