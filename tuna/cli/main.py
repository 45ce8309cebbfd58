"""The `tuna` command: a map of sub-commands, each loaded only when it is called."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from keyword import iskeyword
from typing import Any

import click
from click.shell_completion import CompletionItem

from tuna.common import signals
from tuna.common.lifetime import forbid_inspection
from tuna.common.version import __version__
from tuna.errors import BadInput, StorageFull, TunaError
from tuna.plugins import Plugins

#: Number of new objects at which the garbage collector runs: importing SQLAlchemy and our models
#: makes more, none of them garbage, and looking through them every 700 took a tenth of the time of
#: a short command
_GC_THRESHOLD = 100_000

#: Hints for errors of the system that name no file
_HINTS = {
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or the container's); see `tuna doctor`"
}

#: Commands of the core: name -> (module in `tuna.cli`, help). `tuna --help` imports none of these
#: modules.
_CORE = {
    "quickstart": ("tune", "Tune some ResNet-50 layers on this machine, end to end."),
    "init-session": ("setup", "Start a tuning effort in this machine's environment."),
    "session": ("session", "List, archive, restore, delete sessions; options."),
    "import": ("setup", "Import layers from a file of driver commands or a log."),
    "configs": ("setup", "List the layers that carry a tag."),
    "update-solvers": ("setup", "Store the solvers that a library has."),
    "solvers": ("setup", "List a library's solvers."),
    "applicability": ("setup", "Work out which solvers can run which layers."),
    "load-jobs": ("setup", "Make the jobs of a session."),
    "run": ("work", "Work through a session with workers on this machine."),
    "enqueue": ("work", "Fill the queues and drain results; workers run elsewhere."),
    "worker": ("work", "Run a worker: compile or eval."),
    "token": ("tokens", "Make, list and revoke tokens of workers, visitors and caches."),
    "key": ("doctor", "Show and rotate the key that signs artifacts."),
    "workers": ("workers", "List workers; cordon, drain or revoke one."),
    "tune": ("tune", "Tune a list of layers, or an ONNX model, with one command."),
    "results": ("query", "List the winners of a session with all that is known of each."),
    "reproduce": ("work", "Repeat one job or one candidate, outside of any session."),
    "status": ("status", "Show sessions, jobs by state and failures by cause; --watch refreshes."),
    "metrics": ("status", "Serve metrics of all sessions for Prometheus."),
    "retry": ("work", "Send errored jobs back to the step that failed."),
    "cancel": ("work", "End jobs that are not finished."),
    "export": ("databases", "Write results as a database."),
    "report": ("report", "Print a session's winners, and write a report as one HTML file."),
    "compare": ("report", "Compare the results of sessions, layer by layer."),
    "query": ("query", "Search all results, by layer, model or device."),
    "coverage": ("query", "Say how much of a model or tag has results on an architecture."),
    "golden": ("golden", "Build, compare, promote and roll back numbered releases."),
    "import-db": ("databases", "Import a database of MIOpen's or an export."),
    "merge": ("databases", "Merge databases of one form into a new one."),
    "db-diff": ("databases", "Say how two databases differ."),
    "check-db": ("databases", "Validate a folder of databases against their library's rules."),
    "doctor": ("doctor", "Check this machine and its services, and say what to change."),
    "db": ("doctor", "Look after the database."),
}
#: Distributions by command, for a user who has not installed them
_DISTRIBUTIONS = {
    "benchmark-model": "tuna-models",
    "cache": "tuna-serve",
    "capture": "tuna-capture",
    "gateway": "tuna-remote",
    "model": "tuna-models",
    "predictor": "tuna-predict",
    "rpc-client": "tuna-remote",
    "serve": "tuna-serve",
    "simulate": "tuna-simulate",
    "tune-rpc": "tuna-remote",
}
#: Tables like `_CORE` of other distributions, whose modules have full names
_PACKAGES: Plugins[dict[str, tuple[str, str]]] = Plugins("tuna.commands", "set of commands", dict)


@functools.cache
def commands() -> dict[str, tuple[str, str]]:
    """Return module and line of help of each command by its name, the core's first."""
    found = {name: (f"tuna.cli.{module}", line) for name, (module, line) in _CORE.items()}
    for table in _PACKAGES.all().values():
        found.update((name, line) for name, line in table.items() if name not in found)
    return found


def _module(name: str) -> str | None:
    """The module of a command, None for an unknown one; packages are looked at for others than the
    core's."""
    if name in _CORE:
        return f"tuna.cli.{_CORE[name][0]}"
    return commands().get(name, (None, ""))[0]


def load_command(name: str) -> click.Command:
    """One of `commands`: its module has it under its name, such as `init_session` or `import_`."""
    module, attribute = _module(name) or "", name.replace("-", "_")
    command: click.Command = getattr(
        importlib.import_module(module), f"{attribute}_" if iskeyword(attribute) else attribute
    )
    return command


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(commands())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if _module(name) is None:
            return None
        return load_command(name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and options, without loading any command."""
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in commands().items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        known = name.startswith("-") or _module(name) is not None
        if not known and name in _DISTRIBUTIONS:
            package = _DISTRIBUTIONS[name]
            raise click.UsageError(f"{name} needs the package {package}: pip install {package}")
        if not known and not ctx.resilient_parsing:
            raise click.exceptions.NoSuchCommand(name, possibilities=commands(), ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in commands().items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show a traceback for every error.")
@click.version_option(__version__, prog_name="tuna")
def tuna(debug: bool) -> None:
    """Find the fastest kernel for every layer on your devices, and ship the answer as databases.

    The steps, one by one: init-session, import, update-solvers, applicability, load-jobs, run,
    report, export. `tuna quickstart` does all of it for a few layers, `tuna tune` for yours.
    """


def check_words(words: Sequence[str]) -> None:
    """Refuse what neither a file's name nor the database can hold: NUL, and bytes that are no
    UTF-8."""
    for word in words:
        if "\0" in word or (not word.isascii() and word.encode(errors="replace").decode() != word):
            raise BadInput(f"{word[:80]!a} is not a text: it has NUL, or bytes that are not UTF-8.")


def _takes_any(name: str) -> bool:
    """Whether the words behind a command are another program's."""
    if _module(name) is None:
        return False
    return bool(load_command(name).context_settings.get("ignore_unknown_options"))


def check_values(words: Sequence[str]) -> None:
    """Refuse an empty value before `--`: it is a variable of a script that is not set."""
    if _takes_any(next((word for word in words if not word.startswith("-")), "")):
        return
    for before, word in zip(["", *words], words, strict=False):
        if word == "--":
            return
        if not word:
            raise BadInput(
                f"{before} has an empty value." if before.startswith("-") else "A word is empty."
            )
        if word.startswith("--") and word.endswith("="):
            raise BadInput(f"{word[:-1]} has an empty value.")


def guarded(
    command: click.Command,
    args: list[str] | None = None,
    name: str = "tuna",
    respell: Callable[[str], str] = lambda text: text,
) -> int:
    """Run a command line; an error that a user can act on becomes one sentence, a hint and an exit
    code.

    `respell` turns the options that a sentence names, which are those of `tuna`, into those of the
    program.
    """
    words = sys.argv[1:] if args is None else args
    forbid_inspection()
    try:
        check_words(words)
        if command is tuna:
            check_values(words)
        _warn_of_ignored_settings()
        answer: Any = command.main(args=words, prog_name=name, standalone_mode=False)
    except TunaError as error:
        if "--debug" in words:
            raise
        _complain(respell(str(error)), respell(error.hint))
        return error.exit_code
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, *signals.INTERRUPTS) as error:
        number = error.number if isinstance(error, signals.Interrupted) else signal.SIGINT
        how = "Interrupted" if number == signal.SIGINT else f"Ended by {signals.name_of(number)}"
        with contextlib.suppress(OSError):  # who reads it may have ended by the same signal
            _complain(f"{how}; what was finished is kept, and the same command goes on from there.")
        return signals.exit_code(number)
    except BrokenPipeError:
        return 141  # as the shell shows a program that SIGPIPE ended
    except OSError as error:
        if "--debug" in words or error.strerror is None:
            raise
        return _refused_by_system(error)
    finally:
        _warn_of_other_settings()
    return answer if isinstance(answer, int) else 0


def _warn_of_ignored_settings() -> None:
    if os.path.lexists("tuna.toml"):  # else this needs no import
        from tuna.common.settings_file import ignored_file

        if sentence := ignored_file():
            click.echo(f"Warning: {sentence}", err=True)


def _warn_of_other_settings() -> None:
    if settings := sys.modules.get("tuna.settings"):  # else this command has used none
        for name, near in settings.misspelt().items():
            click.echo(f"Warning: unknown setting {name}; did you mean {near}?", err=True)
        for sentence in settings.ignored_settings():
            click.echo(f"Warning: {sentence}", err=True)


def _refused_by_system(error: OSError) -> int:
    """Print the system's sentence with a hint, and return the exit code."""
    from tuna.common.files import is_full, system_message  # imports more than `tuna --help`

    full = is_full(error)
    _complain(system_message(error), StorageFull.hint if full else _HINTS.get(error.errno or 0, ""))
    if full:
        return StorageFull.exit_code
    return BadInput.exit_code if error.errno == errno.ENAMETOOLONG else 1


def _complain(sentence: str, hint: str = "") -> None:
    from tuna.cli.console import say

    say(f"Error: {sentence}{'' if sentence.endswith(('.', '?', '!')) else '.'}", err=True)
    if hint:
        say(f"  {hint}", err=True)


def main() -> None:
    """Entry point of the `tuna` program."""
    gc.set_threshold(_GC_THRESHOLD)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a terminal of ASCII or Latin-1 has no "×"
    signals.run_program(lambda: guarded(tuna))
