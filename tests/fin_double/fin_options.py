"""Options of the fin double, including fault injection: a JSON file named by the environment
variable TUNA_FIN_DOUBLE."""

from __future__ import annotations

from typing import Any

BACKENDS = ("both", "HIPNOGPU", "HIP")
#: Faults of a result entry. Those of times and `reason` apply to the steps that have them, the
#: others to every step.
LIES = (
    "zero_time",  # like fin: the time 0, and a reason that says so
    "negative_time",  # like fin: the time -1, the reason Success, and the explanation in `reson`
    "nan_time",  # like fin, whose JSON writer writes null for NaN
    "no_reason",  # like fin after a failure to load kernels: neither `reason` nor a result
    "reson",  # `reason` is misspelt
    "bad_md5",
    "bad_size",
    "ruined_blob",  # like fin since April 2024
    "unknown_solver",  # the entry names a solver that get_solvers does not have
)
DEFAULTS: dict[str, Any] = {
    "backend": "both",  # HIPNOGPU compiles only, HIP evaluates only; a real fin is one of them
    "gpus": 1,  # number of devices that HIP_VISIBLE_DEVICES can choose from
    # like fin of October 2024: every step of a three-dimensional convolution aborts
    "abort_3d": False,
    "sleep_s": 0.0,  # duration of each solver's compilation or evaluation
    "crash_solvers": [],  # die when one is compiled
    "crash_eval": [],  # die when one is evaluated
    "crash_configs": [],  # die in any step on a config whose find-db key contains one of these
    "crash_signal": 6,  # of these three options; 13 (SIGPIPE) is what a killed assembler causes
    "hang_solvers": [],  # hang when one is compiled
    "hang_eval": [],  # hang when one is evaluated
    "lies": {},  # solver -> one of LIES
    "truncate_output": False,  # half of the answer, exit code 0
    "empty_output": False,  # none of the answer, exit code 0
    "log_file": "",  # a line `pid step db_key` is appended for each step; `-` if there is no key
}


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """All options, with defaults; raises ValueError for an unknown one."""
    unknown = [name for name in given if name not in DEFAULTS]
    unknown += [lie for lie in given.get("lies", {}).values() if lie not in LIES]
    if unknown or given.get("backend", "both") not in BACKENDS:
        raise ValueError(f"no such options of the double of fin: {unknown or given['backend']}")
    return {**DEFAULTS, **given}
