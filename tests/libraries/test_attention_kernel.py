"""The kernel of attention beside NumPy's in double precision: rows that see nothing, sums of many
keys, several cores, and masks as a record has them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

from tuna.configs import AttentionConfig, TaskConfig
from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries import reference, task_reference
from tuna.libraries.tvm import problems, schedules
from tuna.libraries.tvm.kernels import machine, signature
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.problems import FamilyProblem

#: Of 7 queries there are 8 rows, and 21 keys fill no vector.
SMALL = AttentionConfig(1, 2, 7, 21, 10, 12, 2, 0.5, mask="QK", v_layout="BSHD", y_layout="BSHD")
CPUS = {"fp32": "x86-64-v3", "bf16": "cooperlake"}


def target_of(cpu: str = "", cores: int = 1) -> Any:
    given = {"kind": "llvm", "num-cores": cores}
    return tvm.target.Target({**given, "mcpu": cpu or tvm.target.codegen.llvm_get_system_cpu()})


def problem_of(config: Any, target: Any) -> FamilyProblem:
    found = problems.with_family(config, "attention", Mode.LAYER, target)
    assert found is not None
    return found


def answer_of(config: Any, *inputs: Any, cores: int = 1, kind: str = "float32") -> Any:
    """The answer of the last point of the space, on this machine."""
    target = target_of(cores=cores)
    made = problem_of(config, target)
    built = tvm.tirx.build(made.candidate(made.count(99) - 1).mod, target=target)
    core = config.core if isinstance(config, TaskConfig) else config
    y = tvm.runtime.tensor(np.full(core.shapes["y"], np.nan, reference.np_type(kind)))
    built["main"](*map(tvm.runtime.tensor, made.inputs(*inputs)), y)
    return y.numpy()


def test_a_row_that_sees_nothing_keeps_its_answer() -> None:
    q, k, v, mask = reference.make(SMALL).inputs
    mask[0], mask[1] = -np.inf, np.finfo(np.float32).min
    found = answer_of(SMALL, q, k, v, mask)
    expected = reference.attend(SMALL, q, k, v, mask)
    assert np.isnan(expected[0, 0]).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[0, 1], v[0].mean(axis=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("keys", [1000, 1021])  # a prime number of keys has sums of other lengths
def test_sums_of_many_keys_are_as_exact_as_of_few(keys: int) -> None:
    config = replace(SMALL, keys=keys, mask="")
    problem = reference.make(config)
    assert problem.error(answer_of(config, *problem.inputs)) < 7e-7


@pytest.mark.parametrize("queries", [30, 250, 256])  # of few, keys are hidden and not left out
def test_a_query_sees_no_key_behind_it(queries: int) -> None:
    config = replace(SMALL, queries=queries, keys=queries, mask="", causal=True)
    q, k, v = reference.make(config).inputs
    v[:, -1] = 1e6
    found = answer_of(config, q, k, v)
    np.testing.assert_allclose(found, reference.attend(config, q, k, v), rtol=1e-5, atol=1e-5)
    assert np.abs(found[:, :-1]).max() < 2.0


def test_cores_share_the_queries_of_a_head() -> None:
    config = replace(SMALL, heads=1, kv_heads=1, queries=40, mask="K")
    made = problem_of(config, target_of(cores=2))
    first, *_ = made.family.kernel.space(made.layer)
    assert first.parts == 2
    problem = reference.make(config)
    assert problem.error(answer_of(config, *problem.inputs, cores=2)) < 1e-6


@pytest.mark.parametrize("kind", CPUS)
def test_a_record_tells_how_far_the_mask_is_filled_up(kind: str) -> None:
    config = replace(SMALL, data_type=DataType(kind.upper()))
    target = target_of(CPUS[kind])
    made = problem_of(config, target)
    record = json.loads(schedules.to_params(made.workload(), target, made.candidate(0)))
    assert signature.packing_for(config, "attention", record[3]) == made.packing()
    assert [len(extents) for *_, extents in record[3]] == [4, 4, 4, 2, 4]


@pytest.mark.skipif(
    machine.from_target(target_of()).dot_of(DataType.BF16) is None, reason="a CPU without bf16"
)
def test_bf16_is_rounded_once_and_written_in_fp32_where_the_task_says() -> None:
    core = replace(SMALL, data_type=DataType.BF16)
    for epilogue, kind in (((), "bfloat16"), (("to_fp32",), "float32")):
        task = TaskConfig(core=core, layouts="layer", epilogue=epilogue)
        problem = task_reference.task(task, 0)
        assert problem.answer_type == kind
        assert problem.error(answer_of(task, *problem.inputs, kind=kind)) < 5e-3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_heads": 3}, "kv_heads must divide heads, got 3 and 2"),
        ({"mask": "Q"}, "mask must be one of , K, QK"),
        ({"scale": float("inf")}, "scale must be a finite number"),
        ({"v_layout": "BHDS"}, "v_layout must have the axes BHSD, D last"),
        ({"k_layout": "BHS"}, "k_layout must have the axes BHSD: 'BHS'"),
        ({"queries": 2**31 - 1, "keys": 2**31 - 1}, "its FLOPs do not fit"),
    ],
)
def test_what_is_no_attention_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        replace(SMALL, **fields)


def test_an_attention_has_no_epilogue_but_a_cast() -> None:
    with pytest.raises(BadInput, match="the epilogue of an attention is a cast, or nothing"):
        TaskConfig(core=SMALL, layouts="layer", epilogue=("relu",))
