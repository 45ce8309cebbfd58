"""Normalisations of layers, groups and instances that keep digits where the mean is far larger than
the deviations from it. Imports TVM.

TVM takes E[x^2] - E[x]^2 for the variance, which has no right digit for values near 128 that differ
by less than 0.03. Here the mean comes first, then the sums of the deviations d and of d^2 (the
corrected two-pass algorithm of Chan, Golub and LeVeque, 1983):

    mean = sum(x) / n     d = x - mean     error = sum(d) / n     variance = sum(d^2) / n - error^2

The error is that of the mean's rounding. A sum goes over all axes but the last, then over the last,
so that each has few terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import te, tirx

_Place = Sequence[Any]
_both = te.comm_reducer(
    lambda one, other: (one[0] + other[0], one[1] + other[1]),
    lambda kind, other: (tirx.const(0.0, kind), tirx.const(0.0, other)),
    name="both",
)


def layer_norm(x: Any, gamma: Any, beta: Any, axes: _Place, epsilon: float) -> Any:
    """Normalise over some axes, with a factor and a summand for each place on them."""
    reduced = [int(axis) % len(x.shape) for axis in axes]
    return _over(x, gamma, beta, reduced, reduced, epsilon)


def instance_norm(
    x: Any, gamma: Any, beta: Any, channel_axis: int, axes: _Place, epsilon: float
) -> Any:
    """Normalise over some axes, with a factor and a summand for each channel."""
    reduced = [int(axis) % len(x.shape) for axis in axes]
    return _over(x, gamma, beta, reduced, [channel_axis % len(x.shape)], epsilon)


def group_norm(
    x: Any, gamma: Any, beta: Any, groups: int, channel_axis: int, axes: _Place, epsilon: float
) -> Any:
    """Normalise over some axes and the channels of a group, with weights for each channel."""
    rank, each = len(x.shape), int(x.shape[channel_axis]) // groups
    channel, reduced = channel_axis % rank, [int(axis) % rank for axis in axes]
    outer = [axis for axis in range(rank) if axis not in (channel, *reduced)]

    def read(place: _Place, inside: _Place) -> Any:
        (*places, group), (lane, *others) = place, inside
        at = dict(zip([*outer, *reduced], [*places, *others], strict=True))
        return x[tuple(at.get(axis, group * each + lane) for axis in range(rank))]

    value = _normalised(
        [*(x.shape[axis] for axis in outer), groups],
        [each, *(x.shape[axis] for axis in reduced)],
        read,
        epsilon,
    )

    def answer(*at: Any) -> Any:
        group, lane = tirx.floordiv(at[channel], each), tirx.floormod(at[channel], each)
        place = [*(at[axis] for axis in outer), group]
        normal = value(place, [lane, *(at[axis] for axis in reduced)])
        return _weighted(normal, gamma, beta, [at[channel]], x)

    return te.compute(x.shape, answer, name="group_norm")


def _over(x: Any, gamma: Any, beta: Any, reduced: _Place, weighted: _Place, epsilon: float) -> Any:
    rank = len(x.shape)
    outer = [axis for axis in range(rank) if axis not in reduced]

    def read(place: _Place, inside: _Place) -> Any:
        at = dict(zip([*outer, *reduced], [*place, *inside], strict=True))
        return x[tuple(at[axis] for axis in range(rank))]

    value = _normalised(
        [x.shape[axis] for axis in outer], [x.shape[axis] for axis in reduced], read, epsilon
    )

    def answer(*at: Any) -> Any:
        found = value([at[axis] for axis in outer], [at[axis] for axis in reduced])
        return _weighted(found, gamma, beta, [at[axis] for axis in weighted], x)

    return te.compute(x.shape, answer, name="normalised")


def _weighted(value: Any, gamma: Any, beta: Any, at: _Place, like: Any) -> Any:
    factor, summand = (weights(*at).astype("float32") for weights in (gamma, beta))
    return (value * factor + summand).astype(like.dtype)


def _normalised(
    outer: _Place, inner: _Place, read: Callable[[_Place, _Place], Any], epsilon: float
) -> Callable[[_Place, _Place], Any]:
    """Return the normalised value, in fp32, by its place among the groups and in the group."""
    count = tirx.const(1.0 / math.prod(map(int, inner)), "float32")
    rank = len(outer)
    *first, last = inner

    def summed(extents: _Place, over: _Place, name: str, term: Callable[..., Any]) -> Any:
        axes = [te.reduce_axis((0, extent), f"k{at}") for at, extent in enumerate(over)]
        return te.compute(extents, lambda *at: term(at, axes), name=name)

    def mean_of(at: _Place) -> Any:
        return total(*at) * count

    def deviation(place: _Place, inside: _Place) -> Any:
        return read(place, inside).astype("float32") - mean_of(place)

    def term(at: _Place, axes: _Place) -> Any:
        return te.sum(read(at[:rank], [*axes, *at[rank:]]).astype("float32"), axis=axes)

    def terms(at: _Place, axes: _Place) -> Any:
        value = deviation(at[:rank], [*axes, *at[rank:]])
        return _both((value, value * value), axis=axes)

    def rest(at: _Place, axes: _Place) -> Any:
        return te.sum(parts(*at, *axes), axis=axes)

    def rests(at: _Place, axes: _Place) -> Any:
        return _both((first_sum(*at, *axes), two(*at, *axes)), axis=axes)

    if first:
        parts = summed([*outer, last], first, "parts", term)
        total = summed(outer, [last], "total", rest)
        first_sum, two = summed([*outer, last], first, "squares", terms)
        error, power = summed(outer, [last], "power", rests)
    else:
        total = summed(outer, [last], "total", term)
        error, power = summed(outer, [last], "power", terms)

    def value(place: _Place, inside: _Place) -> Any:
        off = error(*place) * count
        variance = power(*place) * count - off * off
        root = tirx.rsqrt(variance + tirx.const(epsilon, "float32"))
        return (deviation(place, inside) - off) * root

    return value


def _legalized(builder: Any, call: Any, function: Callable[..., Any], **options: Any) -> Any:
    x, gamma, beta = call.args
    axes, epsilon = call.attrs.axes, float(call.attrs.epsilon)
    return builder.call_te(function, x, gamma, beta, axes=axes, epsilon=epsilon, **options)


#: For `relax.transform.LegalizeOps`.
LEGALIZATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "relax.nn.layer_norm": lambda builder, call: _legalized(builder, call, layer_norm),
    "relax.nn.instance_norm": lambda builder, call: _legalized(
        builder, call, instance_norm, channel_axis=int(call.attrs.channel_axis)
    ),
    "relax.nn.group_norm": lambda builder, call: _legalized(
        builder,
        call,
        group_norm,
        groups=int(call.attrs.num_groups),
        channel_axis=int(call.attrs.channel_axis),
    ),
}
