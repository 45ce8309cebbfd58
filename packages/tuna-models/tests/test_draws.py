"""Inputs that show what random ones do not, drawn for what an ONNX model makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nets import Net
from onnx import TensorProto as T
from onnx import helper

from tuna_models.judging import draws, edges, right_answers
from tuna_models.reading.onnx_graph import OnnxGraph

LEAST = np.finfo(np.float32).min


class Model:
    """A model with inputs by name: type and shape."""

    def __init__(self, build: Any, **inputs: tuple[int, list[int]]) -> None:
        net = Net(())
        given = [(name, *one) for name, one in inputs.items()]
        self.model = net.model(build(net), inputs=given, check=False)
        self.graph = OnnxGraph(self.model)
        generator = np.random.default_rng(0)
        self.values, self.inputs = dict[str, Any](), list[dict[str, Any]]()
        for name, (kind, shape) in inputs.items():
            dtype = helper.tensor_dtype_to_np_dtype(kind)
            self.inputs.append({"name": name, "shape": shape, "dtype": str(dtype)})
            self.values[name] = generator.standard_normal(shape).astype(dtype)

    def draw(self, kind: Any) -> dict[str, Any]:
        return kind(self.graph, self.inputs, self.values)  # type: ignore[no-any-return]


def masked(net: Net) -> str:
    scores = net.add("Add", net.add("MatMul", "x", "x"), "mask")
    return net.add("MatMul", net.add("Softmax", scores), "x")


def test_rows_of_an_added_mask_are_hidden_by_the_least_number_and_scores_are_not() -> None:
    model = Model(masked, x=(T.FLOAT, [4, 4]), mask=(T.FLOAT, [4, 4]))
    found = model.draw(draws.hidden)
    assert (found["mask"][-1] == LEAST).all()
    assert (found["mask"][-2] == 0).all()
    assert set(found["mask"][:2].ravel()) <= {0, LEAST}
    assert np.array_equal(found["x"], model.values["x"])


@pytest.mark.parametrize("kind", [T.BOOL, T.INT32, T.INT64, T.UINT8])
def test_rows_of_a_mask_of_any_type_are_hidden_whole(kind: int) -> None:
    def build(net: Net) -> str:
        return net.add("Where", net.add("Cast", "mask", to=T.BOOL), "x", net.constant(-1e9))

    model = Model(build, x=(T.FLOAT, [3, 5]), mask=(kind, [3, 5]))
    found = model.draw(draws.hidden)["mask"]
    assert found.dtype == helper.tensor_dtype_to_np_dtype(kind)
    assert found.astype(bool)[1:].tolist() == [[True] * 5, [False] * 5]


def test_positions_that_become_real_are_several_thousands_and_masks_stay() -> None:
    def build(net: Net) -> str:
        phases = net.add("Mul", net.add("Cast", "positions", to=T.FLOAT), net.constant(0.1))
        hidden = net.add("Sub", net.constant(1.0), net.add("Cast", "mask", to=T.FLOAT))
        return net.add("Add", net.add("Cos", phases), hidden)

    model = Model(build, positions=(T.INT64, [2, 6]), mask=(T.INT64, [2, 6]))
    found = model.draw(draws.ends)
    assert found["positions"][0].tolist() == [*range(draws.POSITIONS - 5, draws.POSITIONS + 1)]
    assert np.array_equal(found["mask"], model.values["mask"])


def test_whole_numbers_come_from_their_whole_type_where_they_stay_whole() -> None:
    model = Model(lambda net: net.add("Div", "x", net.whole(3)), x=(T.INT64, [8, 8]))
    found = model.draw(draws.ends)["x"]
    assert found.max() == np.iinfo(np.int64).max
    assert found.min() == np.iinfo(np.int64).min + 1
    assert np.sum(np.abs(found) < 10) > 9


def test_infinities_are_drawn_where_values_are_ordered_alone() -> None:
    ordered = Model(lambda net: net.add("ArgMax", "x", axis=1), x=(T.FLOAT, [6, 8]))
    found = ordered.draw(draws.ends)["x"]
    assert (found[0] == -np.inf).all()
    assert (found[1] == LEAST).all()
    assert (ordered.draw(draws.lowest)["x"] == -np.inf).all()
    summed = Model(lambda net: net.add("Softmax", "x"), x=(T.FLOAT, [6, 8]))
    assert np.array_equal(summed.draw(draws.ends)["x"], summed.values["x"])
    assert (summed.draw(draws.lowest)["x"] == -1.5).all()


def test_indices_are_at_both_ends_of_a_table_and_count_from_its_end() -> None:
    model = Model(lambda net: net.add("Gather", net.constant(np.ones(9)), "i"), i=(T.INT64, [40]))
    model.inputs[0]["bounds"] = (0, 8)
    assert set(model.draw(draws.ends)["i"]) == {0, 8, -1, -9}
    assert set(model.draw(draws.highest)["i"]) == {8}
    assert set(model.draw(draws.silent)["i"]) == {0}


def test_bytes_are_sparse_about_the_number_that_stands_for_zero() -> None:
    def build(net: Net) -> str:
        net.weights.append(helper.make_tensor("zero", T.UINT8, [], [128]))
        real = net.add("DequantizeLinear", "x", net.constant(0.5), "zero")
        return net.add("Relu", real)

    model = Model(build, x=(T.UINT8, [3, 16]))
    found = model.draw(draws.sparse)["x"]
    assert np.sum(found != 128, axis=1).tolist() == [1, 1, 1]
    assert set(found.ravel()) == {128, 127}
    assert set(model.draw(draws.silent)["x"].ravel()) == {128}
    assert set(model.draw(draws.ends)["x"].ravel()) == {0, 255}


def test_values_lie_halfway_where_a_model_rounds_its_input_itself() -> None:
    model = Model(lambda net: net.add("Round", "x"), x=(T.FLOAT, [4, 9]))
    assert np.all(model.draw(draws.halfway)["x"] % 1 == 0.5)
    scaled = Model(
        lambda net: net.add("Round", net.add("Mul", "x", net.constant(0.1))), x=(T.FLOAT, [4, 9])
    )
    assert np.array_equal(scaled.draw(draws.halfway)["x"], scaled.values["x"])


def test_choices_among_an_inputs_own_values_are_decided_and_others_by_their_values() -> None:
    def allowed(operator: str) -> Any:
        net = Net((4, 9))
        index = net.add("ArgMax", net.add(operator, "x"), axis=1)
        model = net.model(index, check=False)
        model.graph.output[0].type.tensor_type.elem_type = T.INT64
        x = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
        (answer,) = right_answers.of(model, {"x": x}, 1e-3).outputs
        return answer.allowed

    assert allowed("Neg") is None
    assert allowed("Sin").shape == (4, 1, 9)


def test_the_epsilon_of_a_norm_is_that_of_its_attribute() -> None:
    def build(net: Net) -> str:
        return net.add("LayerNormalization", "x", *map(net.constant, np.ones((2, 9))), epsilon=1e-6)

    assert edges.epsilon(Model(build, x=(T.FLOAT, [4, 9])).model) == pytest.approx(1e-6)
