"""Params of TVM's candidates as people read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tuna.libraries.tvm.decisions import by_name, readable

TILE = ["SamplePerfectTile", ["l3"], [4, 64], ["v1", "v2"]]
UNROLL = ["SampleCategorical", [], [[0, 16, 64], [0.3, 0.3, 0.4]], ["v9"]]
POINT = ["SampleCategorical", [], [[0, 1, 2], [0.3, 0.3, 0.4]], ["v9"]]
USE = ["Annotate", ["b2", "v9"], ["meta_schedule.unroll_explicit"], []]
FIXED = ["Annotate", ["b2", 16], ["meta_schedule.parallel"], []]
BLOCK = ["GetSBlock", [], ["conv", "main"], ["b0"]]
LOOPS = ["GetLoops", ["b0"], [], ["l3"]]
PLACE = ["SampleComputeLocation", ["b0"], [], ["l5"]]

OURS = ["Annotate", ["b1", '"rows 1, columns 6"'], ["tuna.params"], []]


def record(instructions: list[Any], decisions: list[Any]) -> str:
    """Params as TVM writes them."""
    return json.dumps([[instructions, decisions], None, {"kind": "llvm"}, []])


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (record([TILE, TILE, FIXED], [[0, [1, 2, 4, 8]], [1, [3, 1]]]), "tiles 1·2·4·8 3·1"),
        (
            record([UNROLL, USE, PLACE, PLACE], [[0, 2], [2, -2], [3, 4]]),
            "unroll explicit 64, inlined, at loop 4",
        ),
        (record([UNROLL], [[0, 1]]), "choice 16"),
        (record([POINT], [[0, 1]]), "point 2 of 3"),
        (record([POINT, OURS], [[0, 1]]), "rows 1, columns 6"),
        (record([FIXED], []), record([FIXED], [])),
        ("4,2,16", "4,2,16"),
        ("[[1]]", "[[1]]"),
        ("", ""),
    ],
)
def test_decisions_are_one_short_line_and_other_text_stays(params: str, text: str) -> None:
    assert readable(params) == text


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (
            record([BLOCK, LOOPS, TILE, TILE], [[2, [1, 8]], [3, [3, 1]]]),
            {"SamplePerfectTile(conv0).0": 1, "SamplePerfectTile(conv0).1": 8}
            | {"SamplePerfectTile(conv0)#1.0": 3, "SamplePerfectTile(conv0)#1.1": 1},
        ),
        (
            record([BLOCK, UNROLL, USE, PLACE], [[1, 2], [3, -2]]),
            {
                "SampleCategorical(meta_schedule.unroll_explicit)": 64,
                "SampleComputeLocation(conv)": -2,
            },
        ),
        (record([POINT, OURS], [[0, 1]]), {"rows": 1, "columns": 6}),
        ("4,2,16", {}),
        ("[[1]]", {}),
        ("[" * 9999, {}),
    ],
)
def test_decisions_are_values_by_name(params: str, named: dict[str, Any]) -> None:
    assert by_name(params) == named
