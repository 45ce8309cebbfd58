"""An index beyond the end of a table is an error of the run, whatever it comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from compiled import TARGET, compile_to
from compiled import planned as planned_model
from compiled import run as answer_of
from nets import Net
from onnx import TensorProto
from tvm import relax

from tuna.errors import BadInput
from tuna_models.compiler.build import Planned
from tuna_models.compiler.program import machine_of

Read = Callable[[Net], str]


def planned(write: Read, *shape: int, kind: int = TensorProto.INT64) -> Planned:
    """The model that `write` adds to a net with the input `ids`."""
    net = Net(())
    return planned_model(net.model(write(net), inputs=[("ids", kind, shape)], check=False))


def table(net: Net, *shape: int) -> str:
    return net.constant(np.arange(np.prod(shape)).reshape(shape))


def gather(net: Net) -> str:
    return net.add("Gather", table(net, 7, 3), "ids")


def by_the_second_axis(net: Net) -> str:
    return net.add("Gather", table(net, 3, 7), "ids", axis=1)


def shifted(net: Net) -> str:
    ids = net.add(
        "Reshape",
        net.add("Sub", net.add("Add", "ids", net.whole(3)), net.whole(3)),
        net.whole([-1]),
    )
    return net.add("Gather", table(net, 7), ids)


def elements(net: Net) -> str:
    return net.add("GatherElements", table(net, 7, 1), "ids")


def scatter(net: Net) -> str:
    return net.add("ScatterElements", table(net, 7, 1), "ids", net.constant([[-1.0], [-2.0]]))


def nd(net: Net) -> str:
    return net.add("GatherND", table(net, 7, 7), net.add("Concat", "ids", "ids", axis=1))


def scatter_nd(net: Net) -> str:
    return net.add("ScatterND", table(net, 7), "ids", net.constant([-1.0, -2.0]))


def run(found: Planned, ids: Any) -> Any:
    (answer,) = answer_of(found, ids)
    return answer


@pytest.mark.parametrize(
    "write", [gather, by_the_second_axis, shifted, elements, scatter, nd, scatter_nd]
)
def test_an_index_beyond_a_table_is_an_error_that_names_the_input(write: Read) -> None:
    machine = machine_of(planned(write, 2, 1), tvm.target.Target(TARGET))
    ends = [machine["main"](tvm.runtime.tensor(np.array([[first], [6]]))) for first in (0, -7)]
    assert np.array_equal(ends[0].numpy(), ends[1].numpy())
    for beyond in (7, -8, 500_000_000):
        with pytest.raises(IndexError, match=r"from the input ids is beyond .* a table of 7"):
            machine["main"](tvm.runtime.tensor(np.array([[1], [beyond]])))


def test_the_image_of_a_region_is_checked() -> None:
    def write(net: Net) -> str:
        regions = net.constant([[0, 0, 2, 2], [1, 1, 3, 3]])
        images = table(net, 3, 2, 6, 6)
        return net.add("RoiAlign", images, regions, "ids", output_height=2, output_width=2)

    found = planned(write, 2)
    assert run(found, np.array([0, 2])).shape == (2, 2, 2, 2)
    with pytest.raises(IndexError, match=r"from the input ids is beyond .* a table of 3"):
        run(found, np.array([0, 3]))


@pytest.mark.parametrize("place", [0, 1])
def test_each_index_of_a_tensor_is_checked_against_its_axis(place: int) -> None:
    x = relax.Var("x", relax.TensorType((7, 5), "float32"))
    ids = [relax.Var(name, relax.TensorType((2,), "int64")) for name in ("rows", "columns")]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, *ids]):
        with builder.dataflow():
            value = builder.emit(relax.op.index_tensor(x, relax.Tuple(ids)))
            answer = builder.emit_output(value)
        builder.emit_func_output(answer)
    made = machine_of(planned_model(builder.get()), tvm.target.Target(TARGET))
    values, given = np.random.default_rng(0).random((7, 5), np.float32), [[0, 6], [4, 0]]
    tensors = map(tvm.runtime.tensor, (values, *map(np.array, given)))
    assert np.array_equal(made["main"](*tensors).numpy(), values[tuple(given)])
    given[place] = [0, (7, 5)[place]]
    with pytest.raises(IndexError, match=f"from the input {('rows', 'columns')[place]}"):
        made["main"](*map(tvm.runtime.tensor, (values, *map(np.array, given))))


def test_an_index_computed_from_numbers_is_checked_where_it_is_used() -> None:
    def write(net: Net) -> str:
        return net.add("Gather", table(net, 7), net.add("Cast", "ids", to=TensorProto.INT64))

    found = planned(write, 2, kind=TensorProto.FLOAT)
    assert list(run(found, np.array([6.5, -1.2], np.float32))) == [6.0, 6.0]
    with pytest.raises(IndexError, match="from the input ids"):
        run(found, np.array([0.0, 7.0], np.float32))


def test_a_built_library_checks_its_indices_without_tuna(tmp_path: Path) -> None:
    compile_to(planned(gather, 2), TARGET, tmp_path / "net.so")
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "net.so")), tvm.cpu())
    assert machine["main"](tvm.runtime.tensor(np.array([6, -7]))).shape == (2, 3)
    with pytest.raises(IndexError, match="an index computed from the input ids is beyond the end"):
        machine["main"](tvm.runtime.tensor(np.array([6, 130])))


def positions(net: Net) -> str:
    return net.add("Gather", table(net, 7, 3), net.whole([0, -7, 6]))


def limited(net: Net) -> str:
    ids = net.add("Max", net.add("Min", "ids", net.whole(6)), net.whole(0))
    return net.add("Gather", table(net, 7), ids)


def bytes_of(net: Net) -> str:
    return net.add("Gather", table(net, 256), net.add("Cast", "ids", to=TensorProto.UINT8))


@pytest.mark.parametrize("write", [positions, limited, bytes_of])
def test_indices_that_are_proven_are_not_checked(write: Read) -> None:
    assert "check_indices" not in {task.name for task, _ in planned(write, 2).tasks()}


def test_a_range_is_not_proven_where_a_cast_leaves_it() -> None:
    def write(net: Net) -> str:
        ids = net.add("Max", net.add("Min", "ids", net.whole(6)), net.whole(-1))
        return net.add("Gather", table(net, 7), net.add("Cast", ids, to=TensorProto.UINT8))

    with pytest.raises(IndexError, match="from the input ids"):
        run(planned(write, 1), np.array([-1]))


def test_indices_are_checked_once_for_tables_of_the_same_size() -> None:
    def write(net: Net) -> str:
        return net.add("Concat", scatter(net), scatter(net), axis=0)

    counts = {task.name: count for task, count in planned(write, 2, 1).tasks()}
    assert counts["check_indices"] == 1


def test_a_constant_index_beyond_a_table_is_refused() -> None:
    def write(net: Net) -> str:
        return net.add("Gather", net.add("Cast", "ids", to=TensorProto.FLOAT), net.whole([2]))

    with pytest.raises(
        BadInput, match=r"the operator Gather \(v1\): its index 2 is beyond the end of 2"
    ):
        planned(write, 2)
