"""Lines that are keys of a find db, the layers that they name, and the layers of perf-db rows."""

from __future__ import annotations

import bz2
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configs_strategies import convs
from hypothesis import assume, given
from hypothesis import strategies as st
from shared_data import shared_data

from tuna.configs import (
    ConvConfig,
    DataType,
    Direction,
    parse_file,
    parse_line,
    parse_lines,
    problem,
    problem_key,
)
from tuna.configs.problem_key import (
    PERF_FIELDS,
    NoKey,
    PerfKey,
    conv_from_perf,
    from_conv,
    to_conv,
)
from tuna.errors import BadInput

KEY = "64-28-30-3x5-128-14-30-16-1x2-2x1-1x1-0-NCHW-FP32-F"
COMMAND = (
    "./bin/MIOpenDriver conv -n 16 -c 64 -H 28 -W 30 -k 128 -y 3 -x 5 -p 1 -q 2 -u 2 -v 1 -F 1"
)
VALUE = (
    "ConvAsm3x3U:0.401135,0,miopenConvolutionFwdAlgoDirect;"
    "GemmFwdRest:1.5,32768,miopenConvolutionFwdAlgoGEMM"
)


def layer(text: str) -> ConvConfig:
    """The layer of a key."""
    return to_conv(problem_key.parse(text))


@pytest.mark.parametrize("line", [KEY, f"{KEY}={VALUE}", f"  {KEY} = x", f"{KEY}="])
def test_a_key_names_the_same_layer_as_its_command(line: str) -> None:
    parsed = parse_lines([line], "x.fdb.txt")
    assert parsed.configs == tuple(parse_line(COMMAND))
    assert (parsed.counts.accepted, parsed.weights) == (1, (1,))


def test_keys_and_commands_may_stand_in_one_file() -> None:
    parsed = parse_lines(
        [f"{KEY}={VALUE}", COMMAND.replace("-F 1", "--forw=1"), "# note", "64-28=", "a=b"], "mixed"
    )
    assert (len(parsed.configs), parsed.weights) == (1, (2,))
    assert (parsed.counts.ignored, parsed.counts.rejected) == (1, 2)
    assert all("find-db key" in rejection.reason for rejection in parsed.rejections)


def test_the_file_that_miopen_wrote_can_be_imported() -> None:
    parsed = parse_file(
        shared_data("miopen_db", "written_by_miopen", "gfx906_60.HIP.3_4_0_.ufdb.txt")
    )
    assert [problem.text_of(config) for config in parsed.configs] == [
        f"64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-{letter}" for letter in "FBW"
    ]


def test_backward_keys_begin_with_the_forward_output() -> None:
    for letter in "BW":
        config = layer(f"64-29-29-3x3-32-57-58-8-1x1-2x2-1x1-0-NHWC-NHWC-NHWC-FP16-{letter}_g4")
        assert (config.in_channels, config.in_h, config.in_w, config.out_channels) == (
            32,
            57,
            58,
            64,
        )
        assert (config.output_size, config.group_count, config.in_layout) == ((29, 29), 4, "NHWC")
        assert (config.data_type, config.direction) == (DataType.FP16, Direction(letter))


def test_three_dimensions_dilation_and_int8() -> None:
    text = "8-7-14-15-1x3x3-16-4-12-13-2-0x1x1-2x1x1-1x2x2-0-NCDHW-INT8-F"
    config = layer(text)
    assert (config.spatial_dim, config.in_d, config.fil_d, config.conv_stride_d) == (3, 7, 1, 2)
    assert (config.dilation_h, config.data_type) == (2, DataType.INT8)
    assert from_conv(config).text() == text


@given(convs())
def test_every_layer_with_a_key_is_found_again_from_it(config: ConvConfig) -> None:
    key = problem.text_of(config)
    assume(key is not None and config.mode == "conv")
    assert key is not None
    assert layer(key) == config


@given(convs(), st.data())
def test_every_layer_with_a_perf_row_gives_a_layer_with_that_row(
    config: ConvConfig, data: st.DataObject
) -> None:
    key = problem_key.key_of(config)
    assume(key is not None)
    assert key is not None
    row = key.perf()
    found = conv_from_perf(row)
    assert from_conv(found).perf() == row
    for axis in "dhw"[3 - config.spatial_dim :]:
        more = getattr(config, f"in_{axis}") - getattr(found, f"in_{axis}")
        stride = getattr(config, f"conv_stride_{axis}")
        assert 0 <= more < stride if config.direction is not Direction.FORWARD else more == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{KEY}_ciFP8_cwFP8", "tensor casts .ciFP8_cwFP8."),
        (KEY.replace("1x1-0-NCHW", "1x1-1-NCHW"), "with a bias"),
        (KEY.replace("FP32", "FP32FP16FP32"), "the data type FP32FP16FP32"),
        (
            KEY.replace("FP32", "INT8INT8INT32"),
            "the data type INT8INT8INT32: use FP32, FP16, BF16, INT8",
        ),
        (KEY.replace("NCHW", "NCHW-NHWC-NCHW"), "differ in layout .NCHW, NHWC, NCHW."),
        (KEY.replace("NCHW", "CHWN-CHWN-CHWN"), "the layout CHWN in 2 dimensions"),
        (KEY.replace("FP32-F", "INT8-W").replace("64-28-30", "64-14-30", 1), "forward only"),
    ],
)
def test_a_key_of_a_layer_that_tuna_does_not_have_is_unsupported_not_wrong(
    text: str, reason: str
) -> None:
    parsed = parse_lines([f"{text}={VALUE}"], "x.fdb.txt")
    assert (parsed.counts.unsupported, parsed.counts.rejected, parsed.configs) == (1, 0, ())
    if "INT8-W" not in text:
        with pytest.raises(NoKey, match=reason):
            layer(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            KEY.replace("-14-30-", "-15-30-"),
            "is not a convolution: the layer with its sizes has 64-28-30-.*-14-30-16",
        ),
        (KEY.replace("FP32-F", "FP32-B"), "is not a convolution"),
        (f"{KEY}_g5", "group_count 5 must divide"),
        (KEY.replace("28", "0", 1), "in_h must be at least 1"),
        (KEY.replace("3x5", "99x5"), "the filter does not fit along h"),
        (KEY.replace("64", "9" * 30, 1), "in_channels must be at most"),
    ],
)
def test_a_key_whose_numbers_do_not_fit_together_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as caught:
        layer(text)
    assert not isinstance(caught.value, NoKey)
    assert parse_lines([text], "x").counts.rejected == 1


def test_all_keys_that_miopen_ships_for_a_device_lead_to_layers_and_back() -> None:
    text = bz2.decompress(
        shared_data("miopen_db", "gfx942130.HIP.fdb.txt.bz2").read_bytes()
    ).decode()
    lines = text.splitlines()
    parsed = parse_lines(lines, "gfx942130.HIP.fdb.txt")
    assert (parsed.counts.accepted, len(parsed.configs), parsed.rejections) == (9600, 9600, ())
    assert [problem.text_of(config) for config in parsed.configs] == [
        line.partition("=")[0] for line in lines
    ]


def _rows(packed: Path, folder: Path) -> list[PerfKey]:
    """The rows of the table `config` of a packed perf db."""
    path = folder / "perf.db"
    path.write_bytes(bz2.decompress(packed.read_bytes()))
    with closing(sqlite3.connect(path)) as db:
        return [
            PerfKey(*row)
            for row in db.execute(f"SELECT {', '.join(PERF_FIELDS)} FROM config ORDER BY id")
        ]


@pytest.mark.parametrize(
    ("name", "rows", "wrong"), [("gfx1030_36", 5217, 3), ("gfx942130", 9393, 0)]
)
def test_the_rows_of_a_real_perf_db_lead_to_layers_and_back(
    name: str, rows: int, wrong: int, tmp_path: Path
) -> None:
    """Three rows that MIOpen ships hold an output of -5 x -5, of a 7 x 7 filter that does not fit
    into its input."""
    refused: Counter[str] = Counter()
    keys = _rows(shared_data("miopen_db", f"{name}.db.bz2"), tmp_path)
    assert len(keys) == rows
    for key in keys:
        try:
            assert from_conv(conv_from_perf(key)).perf() == key
        except BadInput as error:
            refused[str(error)] += 1
    assert refused == Counter({"in_h must be at least 0, got -5": wrong} if wrong else {})


def test_the_forward_input_of_a_backward_row_is_the_smallest_that_fits() -> None:
    config = layer("64-29-29-3x3-32-58-58-8-1x1-2x2-1x1-0-NCHW-FP32-B")
    row = from_conv(config).perf()
    assert (row.in_h, conv_from_perf(row).in_h) == (29, 57)
    dilated = ConvConfig(
        1, 8, 20, 20, 8, 3, 3, dilation_h=3, dilation_w=2, direction=Direction.BACKWARD_WEIGHTS
    )
    assert conv_from_perf(from_conv(dilated).perf()) == dilated


def test_a_pad_larger_than_the_layer_leaves_an_input_of_at_least_1() -> None:
    config = ConvConfig(1, 8, 1, 1, 8, 1, 1, 3, 3, 7, 7, direction=Direction.BACKWARD_DATA)
    assert config.output_size == (1, 1)
    assert conv_from_perf(from_conv(config).perf()) == config


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"bias": 1}, NoKey),
        ({"layout": "NCHWc4"}, NoKey),
        ({"data_type": "INT8INT8INT32"}, NoKey),
        ({"spatial_dim": 4}, NoKey),
        ({"direction": "X"}, BadInput),
        ({"in_h": "28"}, BadInput),
        ({"in_h": None}, BadInput),
        ({"in_d": 2}, BadInput),
        ({"conv_stride_d": 1}, BadInput),
        ({"conv_stride_h": 0}, BadInput),
        ({"pad_h": 40, "direction": "B"}, BadInput),
    ],
)
def test_a_row_without_a_layer_is_refused(change: dict[str, Any], error: type[BadInput]) -> None:
    row = replace(problem_key.parse(KEY).perf(), **change)
    with pytest.raises(error):
        conv_from_perf(row)
