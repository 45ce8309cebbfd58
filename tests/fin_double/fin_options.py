"""Options of the fin double, including fault injection: a JSON file named by the environment
variable TUNA_FIN_DOUBLE."""

from __future__ import annotations

from typing import Any

#: Faults of a result entry.
LIES = (
    "nan_time",  # like fin, whose JSON writer writes null for NaN
    "no_reason",  # like fin after a failure to load kernels: neither `reason` nor a result
    "bad_md5",
)
DEFAULTS: dict[str, Any] = {
    "gpus": 1,  # number of devices that HIP_VISIBLE_DEVICES can choose from
    "sleep_s": 0.0,  # duration of each solver's compilation or evaluation
    "crash_solvers": [],  # die when one is compiled
    "crash_eval": [],  # die when one is evaluated
    "crash_configs": [],  # die in any step on a config whose find-db key contains one of these
    "crash_signal": 6,  # of these three options; 13 (SIGPIPE) is what a killed assembler causes
    "hang_solvers": [],  # hang when one is compiled
    "lies": {},  # solver -> one of LIES
    "truncate_output": False,  # half of the answer, exit code 0
    "empty_output": False,  # none of the answer, exit code 0
}


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """All options, with defaults; raises ValueError for an unknown one."""
    unknown = [name for name in given if name not in DEFAULTS]
    unknown += [lie for lie in given.get("lies", {}).values() if lie not in LIES]
    if unknown:
        raise ValueError(f"no such options of the double of fin: {unknown}")
    return {**DEFAULTS, **given}
