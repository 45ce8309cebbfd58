"""Questions to fin and its answers: the jobs of its input file, with fin's names of fields,
and its output, of which every invalid part becomes a failure with a cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuna.configs import BatchNormConfig, Config, ConvConfig, batch_norm, problem
from tuna.configs.conv import COMMANDS, FORW
from tuna.errors import BadInput
from tuna.libraries.base import Solver
from tuna.libraries.context import ArtifactStore
from tuna.libraries.miopen import kernel_objects
from tuna.libraries.miopen.fin import FinFailed, finite
from tuna.libraries.results import is_time
from tuna.vocabulary import Cause, canonical_name

Job = dict[str, Any]

#: Fields of a convolution with equal names in fin and Tuna; only the filter's layout differs
#: (`wei_layout`)
_CONV = (
    *("spatial_dim", "batchsize", "in_channels", "in_h", "in_w", "in_d"),
    *("out_channels", "fil_h", "fil_w", "fil_d"),
    *("pad_h", "pad_w", "pad_d", "conv_stride_h", "conv_stride_w", "conv_stride_d"),
    *("dilation_h", "dilation_w", "dilation_d", "group_count", "mode", "pad_mode"),
    *("trans_output_pad_h", "trans_output_pad_w", "trans_output_pad_d"),
)
_BATCH_NORM = (
    *("batchsize", "in_channels", "in_d", "in_h", "in_w"),
    *("mode", "run", "save", "alpha", "beta"),
)
EVAL_PREPARATION = ("alloc_buf", "fill_buf")
#: Tuna's config kind by fin's problem type
_KINDS = {"convolution": "convolution", "batch_norm": "batch_norm"}
_SUCCESS = "Success"
#: Limits of the database's columns: characters of algorithm and params; largest workspace in bytes
_MAX_ALGORITHM, _MAX_PARAMS, _MAX_BYTES = 64, 1 << 20, 2**63 - 1
_MAX_SOLVER_NUMBER = 2**31 - 1


def target_id(arch: str) -> str:
    """The target ID for fin's compile and eval steps: the architecture with the features that
    MITuna adds."""
    if arch == "gfx900":
        return "gfx900:xnack-"
    return arch if arch.startswith("gfx1") else f"{arch}:sram-ecc+:xnack-"


def config_fields(config: ConvConfig | BatchNormConfig) -> dict[str, Any]:
    """A config in fin's format."""
    if isinstance(config, ConvConfig):
        return {
            "cmd": COMMANDS[config.data_type],
            **{name: getattr(config, name) for name in _CONV},
            "direction": config.direction.value,
            "in_layout": config.in_layout,
            "wei_layout": config.fil_layout,
            "out_layout": config.out_layout,
        }
    bits = FORW[config.direction]
    return {
        "cmd": batch_norm.COMMANDS[config.data_type],
        **{name: getattr(config, name) for name in _BATCH_NORM},
        "forw": bits & 3,
        "back": bits >> 2,
        "direction": config.direction.value,
        "in_layout": config.layout,
        "out_layout": config.layout,
    }


def applicability(
    configs: Iterable[ConvConfig | BatchNormConfig], arch: str, num_cu: int
) -> list[Job]:
    """Jobs that ask which solvers can run each config; `config_tuna_id` is the index of the config,
    from 0."""
    return [
        {
            "steps": ["applicability"],
            "arch": arch,
            "num_cu": num_cu,
            "config_tuna_id": number,
            "config": config_fields(config),
            "direction": FORW[config.direction],
        }
        for number, config in enumerate(configs)
    ]


def job(
    step: str,
    config: ConvConfig | BatchNormConfig,
    arch: str,
    num_cu: int,
    solvers: Sequence[str],
    compiled: Sequence[Mapping[str, Any]] = (),
) -> Job:
    """The job for a compile or an eval step of one config with these solvers.

    `compiled` is the matching compile step's answer, which an eval step needs. Raises BadInput for
    an unknown step.
    """
    request: Job = {
        "steps": [step],
        "arch": target_id(arch),
        "num_cu": num_cu,
        "config_tuna_id": 0,
        "direction": FORW[config.direction],
        "dynamic_only": False,
        "config": config_fields(config),
        "solvers": list(solvers),
    }
    if step.endswith("_eval"):
        request["steps"] = [*EVAL_PREPARATION, step]
        request[result_key(step.removesuffix("_eval") + "_compile")] = list(compiled)
    elif not step.endswith("_compile"):
        raise BadInput(f"fin has no step {step!r} for a config.")
    return request


def result_key(step: str) -> str:
    """The field of fin's answer that holds a step's result."""
    return f"{step}_result"


def algorithm_family(solver: str) -> str:
    """Direct, GEMM, Winograd, ImplicitGEMM or FFT, derived from the solver's name, because fin's
    list lacks it.

    Checked against the 104 solvers of MIOpen 3.3.
    """
    if solver == "fft":
        return "FFT"
    low = solver.lower()
    if "implicitgemm" in low or "igemm" in low or "Ck" in solver:
        return "ImplicitGEMM"
    if low.startswith("gemm"):
        return "GEMM"
    return "Winograd" if "wino" in low else "Direct"


class BadAnswer(Exception):
    """fin's answer for a solver is not a valid result; `cause` says why."""

    def __init__(self, cause: Cause, text: str) -> None:
        super().__init__(text)
        self.cause = cause


@dataclass(frozen=True)
class SolverMeasurement:
    """A solver's measurement."""

    algorithm: str
    params: str
    time_ms: float
    workspace: int


def cause_of(error: FinFailed, step: str) -> Cause:
    """The cause of a failed call: the solver's fault, except for a corrupt answer of a fin that
    exited normally (infra)."""
    if error.garbled:
        return Cause.INFRA
    building = step.endswith("_compile")
    if error.timed_out:
        return Cause.BUILD_TIMEOUT if building else Cause.RUN_TIMEOUT
    return Cause.BUILD_ERROR if building else Cause.RUN_ERROR


def solvers(answer: Mapping[str, Any]) -> list[Solver]:
    """The solvers of a get_solvers answer, whose values are all strings; raises FinFailed."""
    rows = answer.get("all_solvers")
    if not isinstance(rows, list) or not rows:
        raise FinFailed("fin's answer lacks all_solvers", "", garbled=True)
    try:
        return [
            Solver(
                name=canonical_name(str(row["name"])),
                kinds=(_KINDS[row["type"]],),
                algorithm=algorithm_family(str(row["name"]))
                if row["type"] == "convolution"
                else "",
                tunable=str(row["tunable"]) == "1",
                dynamic=str(row["dynamic"]) == "1",
                number=_number(row["id"]),
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise FinFailed(f"fin lists an invalid solver: {error!r}", "", garbled=True) from None


def _number(text: object) -> int:
    number = int(str(text))
    if not 0 <= number <= _MAX_SOLVER_NUMBER:
        raise ValueError(f"{number} is not a solver id")
    return number


def applicable(answers: Sequence[Mapping[str, Any]], count: int) -> list[list[str]]:
    """The solver names of each config, in the order of the configs; raises FinFailed."""
    found: dict[int, list[str]] = {}
    for answer in answers:
        number, listed = answer.get("config_tuna_id"), answer.get("applicable_solvers")
        if type(number) is not int or not isinstance(listed, list):
            raise FinFailed(
                "an answer lacks config_tuna_id or applicable_solvers", "", garbled=True
            )
        found[number] = [canonical_name(str(name)) for name in listed]
    if found.keys() != set(range(count)):
        raise FinFailed(f"fin answered for {len(found)} of {count} configs", "", garbled=True)
    return [found[number] for number in range(count)]


def check_problem(answer: Mapping[str, Any], config: Config) -> None:
    """Raise BadAnswer if fin's problem key is another than the config's, where Tuna knows that."""
    theirs, ours = answer.get("db_key"), problem.text_of(config)
    if isinstance(theirs, str) and theirs and ours is not None and theirs != ours:
        raise BadAnswer(Cause.INFRA, f"fin answered for the problem {theirs:.255}, not for {ours}")


def compiled(
    answer: Mapping[str, Any],
    step: str,
    solver: str,
    known_params: str | None,
    artifacts: ArtifactStore,
) -> kernel_objects.Compiled:
    """The output of a compile step for `solver`, its kernels verified and stored as artifacts;
    raises BadAnswer."""
    entry = _entry(answer, step, solver, Cause.BUILD_ERROR)
    flag = "find_compiled" if step == "miopen_find_compile" else "perf_compiled"
    reason = entry.get("reason")
    if entry.get(flag) is not True or reason != _SUCCESS:
        raise BadAnswer(*_failure_reason(entry, reason, Cause.BUILD_ERROR))
    objects = entry.get("kernel_objects")
    if not isinstance(objects, list):
        raise BadAnswer(Cause.BUILD_ERROR, "fin's answer lacks kernel_objects")
    try:
        stored = kernel_objects.store(objects, artifacts)
    except kernel_objects.BadKernel as error:
        raise BadAnswer(Cause.BUILD_ERROR, str(error)) from None
    params = entry.get("params", "")
    return kernel_objects.Compiled(
        solver=solver,
        algorithm=_algorithm(entry, Cause.BUILD_ERROR),
        workspace=_workspace(entry),
        params=params if isinstance(params, str) else "",
        tunable=entry.get("tunable") is not False,  # true unless fin says otherwise
        known_params=known_params,
        kernels=stored,
    )


def measured(answer: Mapping[str, Any], step: str, solver: str) -> SolverMeasurement:
    """A solver's measurement; raises BadAnswer unless it holds a time that a run can take."""
    found = _entry(answer, step, solver, Cause.RUN_ERROR)
    reason, time_ms = found.get("reason"), finite(found.get("time"))
    if "reson" in found:  # misspelt by fin, for a negative time
        raise BadAnswer(Cause.RUN_ERROR, f"{found['reson']} (time {found.get('time')!r})")
    if found.get("evaluated") is not True or reason != _SUCCESS:
        raise BadAnswer(*_failure_reason(found, reason, Cause.RUN_ERROR))
    if time_ms is None or not is_time(time_ms):
        raise BadAnswer(Cause.RUN_ERROR, f"impossible time: {found.get('time')!r} ms")
    params = found.get("params", "")
    if not isinstance(params, str) or len(params) > _MAX_PARAMS:
        raise BadAnswer(Cause.RUN_ERROR, f"impossible params: {params!r:.200}")
    return SolverMeasurement(_algorithm(found, Cause.RUN_ERROR), params, time_ms, _workspace(found))


def _entry(answer: Mapping[str, Any], step: str, solver: str, cause: Cause) -> Mapping[str, Any]:
    """The entry of `solver` in a step's answer. Old versions of fin use the field `solver_id` in
    compile steps."""
    found = answer.get(result_key(step))
    if not isinstance(found, list):
        raise BadAnswer(cause, f"fin's answer lacks {result_key(step)}")
    for entry in found:
        if isinstance(entry, dict):
            name = entry.get("solver_name", entry.get("solver_id"))
            if isinstance(name, str) and canonical_name(name) == solver:
                return entry
    raise BadAnswer(cause, f"fin's answer has no entry for {solver}")


def _failure_reason(found: Mapping[str, Any], reason: object, cause: Cause) -> tuple[Cause, str]:
    if reason == "Not Applicable":
        return Cause.NOT_APPLICABLE, "fin says that the solver is not applicable"
    if not isinstance(reason, str):
        return cause, "fin gave no result and no reason"
    return cause, reason if reason != _SUCCESS else "fin says Success and gives no result"


def _algorithm(found: Mapping[str, Any], cause: Cause) -> str:
    name = str(found.get("algorithm", ""))
    if len(name) > _MAX_ALGORITHM:
        raise BadAnswer(cause, f"impossible algorithm: {name:.200}")
    return name


def _workspace(found: Mapping[str, Any]) -> int:
    value = found.get("workspace", 0)
    return value if type(value) is int and 0 <= value <= _MAX_BYTES else 0
