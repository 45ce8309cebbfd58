"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import click

from tuna import api
from tuna.cli.console import say
from tuna.common.messages import counted
from tuna.errors import BadInput
from tuna.vocabulary import COMPARED_POLICIES, PUBLISHING_POLICIES

_Command = TypeVar("_Command", bound=Callable[..., Any])
#: Largest signed integer of 64 bits
_LARGEST_ID = 2**63 - 1


class _Id(click.IntRange):
    """A number of the database's; a larger one than it can hold is reported like any other bad
    value."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = super().convert(value, param, ctx)
        if number > _LARGEST_ID:
            self.fail(f"{number} is too large for an id.", param, ctx)
        return number


class _Output(click.Path):
    """A file or folder to write, refused before any work is done where it cannot be written."""

    def __init__(self, *, folder: bool | None) -> None:
        super().__init__(path_type=Path, file_okay=folder is not True, dir_okay=folder is not False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        if ctx is not None and ctx.resilient_parsing:
            return path
        place = path if path.is_dir() else path.parent
        if not place.is_dir():
            self.fail(f"the folder {place} does not exist.", param, ctx)
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            self.fail(f"nothing can be written into {place}: {error.strerror}.", param, ctx)
        return path


ID = _Id()
#: Number that the database can hold
COUNT = click.IntRange(min=1, max=2**31 - 1)
POSITIVE = click.FloatRange(min=0, min_open=True)
#: Number of a golden version
GOLDEN = click.IntRange(min=0, max=2**31 - 1)
OUTPUT_FILE, OUTPUT_FOLDER, OUTPUT = (
    _Output(folder=False),
    _Output(folder=True),
    _Output(folder=None),
)
session_id = click.option("--session-id", "session_id", type=ID, required=True, help="Session id.")
_several = click.option(
    "--session-id", "session_ids", type=ID, multiple=True, help="Id of a session; may be repeated."
)
_every = click.option(
    "--all", "every", is_flag=True, help="Each session with open jobs and no owner, later ones too."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
#: Option with the file of a kernel's shapes
shapes = click.option(
    "--shapes",
    "shapes_file",
    type=click.Path(path_type=Path),
    help='A JSON list of the shapes of a kernel, such as [{"rows": 4096, "columns": 1024}].',
)
library_argument = click.argument("library")


def _conditions(
    _context: click.Context, _param: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str]:
    return dict(_named(pairs))


#: Option with conditions of measurement, as a mapping
conditions = click.option(
    "--condition",
    "conditions",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_conditions,
    help="A condition of measurement, such as caches=cold.",
)


def boards(command: _Command) -> _Command:
    """Which boards behind TVM's RPC are meant."""
    key = click.option("--device-key", metavar="KEY", help="The boards' key at that tracker.")
    tracker = click.option(
        "--tvm-tracker", metavar="HOST:PORT", help="The tracker of boards to measure on (tvm)."
    )
    return tracker(key(command))


def option(text: str = "", *names: str, **attributes: Any) -> Any:
    """A field of a dataclass that `collected` makes an option of the command line, with this help.

    `names`: short ones beside the field's name, or with a long one all of them.
    """
    return field(metadata={"option": (names, {"help": text, **attributes})})


def collected(
    cls: type, spelling: str = "-", into: str = "wanted", **changes: Mapping[str, Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option for each field of the dataclass `cls`, which the command gets as parameter `into`.

    The name, and the type of flags, paths and lists, are the field's; the help is that of `option`,
    or the field's own. `spelling`: the mark between the words of an option. `changes`: attributes
    of this command's options by field, such as `type`, or `names` beside the long one.
    """
    types = get_type_hints(cls)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapped(*args: Any, **rest: Any) -> Any:
            rest[into] = cls(**{option.name: rest.pop(option.name) for option in fields(cls)})
            return command(*args, **rest)

        for option in reversed(fields(cls)):
            plain = ((), {"help": option.metadata.get("help"), "default": option.default})
            names, attributes = option.metadata.get("option", plain)
            own = {**_of_type(types[option.name]), **attributes, **changes.get(option.name, {})}
            names = own.pop("names", names)
            if not any(name.startswith("--") for name in names):
                names = (*names, f"--{option.name.replace('_', spelling)}")
            own.setdefault("show_default", own.get("default") not in (None, ()))
            wrapped = click.option(*names, option.name, **own)(wrapped)
        return wrapped

    return decorate


def _of_type(kind: Any) -> dict[str, Any]:
    """The attributes of an option that its type says."""
    if kind is bool:
        return {"is_flag": True, "show_default": False}
    if get_origin(kind) is tuple:
        return {"multiple": True}
    return {"type": click.Path(path_type=Path)} if Path in (kind, *get_args(kind)) else {}


def session_options(command: Callable[..., Any], spelling: str = "-") -> Callable[..., Any]:
    """An option for each of `SessionOptions`; `session_options` has those that were typed.

    `spelling`: the mark between the words of an option.
    """
    known = api.SessionOptions.model_fields

    @functools.wraps(command)
    def wrapped(*args: Any, **rest: Any) -> Any:
        values = {name: rest.pop(name) for name in known}
        chosen = {name: value for name, value in values.items() if value is not None}
        return command(*args, session_options=chosen, **rest)

    for name, one in reversed(known.items()):
        text = f"{str(one.description)[:1].upper()}{str(one.description)[1:]}; none: the default."
        flag = f"--{name.replace('_', spelling)}"
        wrapped = click.option(flag, name, metavar=name.upper(), help=text)(wrapped)
    return wrapped


def session_ids(command: _Command) -> _Command:
    """Options for several sessions: `session_ids`, `every`; see `sessions`."""
    return _several(_every(command))


def sessions(session_ids: Sequence[int], *, every: bool) -> list[int] | None:
    """The sessions that were named, once each, or None for all of them."""
    if every == bool(session_ids):
        raise BadInput("Name sessions with --session-id, or all of them with --all, and not both.")
    return None if every else list(dict.fromkeys(session_ids))


def given(facts: Mapping[str, object]) -> dict[str, str]:
    """The facts that were given, as text."""
    return {name: str(value) for name, value in facts.items() if value is not None}


def split(text: str | None) -> list[str]:
    """The comma-separated words of an option."""
    return [word for word in (part.strip() for part in (text or "").split(",")) if word]


def job_options(
    pairs: tuple[str, ...], **given: float | str | None
) -> dict[str, int | float | str]:
    """Job options from `--option name=value` and from options of the command's own; numbers become
    numbers."""
    options: dict[str, int | float | str] = {name: _number(value) for name, value in _named(pairs)}
    return options | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class JobChoices:
    """Options of jobs."""

    candidates: int | None = option(
        "Candidates for each layer and solver.", "--candidates", "--trials", type=COUNT
    )
    strategy: str | None = option(
        "How those of a large space are chosen.",
        type=click.Choice(["search", "random", "exhaustive"]),
    )
    warm_start: bool | None = option(
        "Whether a search learns from earlier ones.", "--warm-start/--no-warm-start", default=None
    )
    effort: str | None = option(
        "How far a search goes, if no limit is set.", type=click.Choice(["quick", "full"])
    )
    minutes: float | None = option(
        "A search ends by then, but for its first round; default: --effort.", type=POSITIVE
    )
    target_ms: float | None = option("This time of a layer is enough.", type=POSITIVE)
    pairs: tuple[str, ...] = option("An option of the library's.", "--option", metavar="NAME=VALUE")

    def given(self) -> dict[str, int | float | str]:
        """Return the options that were typed, by name."""
        typed = asdict(self)
        return job_options(typed.pop("pairs"), **typed)


#: Options of a `JobChoices`, which the command gets as `asked`
job_choices = collected(JobChoices, into="asked")


def _named(pairs: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not mark or not name:
            raise BadInput(f"{pair!r} is not of the form name=value.")
        yield name, value


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class _Cores(click.IntRange):
    """A number of cores, or `all`."""

    name = "cores"

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "all" else super().convert(value, param, ctx)


def _measure_with(context: click.Context, _param: click.Parameter, value: int | str | None) -> None:
    if value is not None and not context.resilient_parsing:
        context.with_resource(api.measuring_with(None if value == "all" else int(value)))


def _cores_option(default: str) -> Callable[[_Command], _Command]:
    """Option with the number of cores that measure, which sets TUNA_EVAL_CPUS; not an argument of
    the command."""
    return click.option(
        "--cores",
        type=_Cores(),
        metavar="N|all",
        callback=_measure_with,
        expose_value=False,
        help=f"Cores to build for and to measure on; default: those of TUNA_EVAL_CPUS, {default}.",
    )


cores = _cores_option("else one")
model_cores = _cores_option("else all that the affinity and CPU quota allow")
built_cores = _cores_option("else those that the model is for")


class _Policy(click.Choice[str]):
    """A policy of a coordinator; says of the others what they are for."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in COMPARED_POLICIES:
            self.fail(
                f"{value!r} is for comparisons alone: `tuna simulate --policy {value}`.", param, ctx
            )
        return super().convert(value, param, ctx)


policy = click.option(
    "--policy",
    type=_Policy(PUBLISHING_POLICIES),
    help="Policy that chooses what is published next; default: TUNA_POLICY.",
)


@contextlib.contextmanager
def _trials_logged(url: str) -> Iterator[OnStored]:
    """Log the trials of what is run within a `with` block, and say at the end what was logged."""
    log = api.log_trials(url)
    counts = log.counts
    try:
        with log:
            yield log.add
    finally:
        say(f"{counted(counts.logged, 'trial')} logged: {log.shown}", err=True)
        if counts.waiting:
            say(
                f"the trials of {counted(counts.waiting, 'job')} wait for the next run with this"
                f" --log-to: {counts.reason}",
                err=True,
            )


#: Callback that gets the ids of the jobs whose results were stored
OnStored = Callable[[Collection[int]], None]


def _log_to(context: click.Context, _param: click.Parameter, url: str | None) -> OnStored:
    if not url or context.resilient_parsing:
        return lambda _: None
    return context.with_resource(_trials_logged(url))


#: Option with the place of a log of trials, which is open until the command ends; the command gets
#: it as `stored`
log_to = click.option(
    "--log-to",
    "stored",
    metavar="URL",
    callback=_log_to,
    help="Place where all trials are logged: a folder, or s3://bucket/folder.",
)
