"""Models that would take all memory of a machine, sent to the service."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
import sqlalchemy as sa
from onnx import TensorProto, helper

from tuna import api
from tuna.db.models import Base, RequestRow
from tuna.settings import get_settings
from tuna_serve.requests import process


def _range(number: int) -> bytes:
    """A model with a constant range of so many elements."""
    ends = {"start": 0, "limit": number, "delta": 1}
    weights = [helper.make_tensor(name, TensorProto.INT64, [], [ends[name]]) for name in ends]
    nodes = [
        helper.make_node("Range", list(ends), ["r"], name="numbers"),
        helper.make_node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


def _rows() -> dict[str, int]:
    with api.reading(api.open_database()) as connection:
        count = sa.select(sa.func.count())
        return {
            table.name: connection.execute(count.select_from(table)).scalar_one()
            for table in Base.metadata.sorted_tables
        }


@pytest.mark.tvm
@pytest.mark.service
@pytest.mark.usefixtures("forked_children", "with_redis")
def test_a_bomb_ends_as_failed_with_its_operator_and_leaves_nothing(
    holder: Callable[..., httpx.Client],
) -> None:
    visitor = holder("submit")
    files = {"file": ("bomb.onnx", _range(10**12))}
    asked = visitor.post("/v1/requests", data={"name": "bomb"}, files=files).json()
    assert asked["state"] == "accepted"
    before = _rows()
    process.work_on(asked["id"])
    ended = visitor.get(f"/v1/requests/{asked['id']}").json()
    assert ended["state"] == "failed"
    assert "the operator Range (numbers) makes a tensor of 7.3 TiB" in ended["message"]
    assert "TUNA_REQUEST_MEMORY_MIB" in ended["message"]
    assert _rows() == before
    home = get_settings().home
    for folder in ("artifacts", "uploads"):
        assert not [path for path in (home / folder).rglob("*") if path.is_file()]
    with api.reading(api.open_database()) as connection:
        assert connection.execute(sa.select(RequestRow.upload_bytes)).scalar_one() == 0
