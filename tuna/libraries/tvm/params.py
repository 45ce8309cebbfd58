"""Short readable text of a candidate's parameters. Reads the record as JSON and needs no TVM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: Annotation with which one of our kernels says its parameters; `kernels.points` writes it.
OWN = "tuna.params"


def readable(params: str) -> str:
    """The parameters that a record names itself, or the decisions of a MetaSchedule record: `tiles
    4·2·1·8, unroll explicit 64`.

    Any other text stays as it is.
    """
    try:
        instructions, decisions = json.loads(params)[0]
        for name, inputs, attributes, _ in reversed(instructions):
            if name == "Annotate" and attributes == [OWN]:
                return str(json.loads(inputs[1]))
        return _text(instructions, dict(decisions)) or params
    except (ValueError, TypeError, LookupError, AttributeError):
        return params


def _text(instructions: Sequence[Any], decisions: Mapping[int, Any]) -> str:
    uses: dict[str, str] = {}
    for name, inputs, attributes, _ in instructions:
        uses.update(_annotated(name, inputs, attributes))
    tiles: list[str] = []
    others: list[str] = []
    for index, (name, _, attributes, outputs) in enumerate(instructions):
        if index not in decisions:
            continue
        decision = decisions[index]
        if name == "SamplePerfectTile":
            tiles.append("·".join(map(str, decision)))
        elif name == "SampleCategorical":
            values = attributes[0]
            if values == list(range(len(values))) and outputs[0] not in uses:
                others.append(f"point {decision + 1} of {len(values)}")
            else:
                others.append(f"{uses.get(outputs[0], 'choice')} {values[decision]}")
        elif name == "SampleComputeLocation":
            others.append(_location(decision))
        else:
            others.append(f"{name} {json.dumps(decision)}")
    return ", ".join([*(["tiles " + " ".join(tiles)] if tiles else []), *others])


def _annotated(
    name: str, inputs: Sequence[Any], attributes: Sequence[Any]
) -> list[tuple[str, str]]:
    """Return (the variable of a sampled value, words) for an annotation that uses the value."""
    if name != "Annotate" or not isinstance(inputs[1], str):
        return []
    return [(inputs[1], attributes[0].rpartition(".")[2].replace("_", " "))]


def _location(decision: int) -> str:
    """Return where a block is computed: -1 at the root, -2 inlined, else the number of a loop."""
    return {-1: "at root", -2: "inlined"}.get(decision, f"at loop {decision}")
