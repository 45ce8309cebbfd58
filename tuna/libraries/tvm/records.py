"""Candidates as text and back: the params of a candidate are TVM's TuningRecord of its schedule.
Imports TVM.

The record holds the trace, which is the whole schedule: a candidate is built from its params and
the problem's module alone.
"""

from __future__ import annotations

import json
from typing import Any

from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tuna.errors import BadInput


def to_params(module: Any, target: Any, schedule: Schedule) -> str:
    """The params of a schedule of `module`; the same text in every process."""
    arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
    record = ms.database.TuningRecord(
        schedule.trace, ms.database.Workload(module), None, target, arguments
    )
    return to_text(record.as_json())


def schedule_of(module: Any, params: str) -> Schedule:
    """The schedule with these params; raises BadInput for a text that is no record of a schedule of
    `module`."""
    try:
        record = ms.database.TuningRecord.from_json(
            json.loads(params), ms.database.Workload(module)
        )
        schedule = Schedule(module)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
    except Exception as error:  # TVM's reader and its primitives have many ways to fail
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
        raise BadInput(f"The params are no schedule of this problem: {reason}") from error
    return schedule


def to_text(value: Any) -> str:
    """TVM's containers and numbers as JSON."""
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: Any) -> Any:
    """TVM's containers and numbers as Python's."""
    if value is None or isinstance(value, bool | float | int):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return int(value)
