"""The steps of fin's protocol for one job, simulated with tables and hashes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import fin_kernels, fin_params, fin_problem, fin_solvers
from .fin_cache import CacheFolder, hang
from .fin_problem import FinError
from .fin_solvers import Solver

Entry = dict[str, Any]
_ALGORITHMS = {"F": "Fwd", "B": "BwdData", "W": "BwdWeights"}
_BUFFER_STEPS = ("alloc_buf", "fill_buf", "copy_buf_to_device", "copy_buf_from_device")
_NOT_DOUBLED = ("perf_db_test", "chk_pre_compiled_kernels")


class Crash(FinError):
    """An injected crash."""


class Job:
    """One job of the input file; `run` gives its answer."""

    def __init__(self, job: dict[str, Any], options: dict[str, Any], cache: CacheFolder) -> None:
        self._job, self._options, self._cache = job, options, cache
        self._output: dict[str, Any] = {}
        self._has_buffers = False
        self._problem: fin_problem.Problem | None = None
        self._is_batch_norm = False
        self._applicable: list[str] | None = None
        if "config" not in job:
            return
        config = job["config"]
        command = fin_problem.word(config, "cmd")
        self._is_batch_norm = command in fin_problem.BATCH_NORM_COMMANDS
        if not self._is_batch_norm and command not in fin_problem.COMMANDS:
            raise FinError(f"Invalid operation: {command}")
        self._device = fin_problem.device_of(job)
        if self._is_batch_norm:
            fin_problem.check_batch_norm(config)
        else:
            self._problem = fin_problem.Problem(config)

    def run(self) -> dict[str, Any]:
        """All steps, in order."""
        for step in self._job["steps"]:
            if not isinstance(step, str):
                raise FinError("[json.exception.type_error.302] type must be string")
            self._crash_on_config()
            self._step(step)
        # fin looks keys up with operator[], which inserts missing ones into its copy of the job:
        # they are echoed as null.
        echo = {key: self._job.get(key) for key in ("config_tuna_id", "arch", "direction")}
        return {**self._output, **echo, "input": {**echo, **self._job}}

    def _crash_on_config(self) -> None:
        key = self._problem.db_key() if self._problem else "-"
        if any(part in key for part in self._options["crash_configs"]):
            raise Crash(f"injected crash on {key}")

    def _step(self, step: str) -> None:
        if step == "get_solvers":
            self._output["all_solvers"] = [solver.answer() for solver in fin_solvers.SOLVERS]
        elif step == "applicability":
            self._output["applicable_solvers"] = self._applicable_names()
        elif step in _BUFFER_STEPS:
            self._need_device()
            self._has_buffers = True
        elif step in ("miopen_find_compile", "miopen_perf_compile"):
            self._compile(step.split("_")[1])
        elif step in ("miopen_find_eval", "miopen_perf_eval"):
            self._need_device()
            if not self._has_buffers:
                raise FinError(
                    "Memory access fault by GPU node-1: the job has no step alloc_buf before"
                )
            self._evaluate(step.split("_")[1])
        elif step in _NOT_DOUBLED:
            raise FinError(f"the double of fin has no {step}")

    def _need_device(self) -> None:
        visible = os.environ.get("HIP_VISIBLE_DEVICES")
        gpus = self._options["gpus"]
        first = "0" if visible is None else visible.split(",")[0].strip()
        if not (first.isdigit() and int(first) < gpus):
            raise FinError(f"hipErrorNoDevice: HIP_VISIBLE_DEVICES={visible} and {gpus} devices")

    def _convolution(self) -> fin_problem.Problem:
        if self._is_batch_norm:
            raise FinError("batch norm problems do not exist in fin of October 2024")
        if self._problem is None:
            raise FinError("[json.exception.type_error.302] type must be string, but is null")
        return self._problem

    def _applicable_names(self) -> list[str]:
        if self._applicable is None:
            config = self._job.get("config", {})
            if self._is_batch_norm:
                self._applicable = fin_solvers.applicable_batch_norm(
                    config, self._job.get("direction")
                )
            else:
                problem = self._convolution()
                found = _recorded(config, self._device)
                self._applicable = (
                    fin_solvers.applicable(problem, self._device) if found is None else found
                )
        return self._applicable

    def _describe(self) -> fin_problem.Problem:
        problem = self._convolution()
        self._output["is_winograd_only"] = fin_solvers.is_winograd_only(
            problem, self._applicable_names()
        )
        self._output["network_config"] = problem.network_config()
        self._output["db_key"] = problem.db_key()
        return problem

    def _each(
        self, names: list[str], flag: str, work: Callable[[Solver, Entry, int], bool]
    ) -> list[Entry]:
        """The entries of a result; `work` fills one in and returns True if it succeeded."""
        results = []
        for index, name in enumerate(names):
            sys.stderr.write(f"Processing Solver: {name}\n")
            entry: Entry = {"solver_name": name}
            solver = fin_solvers.BY_NAME.get(name)
            if solver is None or solver.kind != "convolution":
                entry |= {"reason": "Empty Solver", flag: False}
            else:
                self._cache.wipe()
                entry["algorithm"] = (
                    f"miopenConvolution{_ALGORITHMS[self._convolution().direction]}Algo{solver.algorithm}"
                )
                if name not in self._applicable_names():
                    entry |= {"reason": "Not Applicable", flag: False}
                else:
                    entry[flag] = self._one(work, solver, entry, index)
            results.append(entry)
        return results

    def _one(
        self, work: Callable[[Solver, Entry, int], bool], solver: Solver, entry: Entry, index: int
    ) -> bool:
        done = work(solver, entry, index)
        self._cache.check()
        self._lie(solver.name, entry)
        return done and self._options["lies"].get(solver.name) != "no_reason"

    def _misbehave(self, solver: Solver, crash: str) -> None:
        if solver.name in self._options[crash]:
            raise Crash(f"injected crash on {solver.name}")
        time.sleep(self._options["sleep_s"])

    def _compile_may_hang(self, solver: Solver) -> None:
        self._misbehave(solver, "crash_solvers")
        if solver.name in self._options["hang_solvers"]:
            sys.stderr.flush()
            hang()

    def _lie(self, name: str, entry: Entry) -> None:
        lie = self._options["lies"].get(name)
        if lie == "nan_time" and "time" in entry:
            entry["time"] = None
        elif lie == "no_reason":
            for key in entry.keys() - {"solver_name", "algorithm"}:
                del entry[key]
        for kernel in entry.get("kernel_objects", []) if lie == "bad_md5" else ():
            kernel["md5_sum"] = kernel["md5_sum"][::-1]

    def _params(self, solver: Solver) -> str:
        """The params of the system perf db if they are valid, else the default."""
        problem = self._convolution()
        found = (
            _system_params(self._device, problem.perf_key(), solver.name)
            if solver.tunable
            else None
        )
        if found in fin_params.perf_configs(solver, problem, self._device) and found is not None:
            return found
        if found is not None:
            sys.stderr.write(f"Invalid config loaded from Perf Db: {solver.name}: {found}\n")
        return fin_kernels.default_params(solver, problem, self._device)

    def _kernels(self, solver: Solver, params: str) -> list[fin_kernels.KernelObject]:
        return fin_kernels.kernel_objects(solver, self._convolution(), self._device, params)

    def _compile(self, form: str) -> None:
        self._describe()
        names = self._job.get("solvers", [solver.name for solver in fin_solvers.CONVOLUTION])
        work = self._compile_found if form == "find" else self._compile_all
        self._output[f"miopen_{form}_compile_result"] = self._each(names, f"{form}_compiled", work)

    def _compile_found(self, solver: Solver, entry: Entry, _: int) -> bool:
        if self._job.get("dynamic_only") and not solver.dynamic:
            entry["reason"] = "Not Dynamic"
            return False
        self._compile_may_hang(solver)
        params = self._params(solver)
        workspace = fin_kernels.workspace_bytes(solver, self._convolution(), params)
        entry |= {
            "params": params,
            "workspace": workspace,
            "tunable": solver.tunable,
            "reason": "Success",
        }
        entry["kernel_objects"] = self._kernels(solver, params)
        return True

    def _compile_all(self, solver: Solver, entry: Entry, _: int) -> bool:
        if self._job.get("dynamic_only") and not solver.dynamic:
            entry["reason"] = "Not Dynamic"
            return False
        self._compile_may_hang(solver)
        configs = fin_params.perf_configs(solver, self._convolution(), self._device)
        kernels = [kernel for params in configs for kernel in self._kernels(solver, params)]
        entry |= {"tunable": solver.tunable, "reason": "Success", "kernel_objects": kernels}
        return True

    def _evaluate(self, form: str) -> None:
        self._describe()
        sent = self._job[f"miopen_{form}_compile_result"]
        names = [fin_problem.word(entry, "solver_name") for entry in sent]
        tuned: list[str] = []

        def work(solver: Solver, entry: Entry, index: int) -> bool:
            return self._evaluate_one(form, solver, entry, sent[index]["kernel_objects"], tuned)

        self._output[f"miopen_{form}_eval_result"] = self._each(names, "evaluated", work)

    def _evaluate_one(
        self, form: str, solver: Solver, entry: Entry, sent: list[Entry], tuned: list[str]
    ) -> bool:
        problem = self._convolution()
        if self._job.get("dynamic_only") and not solver.dynamic:
            entry["reason"] = "Not Dynamic"
            return False
        if not all(map(fin_kernels.is_whole, sent)):
            sys.stderr.write("Corrupt Binary Object\n")
            return False
        if form == "perf" and solver.tunable:
            tuned.append(solver.name)
            if len(tuned) > 1:
                entry["reason"] = "Invoker not implemented"
                return False
        self._misbehave(solver, "crash_eval")
        before = self._params(solver)
        # Kernels and workspace are those from before tuning, as in fin's answer.
        params = fin_kernels.fastest(solver, problem, self._device) if form == "perf" else before
        entry |= {
            "tunable": solver.tunable,
            "params": params,
            "workspace": fin_kernels.workspace_bytes(solver, problem, before),
            "time": fin_kernels.time_ms(solver, problem, params),
            "layout": problem.sides()[2][0],
            "data_type": problem.data_type_number,
            "direction": "FBW".index(problem.direction),
            "bias": 0,
            "kernel_objects": self._kernels(solver, before),
            "reason": "Success",
        }
        return True


def _recorded(config: dict[str, Any], device: fin_problem.Device) -> list[str] | None:
    """A real fin's answer for this problem, if the directory TUNA_FIN_RECORDINGS has one."""
    folder = os.environ.get("TUNA_FIN_RECORDINGS")
    if not folder:
        return None
    path = Path(folder, f"real_applicability_{device.arch}_{device.num_cu}.jsonl.gz")
    return _recordings(path).get(fin_problem.read_fields(config))


_loaded: dict[Path, dict[tuple[Any, ...], list[str]]] = {}


def _recordings(path: Path) -> dict[tuple[Any, ...], list[str]]:
    if path not in _loaded:
        _loaded[path] = {}
        if path.exists():
            import gzip

            with gzip.open(path, "rt") as lines:
                for line in lines:
                    answer = json.loads(line)
                    fields = fin_problem.read_fields(answer["input"]["config"])
                    _loaded[path][fields] = answer["applicable_solvers"]
    return _loaded[path]


def _system_params(device: fin_problem.Device, key: str, solver: str) -> str | None:
    """A solver's params in the text perf db of MIOPEN_SYSTEM_DB_PATH."""
    folder = os.environ.get("MIOPEN_SYSTEM_DB_PATH")
    path = Path(folder or "", f"{device.basename}.db.txt")
    if not (folder and path.exists()):
        return None
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            name, _, items = line.rstrip("\n").partition("=")
            if name == key:
                pairs = (item.partition(":") for item in items.split(";"))
                return next((params for found, _, params in pairs if found == solver), None)
    return None
