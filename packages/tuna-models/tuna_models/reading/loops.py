"""The number of a loop's iterations, as far as known values decide it. Imports onnx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import numpy_helper

from tuna_models.reading.bodies import names_read, subgraphs


def iterations(
    node: Any,
    body: Any,
    known: Mapping[str, Any],
    run: Callable[[Any, dict[str, Any]], list[Any]],
    most: int,
) -> int | None:
    """Return how often a Loop runs its body; None where values that are not known decide that, or
    where it is more often than `most`.

    `run` computes the outputs of an operator from known values by name.
    """
    trips, going, *carried = [*node.input, "", ""][: max(len(node.input), 2)]
    if (trips and trips not in known) or (going and going not in known):
        return None
    if going and not np.asarray(known[going]).item():
        return 0
    limit = int(np.asarray(known[trips]).item()) if trips else most + 1
    if goes_on(body):
        return limit if limit <= most else None
    return _counted(body, carried, known, run, min(limit, most + 1), most)


def _counted(
    body: Any,
    carried: list[str],
    known: Mapping[str, Any],
    run: Callable[[Any, dict[str, Any]], list[Any]],
    limit: int,
    most: int,
) -> int | None:
    """Compute the condition iteration by iteration, and the states that it depends on."""
    number, going, *states = (value.name for value in body.input)
    condition, *following = (value.name for value in body.output)
    needed, nodes = _slice(body, dict(zip(states, following, strict=False)), condition)
    if any(any(subgraphs(each)) for each in nodes):
        return None
    inside = {name for each in body.node for name in each.output} | {number, going, *states}
    outer = {name: value for name, value in known.items() if name not in inside}
    outer |= {tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}
    now = {
        name: known[given]
        for name, given in zip(states, carried, strict=False)
        if name in needed and given in known
    }
    for count in range(limit):
        values = {**outer, **now, number: np.int64(count), going: np.bool_(True)}
        for each in nodes:
            if all(name in values for name in each.input if name):
                values.update(zip(each.output, run(each, values), strict=False))
        if condition not in values:
            return None
        if not np.asarray(values[condition]).item():
            return count + 1
        now = {
            name: values[value]
            for name, value in zip(states, following, strict=False)
            if name in needed and value in values
        }
    return limit if limit <= most else None


def _slice(body: Any, states: Mapping[str, str], condition: str) -> tuple[set[str], list[Any]]:
    """The names on which a condition depends, in this iteration or a later one, and the operators
    that make them. `states` are the body's outputs by its inputs."""
    makers = {name: each for each in body.node for name in each.output if name}
    needed, waiting = {condition}, [condition]
    while waiting:
        name = waiting.pop()
        read = list(names_read(makers[name])) if name in makers else []
        read += [states[name]] if name in states else []
        waiting += [each for each in read if each and each not in needed]
        needed.update(read)
    return needed, [each for each in body.node if needed.intersection(each.output)]


def goes_on(body: Any) -> bool:
    """Whether no iteration ends the loop."""
    makers = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while name in makers and makers[name].op_type in ("Identity", "Cast"):
        name = makers[name].input[0]
    if name == body.input[1].name:
        return True
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}
    if name in makers and makers[name].op_type == "Constant":
        constants[name] = numpy_helper.to_array(makers[name].attribute[0].t)
    return name in constants and bool(np.all(constants[name]))
