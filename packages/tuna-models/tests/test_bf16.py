"""Models in bf16: what is stored in bfloat16, what is computed in fp32, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from compiled import HERE, TARGET, check, error_of, planned
from nets import NETS, Net
from onnx import numpy_helper
from quantised_nets import Quantised
from shared_data import need
from test_model_store import manifest
from test_recurrent import BOTH, recurrent
from tvm import te, tirx

from tuna.configs import TaskConfig
from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries.tvm import functions
from tuna.libraries.tvm.kernels import epilogue, machine
from tuna_models import child
from tuna_models.cli.tune import _name_of
from tuna_models.compiler import blocked, precisions
from tuna_models.compiler.build import Planned
from tuna_models.judging import bounds, inputs
from tuna_models.judging.checks import Checked, Checks, judge
from tuna_models.manifest import Manifest, Precision
from tuna_models.reading import importer

#: A CPU that has the instruction, and one that does not; planning needs neither.
WITH, WITHOUT = ({"kind": "llvm", "mcpu": name, "num-cores": 1} for name in ("znver5", "znver3"))


def in_bf16(model: Any, target: dict[str, Any] = WITH) -> Planned:
    return planned(model, target=target, precision=Precision.BF16)


def names(found: Planned) -> Counter[str]:
    """Names of the tasks without a core."""
    return Counter({task.name: count for task, count in found.tasks() if task.core is None})


def kinds(found: Planned, part: str) -> list[list[str]]:
    """Types of the tensors of each function with this part in its name."""
    functions = [function for name, function in functions_of(found) if part in name]
    return [[str(param.ty.dtype) for param in function.params] for function in functions]


def functions_of(found: Planned) -> list[tuple[str, Any]]:
    return [(name, found.module[name]) for name in found.functions]


@pytest.mark.parametrize("name", ["residual", "squeezed", "odd", "attention", "upsampled"])
def test_a_model_in_bf16_answers_within_its_bound(name: str) -> None:
    if "bf16" not in machine.from_target(tvm.target.Target(HERE)).words:
        need(None, "a CPU with avx512_bf16")
    model = NETS[name]()
    found = in_bf16(model, HERE)
    followed = bounds.of(importer.to_relax(model, "net"))
    wanted = [
        one | {"bounds": known["bounds"]}
        for one, known in zip(importer.inputs_of(model), followed, strict=True)
    ]
    given = inputs.values(wanted, seed=3)
    assert 1e-4 < error_of(model, found, given, HERE) < 1e-2, "and not fp32's"


def test_a_recurrent_layer_in_bf16_keeps_its_state_in_fp32() -> None:
    if "bf16" not in machine.from_target(tvm.target.Target(HERE)).words:
        need(None, "a CPU with avx512_bf16")
    for case in ({"kind": "LSTM", "units": 33, **BOTH}, {"kind": "GRU", "batch": 5}):
        model, given = recurrent(**case)
        assert 1e-4 < error_of(model, in_bf16(model, HERE), given, HERE) < 1e-2
    left = planned(model, target=HERE, precision=Precision.BF16, in_fp32=[0])
    assert error_of(model, left, given, HERE) < 1e-5, "steps follow the part of their inputs"


def partly_quantised() -> Any:
    """A real convolution between two of bytes."""
    net = Quantised((1, 16, 9, 9), 13)
    x = net.rounded(net.quantised_conv(net.rounded("x", 0.03), 16), 0.04)
    x = net.rounded(net.relu(net.conv(x, 16, 16, 3, norm=False)), 0.03, 0)
    return net.model(net.rounded(net.quantised_conv(x, 16), 0.05))


def quantised_attention() -> Any:
    """A product of two quantised tensors, and a real one of its softmax."""
    net = Quantised((2, 8, 24), 13)
    x = net.rounded("x", 0.02)
    scores = net.add("MatMul", x, net.add("Transpose", x, perm=[0, 2, 1]))
    weights = net.add("Softmax", net.rounded(scores, 0.1), axis=-1)
    return net.model(net.rounded(net.add("MatMul", weights, x), 0.01))


@pytest.mark.parametrize(
    ("make", "cores", "real"),
    [(partly_quantised, {"INT8": 2, "BF16": 1}, {2}), (quantised_attention, {"BF16": 2}, {2})],
)
def test_what_has_no_bytes_in_a_quantised_model_is_in_bf16(
    make: Any,
    cores: dict[str, int],
    real: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes may be off by a step next to a tie, but by more where real values are summed."""
    monkeypatch.chdir(tmp_path)  # where the check leaves a library
    if "bf16" not in machine.from_target(tvm.target.Target(HERE)).words:
        need(None, "a CPU with avx512_bf16")
    model = make()
    plan = in_bf16(model, HERE)
    types = Counter[str]()
    for task, count in plan.tasks():
        types.update({task.core.data_type.value: count} if task.core else {})
    assert types == cores
    problem, runs = check(tmp_path, TARGET, model, model, Precision.BF16)
    assert runs[0].composed
    assert problem.error(runs) == 0.0, problem.report(runs)
    cuts = problem.answers.cases[0].cuts
    reach = [int((cut.high.astype(int) - cut.low).max()) for cut in cuts]
    assert {place for place, steps in enumerate(reach) if steps > 1} == real


def test_tensors_between_convolutions_are_bfloat16_and_answers_fp32() -> None:
    found = in_bf16(NETS["residual"]())
    cores = [task.core for task, _ in found.tasks() if task.core is not None]
    assert {core.data_type for core in cores} == {DataType.BF16}
    assert set(names(found)) == {"cast", "max_pool", "global_average", "fused_reshape_cast"}
    # the input, weights in words, a bias, a residual, the answer
    stored = ["bfloat16", "int32", "float32", "bfloat16", "bfloat16"]
    assert kinds(found, "conv_bias_residual_relu") == [stored, stored]
    assert kinds(found, "max_pool") == [["bfloat16", "bfloat16"]]
    assert kinds(found, "gemm")[0][-1] == "float32", "the answer of the model"


@pytest.mark.parametrize(
    ("largest", "kind"),
    [(1.0, "float16"), (29_000.0, "float16"), (30_000.0, "int32"), (1e-4, "int32")],
)
def test_weights_that_fp16_does_not_hold_are_not_transformed(largest: float, kind: str) -> None:
    """Of weights of 1e-6 the answer was off by five times its largest value, of 1e6 infinite."""
    net = Net((1, 64, 28, 28))
    weights = np.clip(net.random.normal(0.0, 0.5, (64, 64, 3, 3)), -1.0, 1.0) * largest
    found = in_bf16(net.model(net.add("Conv", "x", net.constant(weights), pads=[1] * 4)))
    assert [types[1] for types in kinds(found, "conv")] == [kind]


def test_a_depthwise_convolution_has_weights_in_fp32() -> None:
    found = in_bf16(NETS["inverted"]())
    weights = [
        found.module[name].params[1]
        for name, task in found.functions.items()
        if task.core is not None and getattr(task.core, "group_count", 1) > 1
    ]
    assert [str(param.ty.dtype) for param in weights] == ["float32"]


def test_functions_in_fp32_read_bfloat16_and_nothing_is_converted_before_them() -> None:
    found = in_bf16(NETS["attention"]())
    assert "to_fp32" not in names(found)
    assert [each[0] for each in kinds(found, "layer_norm")] == ["bfloat16"]


def test_what_no_kernel_takes_in_bf16_stays_in_fp32() -> None:
    net = Net((1, 16, 6, 6))
    x = net.relu(net.conv("x", 16, 16, 3))
    weights = net.constant(net.random.normal(0, 0.1, (16, 16, 3, 3)))
    x = net.add("ConvTranspose", x, weights, strides=[2, 2], pads=[1] * 4)
    found = in_bf16(net.model(net.conv(x, 16, 8, 1)))
    types = [task.core.data_type for task, _ in found.tasks() if task.core is not None]
    assert types == [DataType.BF16, DataType.FP32, DataType.BF16]


def test_a_cpu_without_the_instruction_is_refused_before_anything_is_read() -> None:
    asked = {"path": "absent.onnx", "target": json.dumps(WITHOUT), "precision": "bf16"}
    answer = child.inspect(asked=asked, text="absent")
    assert "bf16 needs a CPU with avx512_bf16, which znver3 does not have." in json.dumps(answer)
    precisions.check_target(Precision.FP32, tvm.target.Target(WITHOUT))


def test_a_model_of_which_nothing_would_be_in_bf16_is_refused() -> None:
    net = Net((1, 4))
    found = in_bf16(net.model(net.relu("x")))
    with pytest.raises(BadInput, match="net has no convolution or product in fp32"):
        precisions.check_plan(Precision.BF16, found, "net")
    precisions.check_plan(Precision.FP32, found, "net")


def test_a_wrong_answer_in_bf16_names_what_to_do() -> None:
    fault = "the output y differs by 0.05 of its largest value, more than 0.01"
    with pytest.raises(BadInput) as found:
        judge("17", Checked({"reference": fault}, {}, winograd=True, bf16=True))
    assert found.value.hint == "leave it in fp32, or allow the error: --max-error"
    assert Checks().key != Checks(max_error=0.1).key


def test_an_import_without_a_name_in_bf16_has_a_name_of_its_own() -> None:
    assert _name_of(Path("net.onnx"), "fp32") == "net"
    assert _name_of(Path("net.onnx"), "bf16") == "net-bf16"


def run(function: Any, *arrays: Any) -> Any:
    """The last of the arrays, which the function writes."""
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.tirx.build(module, target=tvm.target.Target(HERE))["main"](*tensors)
    return tensors[-1].numpy()


def normal(*shape: int) -> Any:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def empty(*shape: int) -> Any:
    return np.zeros(shape, ml_dtypes.bfloat16)


def test_values_are_rounded_once_on_their_way_into_blocks_and_back() -> None:
    x = normal(1, 20, 3, 3)
    there = run(blocked.to_blocks(x.shape, 16, "float32", "bfloat16"), x, empty(1, 2, 3, 3, 16))
    back = run(blocked.from_blocks(x.shape, 16, "bfloat16", "float32"), there, np.zeros_like(x))
    np.testing.assert_array_equal(back, x.astype(ml_dtypes.bfloat16).astype(np.float32))


def bits_of_fp32() -> Any:
    """Numbers of all sizes, each tie, infinities, NaN of all kinds, and the largest numbers."""
    random = np.random.default_rng(5)
    ties = np.arange(1 << 16, dtype=np.uint32) << 16 | 1 << 15
    special = [0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 1, 0]
    signs = [value | sign for value in special for sign in (0, 1 << 31)]
    found = [ties, np.array(signs, np.uint32), random.integers(0, 1 << 32, 1 << 16, np.uint32)]
    return np.concatenate(found).view(np.float32)


def cast(extents: tuple[int, ...]) -> Any:
    """A function of Relax, as TVM makes it and as `functions` finishes it."""
    x = te.placeholder(extents, "float32", "X")
    y = te.compute(extents, lambda *at: tirx.Cast("bfloat16", x[at]), name="Y")
    return functions.in_vectors(te.create_prim_func([x, y]))


@pytest.mark.parametrize("where", ["function", "blocks"])
def test_rounding_is_to_the_nearest_of_two_as_near_the_even_one_and_nan_stays(where: str) -> None:
    x = bits_of_fp32().reshape(1, 16, -1, 1)
    if where == "function":
        found = run(cast(x.shape), x, empty(*x.shape))
    else:
        there = blocked.to_blocks(x.shape, 16, "float32", "bfloat16")
        found = run(there, x, empty(1, 1, *x.shape[2:], 16))
        found = found.transpose(0, 1, 4, 2, 3).reshape(x.shape)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    beyond = np.isinf(expected) & np.isfinite(x)
    expected[beyond] = np.copysign(epilogue.LARGEST_BF16, x[beyond])
    assert beyond.any()
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize("padded", [True, False])
def test_pools_of_bfloat16_are_computed_in_fp32(padded: bool) -> None:
    x = normal(1, 1, 6, 6, 16).astype(ml_dtypes.bfloat16)
    wide, pool = x.astype(np.float32), blocked.Pooling((3, 3), (3, 3), (0, 0, 0, 0))
    windows = wide.reshape(1, 1, 2, 3, 2, 3, 16)
    largest = run(blocked.max_pool(x.shape, (2, 2), pool, "bfloat16"), x, empty(1, 1, 2, 2, 16))
    np.testing.assert_array_equal(largest, windows.max((3, 5)).astype(ml_dtypes.bfloat16))
    average = blocked.average_pool(x.shape, (2, 2), pool, padded=padded, kind="bfloat16")
    found = run(average, x, empty(1, 1, 2, 2, 16)).astype(np.float32)
    np.testing.assert_allclose(found, windows.mean((3, 5)), rtol=2**-8, atol=1e-6)


def test_an_answer_with_named_parts_is_rounded_beside_a_residual() -> None:
    """TVM's own conversions fail on the names, and make wrong code of the residual."""
    x, r = normal(64), normal(64).astype(ml_dtypes.bfloat16)
    given = te.placeholder(x.shape, name="X")
    residual = te.placeholder(r.shape, "bfloat16", name="R")
    y = te.compute(
        x.shape,
        lambda i: epilogue.rounded(
            epilogue.sigmoid(given[i]) + epilogue.in_fp32(residual[i]), "bfloat16"
        ),
        name="Y",
    )
    found = run(te.create_prim_func([given, residual, y]), x, r, empty(64)).astype(np.float32)
    expected = 1 / (1 + np.exp(-x.astype(np.float64))) + r.astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("kind", ["int16", "uint16"])
def test_activations_of_sixteen_bits_stay_in_fp32_and_are_counted(kind: str) -> None:
    net = Net((1, 16, 8, 8))
    scale, zero = net.constant(1e-4), f"w{len(net.weights)}"
    net.weights.append(numpy_helper.from_array(np.array(9, kind), zero))
    x = net.conv("x", 16, 16, 3, norm=False)
    for _ in range(2):
        x = net.add("QuantizeLinear", x, scale, zero)
        x = net.add("MaxPool", net.add("DequantizeLinear", x, scale, zero), kernel_shape=[1, 1])
        x = net.conv(x, 16, 16, 1, norm=False)
    model = net.model(x, check=False)
    model.opset_import[0].version = 21
    plan = in_bf16(model)
    types = [task.core.data_type for task, n in plan.tasks() for _ in range(n) if task.core]
    assert types == [DataType.BF16, DataType.FP32, DataType.FP32]
    assert plan.left_in_fp32 == {"conv2d: its activations have 16 bits": 2}


def test_a_task_in_bf16_is_another_one_than_in_fp32() -> None:
    model = NETS["residual"]()
    plain = planned(model, target=WITH)

    def keys(found: Planned) -> set[str]:
        return {task.key for task, _ in found.tasks() if isinstance(task, TaskConfig) and task.core}

    assert not keys(plain) & keys(in_bf16(model))


def test_the_precision_makes_an_import_another_version_and_fp32_leaves_them_as_they_were() -> None:
    plain = manifest()
    narrow = plain.model_copy(update={"precision": Precision.BF16})
    assert b"precision" not in plain.to_bytes()
    assert plain.digest != narrow.digest
    assert Manifest.from_bytes(narrow.to_bytes()).precision is Precision.BF16
