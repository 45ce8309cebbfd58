"""Work items and results: the JSON messages between the coordinator and a worker, validated by the
receiver."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tuna.configs import Config, from_json
from tuna.libraries.results import LONGEST_MS, MAX_PARTS
from tuna.vocabulary import Cause

#: Version of the JSON form of WorkItem and StepResult; a worker refuses another one
WIRE_VERSION = 11
#: Maximum of items of each list in a result: trials (a job option asks for no more), repeats of
#: one, code objects
MAX_TRIALS, _MAX_REPEATS, _MAX_KERNELS = 10_000, 4096, 10_000
#: Maximum of artifacts that a config names beside its body
_MAX_DATA = 16
#: Magnitude of other numbers above which they count as unknown, so that their sums stay finite;
#: maximum of GFLOPS of one device
_MAX_MAGNITUDE, _MAX_GFLOPS = 1e30, 1e9
#: Maximum of characters of a cause's output tail, to which it is cut before it is sent
TAIL_CHARS = 4000


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


def _no_half_characters(text: Any) -> Any:
    """Half of a surrogate pair, which a program may print and JSON may hold, cannot be sent on."""
    return (
        text
        if not isinstance(text, str) or text.isascii()
        else text.encode(errors="replace").decode()
    )


def _known(value: Any) -> Any:
    """Return None for a value that is not finite, or that nothing measures."""
    return None if isinstance(value, float) and not abs(value) <= _MAX_MAGNITUDE else value


def _possible_peak(value: Any) -> Any:
    """Return None for a peak that no device has."""
    return None if isinstance(value, float | int) and not 0 < value <= _MAX_GFLOPS else value


# Limits of the database's columns: one value that does not fit would lose the results in the same
# transaction.
_Version = Annotated[int, Field(ge=WIRE_VERSION, le=WIRE_VERSION)]
_Id = Annotated[int, Field(ge=0, lt=2**63)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Digest = Annotated[str, Field(max_length=64)]
_Name = Annotated[str, Field(max_length=255)]
_Long = Annotated[str, Field(max_length=1 << 20)]
_Output = Annotated[str, BeforeValidator(_no_half_characters)]
_Known = Annotated[float | None, BeforeValidator(_known)]
#: Milliseconds of a part of a run, which a clock may not have seen
_PartMs = Annotated[float, Field(ge=0, le=LONGEST_MS, allow_inf_nan=False)]
#: Seconds since the epoch, up to the year 2242
_Moment = Annotated[float, Field(ge=0, lt=2**33, allow_inf_nan=False)]


class Candidate(_Wire):
    """A candidate that is to be built or measured."""

    index: _Count
    params: str | None = None  #: params of a candidate that is to be built
    artifact: _Digest | None = None  #: SHA-256 of the compiled code in the artifact store


class Rival(_Wire):
    """The winner of one solver, in the finals of its config."""

    index: _Count  #: index of its trial in the result, which the coordinator chooses
    solver: str
    seed: int  #: seed of the solver's job, which the other fields are of too
    options: dict[str, Any] = Field(default_factory=dict)
    number: _Count  #: index of the candidate in that job
    params: str
    artifact: _Digest | None = None  #: compiled code; None: it stays on the machine that built it
    time_ms: float


class Sibling(_Wire):
    """Another search that a search learns from, or a trained predictor."""

    #: artifact with the trials, or a predictor's cost model: see `tuna.jobs.history`
    artifact: _Digest
    prior: bool = False  #: true if it is a predictor
    #: true if its times are to be expected here: same config and environment, on a quiet device
    same: bool
    label: _Name  #: name of the layer and the environment


class WorkItem(_Wire):
    """The input of one step of one job."""

    version: _Version = WIRE_VERSION
    job_id: int
    attempt: int  #: number of the attempt, a fencing token: a result of another attempt is refused
    session_id: int
    library: str
    step: str
    solver: str
    config: dict[str, Any]  #: `Config.to_json()` of the layer; `layer` is the config itself
    body: _Digest | None = None  #: artifact with the config's body; None: its kind has none
    #: artifacts of `Config.data_fields`, for a step on a device
    data: Annotated[tuple[_Digest, ...], Field(max_length=_MAX_DATA)] = ()
    target: str = ""  #: `Environment.target` of the session
    #: `Environment.conditions` of the session
    conditions: dict[str, str] = Field(default_factory=dict)
    seed: int = 0  #: seed derived from config and solver, so that a candidate can be proposed again
    options: dict[str, Any] = Field(default_factory=dict)  #: job options, such as {"candidates": 8}
    candidates: tuple[Candidate, ...] = ()  #: candidates that the steps before proposed or built
    round: int = 0  #: number of the round in its search; 0: the first, or no search
    #: artifacts with the trials of the search's earlier rounds, of the first round first, with the
    #: params alone of those that may still be measured: see `tuna.jobs.history`
    history: tuple[_Digest, ...] = ()
    #: searches that a search learns from: see `tuna.jobs.history`
    siblings: tuple[Sibling, ...] = ()
    best_ms: float | None = None  #: time of the earlier rounds' result
    best_noisy: bool = False  #: true if `best_ms` is noisy
    #: place (`Report.place`) where an attempt failed; it declines the item while there are others
    avoid: str = ""
    rivals: tuple[Rival, ...] = ()  #: winners that the finals measure again, interleaved
    known_params: str | None = None  #: best params so far, for a library that `uses_known_params`

    @cached_property
    def layer(self) -> Config:
        """The config, read once for each item; raises BadInput for one of a kind that this machine
        does not have."""
        return from_json(self.config)

    @property
    def artifacts(self) -> set[str]:
        """Digests of the artifacts that it names."""
        built = [one.artifact for one in self.candidates] + [one.artifact for one in self.rivals]
        known = [one.artifact for one in self.siblings]
        given = (self.body, *self.data, *self.history)
        return {digest for digest in (*given, *built, *known) if digest}


class Trial(_Wire):
    """One candidate as far as the step got with it. A failed one has a cause."""

    index: _Count
    #: text of the point in the solver's space, which the step that proposes sets
    params: _Long | None = None
    artifact: _Digest | None = None
    cause: Cause | None = None
    output_tail: _Output = ""
    #: time of every repeat of the measurement that counts
    times_ms: Annotated[tuple[float, ...], Field(max_length=_MAX_REPEATS)] = ()
    #: median, or for a finalist the median over fresh processes of their medians; None until
    #: measured
    time_ms: float | None = None
    #: lower end of the median's 95 % interval; for a finalist of the interval that covers those of
    #: all its processes
    low_ms: _Known = None
    high_ms: _Known = None
    clock: Annotated[str, Field(max_length=8)] = (
        ""  #: `wall`, `cpu` (the core was never quiet), or `own` (the library's)
    )
    #: true if it was far slower than the best (`repeats.HOPELESS`), so that it ran only twice and
    #: cannot become the result
    ended_early: bool = False
    #: true if it may be the result. False: another one was faster in fresh processes, or none
    #: measured it
    eligible: bool = True
    max_error: _Known = None  #: largest error relative to the reference's largest magnitude
    build_s: _Known = None
    #: milliseconds in one run by part, of a candidate that is timed in parts, such as a model by
    #: its functions
    parts: Annotated[dict[_Name, _PartMs], Field(max_length=MAX_PARTS)] = Field(
        default_factory=dict
    )


class DeviceReport(_Wire):
    """The device that a result was measured on, as the worker saw it."""

    name: _Name
    #: fp32 peak, measured beside the result
    peak_gflops: Annotated[float | None, BeforeValidator(_possible_peak)] = None
    #: method that found the peak: `probe.Probe.source`
    peak_source: Annotated[str, Field(max_length=8)] = ""


class CodeObject(_Wire):
    """Compiled code that a result needs at run time, as the library's loader asks for it."""

    artifact: _Digest  #: SHA-256 of the code in the artifact store
    #: name that the library's loader asks for; empty: exporters generate one
    name: Annotated[str, Field(max_length=1024)] = ""
    args: _Long = ""


class StepResult(_Wire):
    """The result of one attempt at a step."""

    version: _Version = WIRE_VERSION
    job_id: _Id
    attempt: _Count
    step: str
    ok: bool
    cause: Cause | None = None
    #: true if the worker's machine or device is at fault, not the job
    uncharged: bool = False
    output_tail: _Output = ""
    trials: Annotated[tuple[Trial, ...], Field(max_length=MAX_TRIALS)] = ()
    workspace_bytes: _Id = 0
    #: algorithm as the library names it; empty: the solver's family
    algorithm: Annotated[str, Field(max_length=64)] = ""
    #: code that the best trial needs at run time; None: the artifact of that trial. In a result of
    #: an earlier step: artifacts that those of its trials refer to, which then live as long
    kernels: Annotated[tuple[CodeObject, ...], Field(max_length=_MAX_KERNELS)] | None = None
    #: artifact that describes the job's problem for exporters (for tvm: the workload as JSON)
    workload: _Digest | None = None
    device: DeviceReport | None = None
    simulated: bool = False  #: true if the times come from a stand-in, not from a device
    noisy: bool = False  #: true if the device was not quiet while the best trial was measured
    #: change of the device's speed during the measurement, such as 0.03; None: not known
    drift: _Known = None
    started_at: _Moment = 0.0  #: seconds since the epoch by the worker's clock
    ended_at: _Moment = 0.0
    busy_s: _Moment = 0.0  #: seconds during which the step's resource did the job's own work

    @property
    def artifacts(self) -> set[str]:
        """Digests of the artifacts that it names."""
        built = [one.artifact for one in self.trials]
        needed = [one.artifact for one in self.kernels or ()]
        return {digest for digest in (self.workload, *built, *needed) if digest}

    def failed(self, cause: Cause, text: str, *, bare: bool = False) -> StepResult:
        """The same as a failure; `bare`: without what it found."""
        facts: dict[str, Any] = {"ok": False, "cause": cause, "output_tail": text}
        if bare:
            facts |= {"trials": (), "kernels": None, "workload": None}
        return self.model_copy(update=facts)


def of_rival(item: WorkItem, rival: Rival, step: str) -> WorkItem:
    """Return the item of `step` of the rival's own job, for its winner alone; `item` is that of the
    finals."""
    facts = {"solver": rival.solver, "seed": rival.seed, "options": rival.options}
    candidates = (Candidate(index=rival.number, artifact=rival.artifact),)
    return item.model_copy(
        update={**facts, "step": step, "candidates": candidates, "rivals": ()},
    )


def result_of(item: WorkItem, **facts: Any) -> StepResult:
    """Return the result of an attempt at `item`, a good one unless `facts` have a cause."""
    same = {name: getattr(item, name) for name in ("job_id", "attempt", "step")}
    return StepResult(**{"ok": facts.get("cause") is None, **same, **facts})


def tail(text: str) -> str:
    """The end of `text`, cut to the limit of a result."""
    return text[-TAIL_CHARS:]
