"""Attention is one task, however a model writes it, and a reason is given where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from compiled import HERE, TARGET, error_of, planned
from nets import Net
from onnx import helper

from tuna.configs import AttentionConfig
from tuna_models.compiler import passes
from tuna_models.reading import importer

TOKENS, HEADS, SIZE, KEPT = 19, 2, 16, 5
HIDDEN = HEADS * SIZE


def heads(net: Net, perm: list[int], count: int = HEADS, batch: int = 2) -> str:
    """A product of the input in heads, whose axes batch, token, head, value are transposed."""
    weights = net.constant(net.random.normal(0, HIDDEN**-0.5, (HIDDEN, count * SIZE)))
    split = net.add("Reshape", net.add("MatMul", "x", weights), net.whole([batch, -1, count, SIZE]))
    return net.add("Transpose", split, perm=perm)


def joined(net: Net, answer: str) -> Any:
    mixed = net.add("Transpose", answer, perm=[0, 2, 1, 3])
    return net.model(net.add("Reshape", mixed, net.whole([2, TOKENS, HIDDEN])))


def divided(net: Net) -> Any:
    """Scores that are divided, as of most exporters."""
    q, k, v = (heads(net, perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
    scores = net.add("Div", net.add("MatMul", q, k), net.constant(SIZE**0.5))
    return joined(net, net.add("MatMul", net.add("Softmax", scores, axis=-1), v))


def shared(net: Net) -> Any:
    """A root of the scale on both sides, one head of keys for both, and a mask for each batch, of
    which one hides all."""
    root = net.constant(SIZE**-0.25)
    q, (k, v) = heads(net, [0, 2, 1, 3]), (heads(net, [0, 2, 1, 3], 1) for _ in "kv")
    whole = net.whole([2, HEADS, TOKENS, SIZE])
    k, v = (net.add("Expand", each, whole) for each in (k, v))
    k = net.add("Transpose", k, perm=[0, 1, 3, 2])
    scores = net.add("MatMul", net.add("Mul", q, root), net.add("Mul", k, root))
    mask = np.zeros((2, 1, 1, TOKENS))
    mask[0, ..., ::3], mask[1] = -np.inf, -np.inf
    weights = net.add("Softmax", net.add("Add", scores, net.constant(mask)), axis=-1)
    weights = net.add("Where", net.add("IsNaN", weights), net.constant(0.0), weights)
    return joined(net, net.add("MatMul", weights, v))


def three_axes(net: Net) -> Any:
    """Batch and heads in one axis, and a bias for each head beside one for each batch between
    reshapes."""
    folded = net.whole([2 * HEADS, TOKENS, SIZE])
    q, k, v = (net.add("Reshape", heads(net, [0, 2, 1, 3]), folded) for _ in "qkv")
    scores = net.add("MatMul", q, net.add("Transpose", k, perm=[0, 2, 1]))
    scores = net.add("Reshape", scores, net.whole([2, HEADS, TOKENS, TOKENS]))
    for shape in ((HEADS, TOKENS, TOKENS), (2, 1, TOKENS, TOKENS)):
        scores = net.add("Add", scores, net.constant(net.random.normal(0, 1, shape)))
    weights = net.add("Softmax", scores, axis=-1)
    weights = net.add("Reshape", weights, net.whole([2 * HEADS, TOKENS, TOKENS]))
    answer = net.add("MatMul", weights, v)
    return joined(net, net.add("Reshape", answer, net.whole([2, HEADS, TOKENS, SIZE])))


def operator(net: Net) -> Any:
    """ONNX's own operator."""
    net.opset = 23
    q, k, v = (heads(net, [0, 2, 1, 3]) for _ in "qkv")
    return joined(net, net.add("Attention", q, k, v, is_causal=1))


def masked(net: Net) -> Any:
    """ONNX's own operator with a mask that is computed: rows that it hides are zero."""
    net.opset = 23
    q, k, v = (heads(net, [0, 2, 1, 3]) for _ in "qkv")
    sums = net.add("ReduceSum", "x", net.whole([2]), keepdims=1)
    shown = net.add("Less", sums, net.constant(2.0))
    mask = net.add("And", net.add("Transpose", shown, perm=[0, 2, 1]), shown)
    mask = net.add("Unsqueeze", mask, net.whole([1]))
    return joined(net, net.add("Attention", q, k, v, mask))


def together(net: Net) -> Any:
    """Queries, keys and values of one product, as an axis of its own."""
    weights = net.constant(net.random.normal(0, HIDDEN**-0.5, (HIDDEN, 3 * HIDDEN)))
    whole = net.whole([2, TOKENS, 3, HEADS, SIZE])
    whole = net.add("Reshape", net.add("MatMul", "x", weights), whole)
    whole = net.add("Transpose", whole, perm=[2, 0, 3, 1, 4])
    q, k, v = (net.add("Gather", whole, net.whole(place), axis=0) for place in range(3))
    k = net.add("Transpose", k, perm=[0, 1, 3, 2])
    scores = net.add("Mul", net.add("MatMul", q, k), net.constant(0.25))
    return joined(net, net.add("MatMul", net.add("Softmax", scores, axis=-1), v))


def columns(net: Net) -> list[str]:
    """Queries, keys and values that are parts of the columns of one product."""
    weights = net.constant(net.random.normal(0, HIDDEN**-0.5, (HIDDEN, 3 * HIDDEN)))
    shape, parts = net.whole([2, TOKENS, HEADS, SIZE]), ["q", "k", "v"]
    sizes = net.whole([HIDDEN] * 3)
    product = net.add("MatMul", "x", weights)
    net.nodes.append(helper.make_node("Split", [product, sizes], parts, axis=2))
    by_head = (net.add("Reshape", part, shape) for part in parts)
    return [net.add("Transpose", each, perm=[0, 2, 1, 3]) for each in by_head]


def split(net: Net) -> Any:
    """Queries, keys and values in one product."""
    return attended(net, *columns(net))


def kept(net: Net) -> Any:
    """The same, keys and values behind those of the steps before."""
    q, *others = columns(net)
    cache = net.constant(net.random.normal(0, 1, (2, HEADS, KEPT, SIZE)))
    return attended(net, q, *(net.add("Concat", cache, each, axis=2) for each in others))


def attended(net: Net, q: str, k: str, v: str) -> Any:
    scores = net.add("MatMul", q, net.add("Transpose", k, perm=[0, 1, 3, 2]))
    scores = net.add("Mul", scores, net.constant(0.25))
    return joined(net, net.add("MatMul", net.add("Softmax", scores, axis=-1), v))


def chosen(net: Net) -> Any:
    """Scores that are replaced where a condition, which is computed, holds."""
    q, k, v = (heads(net, perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
    most = net.add("ReduceMax", "x", axes=[2], keepdims=0)
    hidden = net.add("Less", net.add("Unsqueeze", most, net.whole([1, 2])), net.constant(1.5))
    scores = net.add("Where", hidden, net.constant(-1e9), net.add("MatMul", q, k))
    return joined(net, net.add("MatMul", net.add("Softmax", scores, axis=-1), v))


#: What the task is beside its extents, of a scale of 0.25 and no mask
WRITTEN: dict[Callable[[Net], Any], dict[str, Any]] = {
    divided: {},
    shared: {
        **{"kv_heads": 1, "mask": "BK", "zero_rows": True},
        **{"k_layout": "BHSD", "v_layout": "BHSD"},  # of one head all orders are the same
    },
    three_axes: {"mask": "BHQK", "scale": 1.0},
    operator: {"causal": True},
    masked: {"mask": "BQK", "y_layout": "BHSD"},
    chosen: {"mask": "BK", "scale": 1.0},
    together: dict.fromkeys(("q_layout", "k_layout", "v_layout"), "BSNHD"),
    split: dict.fromkeys(("q_layout", "k_layout", "v_layout"), "BSNHD"),
    kept: {"keys": KEPT + TOKENS, "k_layout": "BHSD", "v_layout": "BHSD"},
}


@pytest.mark.parametrize("written", WRITTEN, ids=lambda written: written.__name__)
def test_attention_is_one_task_however_it_is_written(written: Callable[[Net], Any]) -> None:
    model = written(Net((2, TOKENS, HIDDEN)))
    expected = AttentionConfig(
        **{
            **{"batch_count": 2, "heads": HEADS, "kv_heads": HEADS, "scale": 0.25},
            **{"queries": TOKENS, "keys": TOKENS, "width": SIZE, "value_width": SIZE},
            **{f"{letter}_layout": "BSHD" for letter in "qkvy"},
            **WRITTEN[written],
        }
    )
    plan = planned(model, target=HERE)
    cores = [task.core for task, _ in plan.tasks()]
    assert [core for core in cores if isinstance(core, AttentionConfig)] == [expected]
    x = np.random.default_rng(2).normal(0, 1, (2, TOKENS, HIDDEN)).astype(np.float32)
    assert error_of(model, plan, {"x": x}, HERE) < 2e-6


def reasons(model: Any) -> str:
    analysis = passes.analyse(importer.to_relax(model, "net"), tvm.target.Target(TARGET))
    assert not [group for group in analysis.groups if isinstance(group.core, AttentionConfig)]
    return "; ".join(f"{label}: {reason}" for label, reason in analysis.reasons.items())


def test_a_reason_is_given_where_attention_stays_in_parts() -> None:
    net = Net((2, TOKENS, HIDDEN))
    q, k, v = (heads(net, perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
    weights = net.add("Softmax", net.add("MatMul", q, k), axis=-1)
    answer = net.add("MatMul", weights, v)
    label = f"softmax of 2x2x{TOKENS}x{TOKENS}: "
    assert label + "its weights are read more than once" in reasons(net.model(answer, weights))

    net = Net((2, TOKENS, HIDDEN))
    q, k, v = (heads(net, perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
    scores = net.add("MatMul", q, k)
    answer = net.add("MatMul", net.add("Softmax", scores, axis=-1), v)
    assert label + "its scores are read more than once" in reasons(net.model(answer, scores))

    net = Net((2, TOKENS, HIDDEN))
    q, k, v = (heads(net, perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
    weights = net.add("Softmax", net.add("MatMul", q, k), axis=-1)
    answer = net.add("MatMul", net.add("Relu", weights), v)
    assert label + "nn.relu follows its softmax" in reasons(net.model(answer))
