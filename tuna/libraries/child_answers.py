"""Checks the answers of a `CandidateLibrary`'s children where they arrive: what a child says may be
a candidate's word.

A wrong answer is a crash of that child (`sandbox.processes.Child.call`), never an exception in the
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

#: Milliseconds that a clock can tell: at least a nanosecond, at most the largest
#: `measure_timeout_s`.
_Ms = Annotated[float, Field(ge=1e-6, le=86_400e3, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, le=86_400 * 30, allow_inf_nan=False)]
#: More than any device has: 1e9 is an exaflop per second.
_Gflops = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Extent = Annotated[int, Field(ge=0, lt=2**40)]
_Name = Annotated[str, Field(max_length=32)]
_Params = Annotated[str, Field(max_length=1 << 20)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Nothing(_Answer):
    pass


class _Probe(_Answer):
    """JSON form of `probe.Probe`."""

    gflops: _Gflops
    source: Literal["fma", "gemm", "own", "device"]
    copy_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)]


class _Timing(_Answer):
    """JSON form of `repeats.Timing`."""

    times_ms: Annotated[list[_Ms], Field(min_length=1, max_length=1_000_000)]
    time_ms: _Ms
    low_ms: _Ms
    high_ms: _Ms
    clock: Literal["wall", "cpu", "own"]
    noisy: bool

    @model_validator(mode="after")
    def _in_order(self) -> _Timing:
        if (
            not min(self.times_ms)
            <= self.low_ms
            <= self.time_ms
            <= self.high_ms
            <= max(self.times_ms)
        ):
            raise ValueError(
                "the median lies outside of its interval, or that outside of the times"
            )
        return self


class _Measured(_Answer):
    error: _Share | None
    tolerance: _Share
    timing: _Timing | None
    ended_early: bool = False

    @model_validator(mode="after")
    def _is_right(self) -> _Measured:
        if self.timing is not None and (self.error is None or self.error > self.tolerance):
            raise ValueError("a wrong answer was timed")
        return self


class _Inputs(_Answer):
    arrays: list[Annotated[list[list[_Extent] | _Name], Field(min_length=2, max_length=2)]]


class _Timings(_Answer):
    timings: list[_Timing]


class _Proposed(_Answer):
    params: Annotated[list[_Params], Field(max_length=100_000)]


class _Described(_Answer):
    bytes: Annotated[int, Field(ge=0)]


class _Built(_Answer):
    seconds: _Seconds


_ANSWERS: Mapping[str, TypeAdapter[Any]] = {
    "prepare": TypeAdapter(_Nothing),
    "probe": TypeAdapter(_Probe | _Nothing),
    "measure": TypeAdapter(_Measured),
    "save_inputs": TypeAdapter(_Inputs),
    "again": TypeAdapter(_Timings),
    "propose": TypeAdapter(_Proposed),
    "search": TypeAdapter(_Proposed),
    "workload": TypeAdapter(_Described),
    "build": TypeAdapter(_Built),
}


def answer_to(request: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """The check of an answer to a request: it returns the answer, or raises ValueError."""
    kind = _ANSWERS[request["op"]]

    def check(answer: Any) -> dict[str, Any]:
        found: _Answer = kind.validate_python(answer)
        if isinstance(found, _Timings) and len(found.timings) != len(request["jobs"]):
            raise ValueError("not one timing for each candidate")
        return found.model_dump()

    return check
