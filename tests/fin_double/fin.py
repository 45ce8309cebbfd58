"""A test double of AMD's `fin`: it implements fin's protocol with simulated kernels and times.

    python -S -E tests/fin_double -i input.json -o output.json

It replaces the fin of MIOpen 3.3.0 on machines without ROCm. It imports only the standard library
and its sibling modules `fin_*`, so that it starts quickly and works in any environment. Equal
inputs give byte-equal outputs, except for `process_env`. Environment variables:

TUNA_FIN_DOUBLE: a JSON file with options, listed in fin_options.py, including fault injection.
TUNA_FIN_RECORDINGS: a directory with answers of a real fin, `real_applicability_<arch>_<compute
units>.jsonl.gz`. MIOPEN_SYSTEM_DB_PATH: the directory of the text perf db `<basename>.db.txt` with
tuned params. MIOPEN_CUSTOM_CACHE_DIR: the kernel cache, wiped before every solver; the double
aborts if it is shared or removed. HIP_VISIBLE_DEVICES: must name one of the `gpus` for steps that
need a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from . import fin_options
from .fin_cache import CacheFolder
from .fin_problem import FinError
from .fin_steps import Crash, Job

_USAGE = (
    "Usage: ./fin *input_json *output_json\n\nSupported arguments:\n-i *input_json\n-o"
    " *output_json\n\n"
)


def main(arguments: list[str]) -> int:
    """Run like fin; returns the exit code, or dies by a signal."""
    sys.stderr.write(
        "This is Tuna's test double of fin, not fin: nothing is compiled or measured.\n"
    )
    if {"-h", "-help", "--help"} & set(arguments):
        sys.stdout.write(_USAGE)
        return 0
    if len(arguments) != 4:
        sys.stderr.write("Invalid arguments\n")
        sys.stdout.write(_USAGE)
        return 0
    paths = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    source, target = paths.get("-i", ""), paths.get("-o", "")
    if "-i" in paths and not Path(source).exists():
        sys.stderr.write(f"File: {source} does not exist\n")
        return 255
    options = dict(fin_options.DEFAULTS)
    try:
        options = _options()
        with open(source, "rb") as file:
            given = file.read()
        with open(target, "w", encoding="utf-8") as output:
            output.write(_answer(given, options))
    except Crash as crash:
        _die(str(crash), options["crash_signal"])
    except Exception as error:
        _die(f"{type(error).__name__}: {error}", signal.SIGABRT)
    return 0


def _options() -> dict[str, Any]:
    path = os.environ.get("TUNA_FIN_DOUBLE")
    if not path:
        return fin_options.checked({})
    with open(path, encoding="utf-8") as file:
        return fin_options.checked(json.load(file))


def _answer(given: bytes, options: dict[str, Any]) -> str:
    jobs = json.loads(given)
    if not isinstance(jobs, list):
        raise FinError("the input is not an array of jobs")
    cache = CacheFolder()
    environment = [f"{key}={value}" for key, value in os.environ.items()]
    answers = [{"process_env": environment}, *(Job(job, options, cache).run() for job in jobs)]
    text = json.dumps(answers, indent=4, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    if options["empty_output"]:
        return ""
    return text[: len(text) // 2] if options["truncate_output"] else text


def _die(message: str, signal_number: int) -> NoReturn:
    """Terminate like a process with an uncaught C++ exception: by a signal; without a core file."""
    import resource

    sys.stderr.write(
        "terminate called after throwing an instance of 'std::runtime_error'\n  what(): "
        f" {message}\n"
    )
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal_number, signal.SIG_DFL)
    os.kill(os.getpid(), signal_number)
    raise SystemExit(128 + signal_number)
