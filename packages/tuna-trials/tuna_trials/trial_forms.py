"""All trials of a session for other tuners' tools: `t4`, results files as Kernel Tuner writes them,
and `optuna`, the journal of an Optuna storage.

The parameters of a candidate are values by name as far as its library names them
(`Library.params.by_name`); else the whole text is one, `params`. Trials without a candidate, or
that a machine's fault ended, are left out.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ValidationError

from tuna.common.files import read_text
from tuna.common.messages import first_fault, install_extra
from tuna.errors import BadInput, LibraryMissing, NotFound
from tuna.libraries import compressed, registry
from tuna.libraries.exporter import UNSAFE, Entry, Exporter, ExportOptions, ExportTally
from tuna.libraries.results import NO_TIME, ResultSource, TrialRecord, is_time
from tuna.vocabulary import Cause

#: Maximum of trials in a study; a layer and solver with more has several studies
STUDY_TRIALS = 10_000
#: Maximum of distinct texts of one parameter in a study: each trial lists them all
_MAX_WORDS = 256
#: Maximum of bytes of a file that is read
_LIMIT_BYTES = 1 << 30
#: T4's word for a trial that failed with this cause; the other causes are not the candidate's fault
_INVALID = {
    Cause.BUILD_ERROR: "compile",
    Cause.BUILD_TIMEOUT: "timeout",
    Cause.RUN_ERROR: "runtime",
    Cause.RUN_TIMEOUT: "timeout",
    Cause.WRONG_RESULT: "correctness",
    Cause.NOT_APPLICABLE: "constraints",
}
_VALID = "correct"
#: Function that returns the parameters of a candidate by name
_Naming: TypeAlias = Callable[[str], Mapping[str, Any]]


class _Subject(BaseModel):
    """The layer and solver that trials are of, and where they were measured."""

    config: str
    config_key: str
    label: str
    solver: str
    library: str
    arch: str
    num_cu: int
    environment: str  #: key of the environment


_Groups: TypeAlias = Iterable[tuple[_Subject, Iterator[TrialRecord]]]


class TrialExporter(Exporter[ExportOptions]):
    """All trials, by layer and solver; a subclass says how a file of them looks."""

    options = ExportOptions
    names_library = True

    def accepts(self, source: ResultSource) -> None:
        """Refuse a golden version: it has no trials."""
        if not source.environment_key:
            raise BadInput(
                f"{source.title} has no trials.", hint="export the session that it was built from"
            )

    def write(
        self, path: Path, source: ResultSource, options: ExportOptions, tally: ExportTally
    ) -> int:
        """By config key, solver, job and number."""
        return self.write_groups(path, _groups(source, tally), _naming(source.library))

    @abstractmethod
    def write_groups(self, path: Path, groups: _Groups, naming: _Naming) -> int:
        """Write the trials of each layer and solver; returns their number."""


def _groups(source: ResultSource, tally: ExportTally) -> _Groups:
    names = ("config_key", "config", "label", "solver")
    where = {name: getattr(source, name) for name in ("library", "arch", "num_cu")}
    last = ""
    trials = (one for one in source.trials() if _belongs(one, tally))
    for key, group in groupby(trials, attrgetter(*names)):
        tally.configs += key[0] != last
        last = key[0]
        facts = dict(zip(names, key, strict=True)) | where
        yield _Subject(**facts, environment=source.environment_key), group


def _belongs(trial: TrialRecord, tally: ExportTally) -> bool:
    why = ""
    if trial.params is None:
        why = "its attempt failed before there was a candidate"
    elif trial.cause and trial.cause not in _INVALID:
        why = "a machine's fault ended it"
    elif not trial.cause and not is_time(trial.time_ms):
        why = NO_TIME
    if why:
        tally.skipped[why] += 1
    return not why


def _naming(library: str) -> _Naming:
    try:
        by_name = registry.get_library(library).params.by_name
    except (NotFound, LibraryMissing):  # it need not be installed here
        return lambda params: {"params": params}
    return lambda params: by_name(params) or {"params": params}


class _Provenance(BaseModel):
    job_id: int
    trial: int
    params: str
    cause: str


class _T4Result(BaseModel):
    configuration: dict[str, Any]
    times: dict[str, Any]
    invalidity: Literal["timeout", "compile", "runtime", "correctness", "constraints", "correct"]
    correctness: float
    measurements: list[dict[str, Any]] = []
    tuna: _Provenance


class _T4File(BaseModel):
    schema_version: Literal["1.0.0"]
    tuna: _Subject
    results: list[_T4Result]


class T4Exporter(TrialExporter):
    """A folder with a results file for each layer and solver, as T4's schema 1.0.0 has it.

    T4 has no place for the layer: it is in the member `tuna`, which the schema allows.
    """

    form = "t4"
    title = "T4 folder"
    endings = (".t4",)
    is_directory = True

    def write_groups(self, path: Path, groups: _Groups, naming: _Naming) -> int:
        """Each group as `<config key>-<solver>.json`, a result a line."""
        count = 0
        for number, (subject, trials) in enumerate(groups):
            name = f"{subject.config_key[:16]}-{UNSAFE.sub('_', subject.solver)}"
            file = path / f"{name}.json"
            if file.exists():  # another solver whose name differs in what file systems refuse
                file = path / f"{name}-{number}.json"
            with open(file, "w", encoding="utf-8", newline="\n") as stream:
                head = json.dumps({"schema_version": "1.0.0", "tuna": subject.model_dump()})
                stream.write(f'{head[:-1]}, "results": [')
                separator = "\n"
                for trial in trials:
                    stream.write(separator + json.dumps(_t4(trial, naming)))
                    separator, count = ",\n", count + 1
                stream.write("\n]}\n")
        return count

    def recognises(self, path: Path, head: bytes) -> bool:
        """By the beginning of the first file."""
        first = min(path.glob("*.json"), default=None) if path.is_dir() else None
        if first is None:
            return False
        with open(first, "rb") as stream:
            return stream.read(64).startswith(b'{"schema_version": "1.0.0", "tuna": {')

    def entries(self, path: Path) -> Iterator[Entry]:
        """Time, validity and params of each trial."""
        files = sorted(path.glob("*.json")) if path.is_dir() else []
        if not files:
            raise BadInput(f"{path} is not a {self.title}.")
        for file in files:
            text = read_text(file, _LIMIT_BYTES)
            try:
                contents = _T4File.model_validate_json(text)
            except ValidationError as error:
                fault = first_fault(error.errors())
                raise BadInput(f"{file} is not Tuna's T4 file: {fault}.") from None
            for result in contents.results:
                times = [m["value"] for m in result.measurements if m.get("name") == "time"]
                value = (times[0] if times else math.inf, result.invalidity, result.tuna.params)
                key = f"{contents.tuna.config} job {result.tuna.job_id} trial {result.tuna.trial}"
                yield Entry(key, contents.tuna.solver, value)


def _t4(trial: TrialRecord, naming: _Naming) -> dict[str, Any]:
    """A result; times in milliseconds, as Kernel Tuner has them."""
    assert trial.params is not None
    times: dict[str, Any] = {"runtimes": list(filter(is_time, trial.times_ms))}
    if trial.build_s is not None:
        times["compilation_time"] = trial.build_s * 1000
    measured = [("time", trial.time_ms, "ms"), ("low", trial.low_ms, "ms")]
    measured += [("high", trial.high_ms, "ms"), ("max_error", trial.max_error, "")]
    invalidity = _INVALID[Cause(trial.cause)] if trial.cause else _VALID
    moment = {} if trial.measured_at is None else {"timestamp": trial.measured_at.isoformat()}
    return moment | {
        "configuration": naming(trial.params),
        "objectives": ["time"],
        "times": times,
        "invalidity": invalidity,
        "correctness": float(invalidity == _VALID),
        "measurements": [
            {"name": name, "value": value, "unit": unit}
            for name, value, unit in measured
            if value is not None and not trial.cause
        ],
        "tuna": {
            "job_id": trial.job_id,
            "trial": trial.number,
            "params": trial.params,
            "cause": trial.cause,
        },
    }


class OptunaExporter(TrialExporter):
    """The journal of an Optuna storage with a study for each layer and solver.

    Optuna writes it, by a journal backend that names no process, so that equal trials give equal
    bytes; its JournalFileBackend and its dashboard read the file.
    """

    form = "optuna"
    title = "Optuna journal"
    endings = (".optuna.log",)

    def write_groups(self, path: Path, groups: _Groups, naming: _Naming) -> int:
        """Studies of STUDY_TRIALS at most, each by a storage of its own: one keeps in memory all
        that it writes."""
        optuna, count, number = _optuna(), 0, 0
        with open(path, "w", encoding="utf-8", newline="\n") as stream:
            for subject, trials in groups:
                name = f"{subject.label[:300]} {subject.solver} {subject.config_key[:12]}"
                part = 1
                while several := list(islice(trials, STUDY_TRIALS)):
                    study = optuna.create_study(
                        storage=optuna.storages.JournalStorage(
                            _backend(optuna, stream.write, number)
                        ),
                        study_name=name if part == 1 else f"{name} part {part}",
                    )
                    for fact, value in subject.model_dump().items():
                        study.set_user_attr(fact, value)
                    study.add_trials(_frozen(optuna, several, naming))
                    count, number, part = count + len(several), number + 1, part + 1
        return count

    def recognises(self, path: Path, head: bytes) -> bool:
        """By the first line, which makes a study, of Tuna's backend."""
        return head.startswith(b'{"op_code":0,"worker_id":"tuna",')

    def entries(self, path: Path) -> Iterator[Entry]:
        """Time, state and params of each trial, as Optuna reads them, but those of searches that
        went on in the file."""
        optuna = _optuna()
        if not self.recognises(path, compressed.head(path)):
            raise BadInput(f"{path} is not an {self.title} of Tuna's.")
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(path))
            studies = optuna.storages.JournalStorage(backend)
            all_studies = studies.get_all_studies()
        except Exception as error:  # Optuna raises whatever a damaged line leads to
            raise BadInput(f"{path} cannot be read by Optuna: {error}.") from error
        for study in all_studies:
            facts = study.user_attrs
            for trial in studies.get_all_trials(study._study_id, deepcopy=False):
                attributes = trial.user_attrs
                if "job_id" not in attributes:
                    continue
                key = f"{facts['config']} job {attributes['job_id']} trial {attributes['trial']}"
                params = json.dumps(trial.params, sort_keys=True)
                value = math.inf if trial.value is None else trial.value
                yield Entry(key, facts["solver"], (value, trial.state.name, params))


def _optuna() -> Any:
    """The package, which says nothing below warnings; raises LibraryMissing."""
    try:
        import optuna
    except ImportError:
        raise LibraryMissing("Optuna is not installed.", hint=install_extra("optuna")) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _backend(optuna: Any, write: Callable[[str], object], study_id: int) -> Any:
    class OneFile(optuna.storages.journal.BaseJournalBackend):  # type: ignore[misc]
        """Hands each log to the storage once, for which its study is the first, and writes it as
        the file backend does."""

        def __init__(self) -> None:
            self._unread: list[dict[str, Any]] = []

        def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
            unread, self._unread = self._unread, []
            return iter(unread)

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            self._unread += logs
            for log in logs:
                study = {"study_id": study_id} if "study_id" in log else {}
                line = json.dumps(log | {"worker_id": "tuna"} | study, separators=(",", ":"))
                write(f"{line}\n")

    return OneFile()


def _frozen(optuna: Any, trials: Sequence[TrialRecord], naming: _Naming) -> Iterator[Any]:
    """The trials of a study. One that failed has the time of the one before it: Optuna needs
    one."""
    named = [naming(trial.params or "") for trial in trials]
    distributions = _distributions(optuna.distributions, named)
    known = (trial.measured_at for trial in trials if trial.measured_at is not None)
    moment = next(known, datetime.fromtimestamp(0, timezone.utc))
    for number, (trial, values) in enumerate(zip(trials, named, strict=True)):
        moment = trial.measured_at or moment
        state = "FAIL" if trial.cause else "PRUNED" if trial.ended_early else "COMPLETE"
        spaces = {name: distributions[name] for name in values if name in distributions}
        texts = optuna.distributions.CategoricalDistribution
        yield optuna.trial.FrozenTrial(
            number=number,
            trial_id=number,
            state=optuna.trial.TrialState[state],
            value=None if trial.cause else trial.time_ms,
            datetime_start=moment,
            datetime_complete=moment,
            params={
                name: _word(values[name]) if isinstance(space, texts) else values[name]
                for name, space in spaces.items()
            },
            distributions=spaces,
            user_attrs={
                **{name: _word(value) for name, value in values.items() if name not in spaces},
                **_attributes(trial),
            },
            system_attrs={},
            intermediate_values={len(trial.times_ms): trial.time_ms} if state == "PRUNED" else {},
        )


def _attributes(trial: TrialRecord) -> dict[str, Any]:
    found = {"job_id": trial.job_id, "trial": trial.number, "repeats": len(trial.times_ms)}
    facts = ("cause", "low_ms", "high_ms", "clock", "max_error", "build_s")
    others = {name: getattr(trial, name) for name in facts}
    return found | {name: value for name, value in others.items() if value not in ("", None)}


def _distributions(kinds: Any, named: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The range of each parameter, or its texts unless they are too many."""
    values: dict[str, list[Any]] = {}
    for one in named:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    found = {}
    for name, those in values.items():
        types = {type(value) for value in those}
        if types == {int}:
            found[name] = kinds.IntDistribution(min(those), max(those))
        elif types <= {int, float} and all(map(math.isfinite, those)):
            found[name] = kinds.FloatDistribution(min(those), max(those))
        elif len(words := sorted({_word(value) for value in those})) <= _MAX_WORDS:
            found[name] = kinds.CategoricalDistribution(words)
    return found


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
