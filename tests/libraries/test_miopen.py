"""The miopen library with the double of fin: what it gets, what it does when fin dies or lies."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from settings_changes import change_setting

from tuna.artifacts.store import Artifacts
from tuna.configs import ConvConfig, parse_line
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.context import RunContext
from tuna.libraries.items import Candidate, StepResult, WorkItem
from tuna.libraries.miopen import environment, kernel_objects
from tuna.libraries.miopen.library import MiopenLibrary
from tuna.libraries.steps import command_line, find_step
from tuna.settings import get_settings
from tuna.vocabulary import Cause

Rocm = Callable[..., Path]
FORWARD = "MIOpenDriver conv -n 16 -c 64 -H 28 -W 28 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1"
TUNABLE, FIXED, WINOGRAD = "ConvAsm3x3U", "ConvDirectNaiveConvFwd", "ConvBinWinogradRxSf3x2"


def layer(text: str = FORWARD) -> ConvConfig:
    config = parse_line(text)[0]
    assert isinstance(config, ConvConfig)
    return config


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    (tmp_path / "scratch").mkdir()
    store = Artifacts((tmp_path / "artifacts").as_uri(), tmp_path / "cache")
    return RunContext(artifacts=store, scratch=tmp_path / "scratch", cpus=())


def items(step: str, solvers: Sequence[str], **facts: Any) -> list[WorkItem]:
    return [
        WorkItem(
            job_id=number,
            attempt=1,
            session_id=1,
            library="miopen",
            step=step,
            solver=solver,
            config=layer().to_json(),
            target="gfx908 120",
            **facts,
        )
        for number, solver in enumerate(solvers)
    ]


def compiled(
    context: RunContext, solvers: Sequence[str], kind: str = "find", **facts: Any
) -> list[StepResult]:
    library, step = MiopenLibrary(), f"miopen_{kind}_compile"
    return list(library.run(find_step(library, step), items(step, solvers, **facts), context))


def measured(
    context: RunContext,
    solvers: Sequence[str],
    made: Sequence[StepResult],
    kind: str = "find",
    **facts: Any,
) -> list[StepResult]:
    library, step = MiopenLibrary(), f"miopen_{kind}_eval"
    work = [
        item.model_copy(
            update={
                "candidates": tuple(
                    Candidate(index=t.index, artifact=t.artifact) for t in result.trials
                )
            }
        )
        for item, result in zip(items(step, solvers, **facts), made, strict=True)
    ]
    return list(library.run(find_step(library, step), work, context))


def test_both_steps_of_a_few_solvers(rocm: Rocm, context: RunContext) -> None:
    rocm()
    solvers = [TUNABLE, FIXED, WINOGRAD, "GemmFwdRest"]
    made = compiled(context, solvers)
    assert [result.ok for result in made] == [True] * 4
    found = measured(context, solvers, made)
    assert [result.ok for result in found] == [True] * 4
    for result in found:
        assert result.trials[0].time_ms
        assert result.kernels is not None
        assert bool(result.kernels) == (not result.algorithm.endswith("GEMM"))
        assert "GPU 0" in (result.device.name if result.device else "")
    assert list(context.scratch.iterdir()) == []


def test_a_solver_that_kills_fin_loses_nothing_but_itself(rocm: Rocm, context: RunContext) -> None:
    rocm(options={"crash_solvers": [TUNABLE], "crash_signal": 11})
    made = compiled(context, [TUNABLE, FIXED, WINOGRAD])
    assert [(result.ok, result.cause) for result in made] == [
        (False, Cause.BUILD_ERROR),
        (True, None),
        (True, None),
    ]
    assert "no answer" in made[0].output_tail
    assert "fin ended with" in made[0].output_tail


def test_the_command_that_reproduces_an_item_quotes_the_target() -> None:
    target = "gfx908'; touch /tmp/X; '"
    item = items("miopen_find_compile", [FIXED])[0].model_copy(update={"target": target})
    assert shlex.split(command_line(MiopenLibrary(), item))[-2:] == ["--target", target]
    assert command_line(MiopenLibrary(), item, 0) == command_line(MiopenLibrary(), item)


def test_a_crash_while_measuring(rocm: Rocm, context: RunContext) -> None:
    rocm(options={"crash_eval": [FIXED]})
    made = compiled(context, [TUNABLE, FIXED])
    found = measured(context, [TUNABLE, FIXED], made)
    assert [result.cause for result in found] == [None, Cause.RUN_ERROR]


@pytest.mark.drill(only=True)
def test_fin_that_hangs_is_ended_and_the_others_are_served(rocm: Rocm, context: RunContext) -> None:
    rocm(options={"hang_solvers": [TUNABLE]})
    # within it fin has to start on a busy machine; both together may take twice as long
    made = compiled(context, [TUNABLE, FIXED], options={"timeout_s": 6})
    assert [result.cause for result in made] == [Cause.BUILD_TIMEOUT, None]


@pytest.mark.parametrize("lie", ["nan_time", "no_reason"])
def test_each_lie_about_a_measurement_is_a_recorded_cause(
    rocm: Rocm, context: RunContext, lie: str
) -> None:
    rocm()
    made = compiled(context, [TUNABLE, FIXED])
    rocm(options={"lies": {TUNABLE: lie}})
    bad, good = measured(context, [TUNABLE, FIXED], made)
    assert (bad.ok, bad.cause, bad.trials[0].time_ms) == (False, Cause.RUN_ERROR, None)
    assert bad.output_tail
    assert good.ok


@pytest.mark.parametrize("lie", ["bad_md5", "no_reason"])
def test_each_lie_about_a_build_is_a_recorded_cause(
    rocm: Rocm, context: RunContext, lie: str
) -> None:
    rocm(options={"lies": {TUNABLE: lie}})
    bad, good = compiled(context, [TUNABLE, FIXED])
    assert (bad.ok, bad.cause, bad.trials[0].artifact) == (False, Cause.BUILD_ERROR, None)
    assert bad.output_tail
    assert good.ok


@pytest.mark.parametrize(
    ("option", "cause"), [("truncate_output", Cause.INFRA), ("empty_output", Cause.BUILD_ERROR)]
)
def test_output_that_is_torn_or_empty(
    rocm: Rocm, context: RunContext, option: str, cause: Cause
) -> None:
    rocm(options={option: True})
    made = compiled(context, [TUNABLE, FIXED])
    assert {result.cause for result in made} == {cause}


def test_a_solver_that_cannot_run_the_layer_is_not_applicable(
    rocm: Rocm, context: RunContext
) -> None:
    rocm()
    (result,) = compiled(context, ["ConvAsm1x1U"])
    assert result.cause is Cause.NOT_APPLICABLE


def test_each_tunable_solver_is_tuned_in_a_call_of_its_own(rocm: Rocm, context: RunContext) -> None:
    rocm()
    solvers = [TUNABLE, WINOGRAD, "ConvHipImplicitGemmV4R1Fwd"]
    found = measured(context, solvers, compiled(context, solvers, "perf"), "perf")
    assert [result.ok for result in found] == [True] * 3
    assert all(result.trials[0].params for result in found)


def test_the_kernels_of_tuned_params_come_from_a_build_with_them(
    rocm: Rocm, context: RunContext
) -> None:
    rocm()
    built = compiled(context, [TUNABLE], "perf")
    (tuned,) = measured(context, [TUNABLE], built, "perf")
    assert tuned.kernels == ()  # eight builds, and nobody can say which of them won
    params = tuned.trials[0].params
    again = compiled(context, [TUNABLE], known_params=params)
    (final,) = measured(context, [TUNABLE], again)
    assert final.trials[0].params == params
    assert final.kernels
    every = kernel_objects.Compiled.load(context.artifacts.get(built[0].trials[0].artifact or ""))
    assert {code.args for code in final.kernels} < {code.args for code in every.kernels}
    untuned = measured(context, [TUNABLE], compiled(context, [TUNABLE]))[0]
    assert untuned.trials[0].params != params
    assert (untuned.trials[0].time_ms or 0) > (final.trials[0].time_ms or 0)


def test_a_lost_artifact_sends_the_job_back(rocm: Rocm, context: RunContext) -> None:
    rocm()
    made = compiled(context, [TUNABLE, FIXED])
    made[0] = made[0].model_copy(
        update={"trials": (made[0].trials[0].model_copy(update={"artifact": "0" * 64}),)}
    )
    lost, good = sorted(measured(context, [TUNABLE, FIXED], made), key=lambda result: result.job_id)
    assert lost.cause is Cause.ARTIFACT_LOST
    assert good.ok


def test_secrets_of_the_environment_are_neither_passed_on_nor_kept(
    rocm: Rocm, context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rocm(options={"lies": {TUNABLE: "no_reason"}})
    monkeypatch.setenv("TUNA_DB_URL", "mysql+pymysql://user:hunter2@host/x")
    made = compiled(context, [TUNABLE, FIXED])
    text = json.dumps([result.model_dump(mode="json") for result in made])
    assert "hunter2" not in text
    assert "process_env" not in text
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes()


def test_applicability_survives_a_layer_that_kills_fin(rocm: Rocm, context: RunContext) -> None:
    rocm(options={"crash_configs": ["-17-1x1-"]})
    layers = [layer(FORWARD.replace("-n 16", f"-n {batch}")) for batch in range(14, 21)]
    found = dict(
        MiopenLibrary().applicable(
            layers, environment.from_options({"arch": "gfx908", "num_cu": "120"})
        )
    )
    assert list(found) == layers
    assert [config.batchsize for config, solvers in found.items() if solvers is None] == [17]
    assert all(found[config] for config in layers if config.batchsize != 17)


def test_the_environment_of_a_machine_with_two_gpus(
    rocm: Rocm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm(arch="gfx90a", num_cu=104, gpus=2)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    there = MiopenLibrary().environment()
    assert (there.arch, there.num_cu, there.library_version) == ("gfx90a", 104, "3.3.0.2d1fd997")
    assert there.key == MiopenLibrary().environment_by_hand({"arch": "gfx90a", "num_cu": "104"}).key
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    environment.visible_gpu.cache_clear()
    with pytest.raises(LibraryMissing, match="GPU 2"):
        MiopenLibrary().environment()


def test_a_machine_without_gpu_says_what_to_give(rocm: Rocm) -> None:
    rocm(gpus=0)
    with pytest.raises(LibraryMissing, match="no GPU") as error:
        MiopenLibrary().environment()
    assert "--arch and --num-cu" in error.value.hint
    assert MiopenLibrary().toolchain().startswith("rocm-6.2.0")


@pytest.mark.parametrize(
    ("arch", "num_cu"), [("gfx950", "256"), ("gfx1201", "64"), ("gfx1151", "40"), ("gfx942", "80")]
)
def test_any_device_can_be_given_by_hand(rocm: Rocm, arch: str, num_cu: str) -> None:
    rocm()
    facts = {"arch": arch, "num_cu": num_cu, "rocm_v": "7.0", "miopen_v": "3.5.0.abc"}
    there = MiopenLibrary().environment_by_hand(facts)
    assert (there.arch, there.num_cu, there.library_version) == (arch, int(num_cu), "3.5.0.abc")


@pytest.mark.parametrize(
    "facts",
    [
        {"arch": "gfx90a"},
        {"num_cu": "8"},
        {"arch": "GFX", "num_cu": "8"},
        {"arch": "gfx90a", "num_cu": "-1"},
        {"arch": "gfx90a", "num_cu": "²"},
    ],
)
def test_half_an_environment_by_hand_is_refused(rocm: Rocm, facts: dict[str, str]) -> None:
    rocm()
    with pytest.raises(BadInput):
        MiopenLibrary().environment_by_hand(facts)


def test_without_fin_the_error_names_where_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TUNA_FIN", raising=False)
    change_setting(monkeypatch, "TUNA_ROCM_PATH", "/opt/rocm")
    with pytest.raises(LibraryMissing, match="/opt/rocm/bin/fin") as error:
        MiopenLibrary().solvers()
    assert "TUNA_FIN" in error.value.hint
    get_settings.cache_clear()


def test_rdna_counts_work_group_processors() -> None:
    """gfx11 and gfx12 too: databases named by compute units are ones that MIOpen does not look
    for."""
    agents = [("gfx1030", 72), ("gfx90a", 104), ("gfx1100", 96), ("gfx1151", 40), ("gfx1201", 64)]
    text = "".join(
        f"Agent {number}\n  Name:  {arch}\n  Device Type:  GPU\n  Compute Unit:  {count}\n"
        for number, (arch, count) in enumerate(agents, 1)
    )
    assert [(gpu.arch, gpu.num_cu) for gpu in environment.parse_rocminfo(text)] == [
        ("gfx1030", 36),
        ("gfx90a", 104),
        ("gfx1100", 48),
        ("gfx1151", 20),
        ("gfx1201", 32),
    ]
