"""How the double of fin can be told to misbehave: a JSON file that the environment variable TUNA_FIN_DOUBLE names."""

from __future__ import annotations

from typing import Any

BACKENDS = ("both", "HIPNOGPU", "HIP")
#: What an entry of a result can lie about. The times and `reason` in the step that has them, the rest in every step.
LIES = (
    "zero_time",  # as fin: the time 0, and a reason that says so
    "negative_time",  # as fin: the time -1, the reason Success, and the explanation in `reson`
    "nan_time",  # as fin, whose JSON writer has null for it
    "no_reason",  # as fin after a failure to load kernels: neither `reason` nor a result
    "reson",  # `reason` is misspelt
    "bad_md5",
    "bad_size",
    "ruined_blob",  # as fin since April 2024
    "unknown_solver",  # the entry names a solver that get_solvers does not have
)
DEFAULTS: dict[str, Any] = {
    "backend": "both",  # HIPNOGPU compiles only, HIP evaluates only, a real fin is one of them
    "gpus": 1,  # number of devices that HIP_VISIBLE_DEVICES can choose from
    "abort_3d": False,  # as fin of October 2024: every step of a three-dimensional convolution aborts
    "sleep_s": 0.0,  # for each solver that is compiled or evaluated
    "crash_solvers": [],  # die when one is compiled
    "crash_eval": [],  # die when one is evaluated
    "crash_configs": [],  # die in any step on a config whose find-db key contains one of these
    "crash_signal": 6,  # of these three; 13 is what an assembler that died leaves behind
    "hang_solvers": [],  # never end when one is compiled
    "hang_eval": [],  # never end when one is evaluated
    "lies": {},  # by solver
    "truncate_output": False,  # half of the answer, exit code 0
    "empty_output": False,  # none of the answer, exit code 0
    "log_file": "",  # gets a line `pid step db_key` for each step; the key is - where there is none
}


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """All options; raises ValueError for one that there is not."""
    unknown = [name for name in given if name not in DEFAULTS]
    unknown += [lie for lie in given.get("lies", {}).values() if lie not in LIES]
    if unknown or given.get("backend", "both") not in BACKENDS:
        raise ValueError(f"no such options of the double of fin: {unknown or given['backend']}")
    return {**DEFAULTS, **given}
