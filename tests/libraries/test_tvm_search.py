"""The spaces of TVM's solvers: what the search proposes there is new, valid, repeatable, and built
from its params alone."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm_bench import Bench
from tvm_layers import conv, gemm

pytestmark = [
    pytest.mark.keeps_processes,
    pytest.mark.usefixtures("tvm_here", "xgboost_here", "forked_children"),
]
pytest.importorskip("tvm")

from tuna.errors import BadInput
from tuna.jobs import history
from tuna.libraries.items import Sibling
from tuna.libraries.kernels import KernelJob, Past
from tuna.libraries.search.cost_model import CostModel
from tuna.libraries.search.proposal import propose
from tuna.libraries.tvm import problems, schedules
from tuna.libraries.tvm.decisions import Design, factorisations, tiling_features
from tuna.libraries.tvm.kernel_child import TvmBuilder, module_of, space_of
from tuna.libraries.tvm.schedules import ScheduleSpace
from tuna.vocabulary import Cause

CPU = json.dumps({"kind": "llvm", "mcpu": "znver4", "num-cores": 1})
DIRECT = "TvmConvDirectNCHW"


def job(solver: str = DIRECT, count: int = 1) -> KernelJob:
    return KernelJob(gemm() if solver == "TvmGemmTile" else conv(), solver, CPU, count=count)


def searched_space() -> ScheduleSpace:
    return space_of(job(DIRECT))


def as_if_measured(params: str) -> Past:
    """A time that the innermost tile of the output channels decides, so that there is something to
    learn."""
    found = json.loads(params)[0][1]
    return Past(
        params,
        1.0 / (1.0 + sum(decision[-1] for _, decision in found if isinstance(decision, list))),
    )


def test_a_search_of_three_rounds_repeats_nothing_and_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space, history = searched_space(), []
    monkeypatch.setattr(space, "prior", None)  # it knows nothing of times that were made up
    for _ in range(3):
        history += map(as_if_measured, propose(space, history, count=8, seed=1))
    assert len({trial.params for trial in history}) == 24
    times = [trial.time_ms or 9.0 for trial in history]
    assert min(times[16:]) < min(times[:8])


def test_the_prior_expects_vectors_in_registers_to_be_faster_than_long_bodies_without() -> None:
    space = searched_space()
    if space.prior is None:
        pytest.skip("there is no prior for CPUs like this machine's")
    fast, slow = (
        tiling_features([[1, 4, 1, 4], [2, 1, 1, last], [16, 1]], 16, -1, []) for last in (16, 1)
    )
    faster, slower = CostModel(space.prior).slowdowns([fast, slow])
    assert faster + 1.0 < slower


def test_hundreds_of_unrolled_statements_count_as_effort() -> None:
    space = searched_space()
    efforts = {round(space.effort(space.random(random.Random(seed))), 2) for seed in range(40)}
    assert efforts == {0.0, 0.79}


def test_params_are_the_same_after_a_rebuild() -> None:
    families = ("TvmConvTile", "TvmGemmTile", "TvmUntuned")
    proposed = {solver: TvmBuilder().propose(job(solver, count=3)) for solver in families}
    proposed[DIRECT] = propose(searched_space(), [], count=3, seed=5)
    for solver, candidates in proposed.items():
        module = module_of(job(solver))
        for params in candidates:
            again = schedules.schedule_of(module, params)
            assert schedules.to_params(module, problems.target_of(CPU), again) == params


def batch_and_code() -> list[str]:
    """A batch of candidates, and the module that the last one becomes."""
    import tvm

    batch = propose(searched_space(), [], count=2, seed=3)
    return [*batch, str(tvm.ir.save_json(schedules.schedule_of(module_of(job()), batch[1]).mod))]


@pytest.mark.drill(only=True)
def test_another_process_proposes_and_builds_the_same() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    code = "import json, test_tvm_search as it; print(json.dumps(it.batch_and_code()))"
    given = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == batch_and_code()


def test_a_candidate_is_built_without_a_proposal(tmp_path: Path) -> None:
    (params,) = propose(searched_space(), [], count=1, seed=8)
    TvmBuilder().build(job(), params, tmp_path / "one.so")
    assert (tmp_path / "one.so").stat().st_size > 1000


@pytest.mark.parametrize(
    "params",
    [
        "",
        "[]",
        "nonsense",
        '[[[["GetSBlock", [], ["no_such", "main"], ["b0"]]], []], null, {}, []]',
    ],
)
def test_a_text_that_is_no_candidate_is_refused(params: str) -> None:
    with pytest.raises(BadInput, match="not a schedule of this problem"):
        schedules.schedule_of(module_of(job()), params)
    assert searched_space().point_of(params) is None


def test_a_search_tries_the_fastest_known_candidates_first_and_learns_from_like_layers(
    bench: Bench,
) -> None:
    begun = bench.item(conv(), DIRECT, batch=12, candidates=12).model_copy(
        update={"step": "search"}
    )
    cold = [trial.params or "" for trial in bench.run(begun).trials]
    assert len(cold) == 12
    times = {params: as_if_measured(params).time_ms or 0 for params in cold}
    rows = [SimpleNamespace(params=params, time_ms=times[params], cause=None) for params in cold]
    block = bench.context.artifacts.put(history.block(rows, measured=True))

    def proposed(*, same: bool) -> list[str]:
        sibling = Sibling(artifact=block, same=same, label="session 1")
        again = begun.model_copy(update={"siblings": (sibling,), "seed": 99})
        return [trial.params or "" for trial in bench.run(again).trials]

    warm = proposed(same=True)
    assert warm[:4] == sorted(cold, key=lambda params: (times[params], params))[:4]
    assert set(cold).isdisjoint(warm[4:])
    of_a_sibling = proposed(same=False)
    assert of_a_sibling != [
        trial.params for trial in bench.run(begun.model_copy(update={"seed": 99})).trials
    ]
    assert statistics.median(map(_as_if_ms, of_a_sibling)) < statistics.median(times.values())
    lost = begun.model_copy(
        update={"siblings": (Sibling(artifact="0" * 64, same=True, label="gone"),)}
    )
    assert bench.run(lost).cause is Cause.ARTIFACT_LOST


def _as_if_ms(params: str) -> float:
    return as_if_measured(params).time_ms or 0


def test_a_point_and_its_params_have_the_same_features() -> None:
    space = searched_space()
    for params in propose(space, [], count=6, seed=2):
        point = space.point_of(params)
        assert point is not None
        assert space.features(point) == space.features_of(params)
        assert space.params_of(point) == params


@given(st.integers(1, 96), st.integers(1, 4), st.sampled_from([4, 16, 64]))
@settings(max_examples=50, deadline=None)
def test_factorisations_are_all_there(extent: int, parts: int, innermost: int) -> None:
    found = factorisations(extent, parts, innermost)
    assert len(set(found)) == len(found)
    for factors in found:
        product = 1
        for factor in factors:
            product *= factor
        assert product == extent
        assert factors[-1] <= innermost
    if parts == 2:
        assert len(found) == sum(
            extent % last == 0 for last in range(1, min(extent, innermost) + 1)
        )


def test_a_mutated_tile_keeps_its_extent() -> None:
    trace = [
        [["SamplePerfectTile", ["l0"], [4, 64], ["v0", "v1", "v2", "v3"]]],
        [[0, [4, 4, 7, 1]]],
    ]
    (tile,) = Design.read(trace).decisions
    chance = random.Random(1)
    for _ in range(50):
        a, b, c, d = tile.mutated((4, 4, 7, 1), chance)
        assert a * b * c * d == 112
        assert (a, b, c, d) != (4, 4, 7, 1)
