"""Problem keys: MIOpen's own keys read and write back, and layers get the key that MIOpen gives
them."""

from __future__ import annotations

import bz2
import contextlib
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import shared_data

from tuna.configs import ConvConfig, DataType, Direction, problem_key
from tuna.configs.problem_key import NoKey, ProblemKey
from tuna.errors import BadInput
from tuna.libraries.miopen.formats import perf_db

counts = st.integers(1, 2**31 - 1)


@st.composite
def problem_keys(draw: st.DrawFn) -> ProblemKey:
    dims = draw(st.sampled_from([2, 3]))
    sizes = st.tuples(*[counts] * dims)
    small = st.tuples(*[st.integers(0, 9)] * dims)
    default = {2: "NCHW", 3: "NCDHW"}[dims]
    words = st.sampled_from([default, default.replace("C", "") + "C", "CHWN"])
    return ProblemKey(
        in_channels=draw(counts),
        in_size=draw(sizes),
        fil_size=draw(sizes),
        out_channels=draw(counts),
        out_size=draw(sizes),
        batchsize=draw(counts),
        pads=draw(small),
        strides=draw(small),
        dilations=draw(small),
        layouts=draw(st.tuples(words, words, words)),
        data_type=draw(st.sampled_from(["FP32", "FP16", "BF16", "INT8"])),
        direction=draw(st.sampled_from("FBW")),
        group_count=draw(st.integers(1, 64)),
        casts=draw(st.sampled_from(["", "_ciFP8", "_ciFP8_cwBF8_coFP8"])),
    )


@given(problem_keys())
def test_every_key_reads_back(key: ProblemKey) -> None:
    assert problem_key.parse(key.text()) == key


@given(problem_keys(), problem_keys())
def test_keys_have_the_same_perf_order_exactly_if_they_share_a_perf_row(
    one: ProblemKey, other: ProblemKey
) -> None:
    assert (perf_db.key_order(one.text()) == perf_db.key_order(other.text())) == (
        one.perf() == other.perf()
    )
    assert (
        ProblemKey(**{**vars(one), "out_size": other.out_size[: len(one.out_size)]}).perf()
        == one.perf()
    )


def test_the_perf_fields_of_two_dimensions_are_those_of_mituna() -> None:
    fields = problem_key.parse("1-161-700-5x20-32-81-350-2-2x9-2x2-1x1-0-NCHW-BF16-F").perf()
    assert astuple(fields) == (
        *("NCHW", "BF16", "F", 2, 1, 161, 700, 1, 5, 20, 1, 32, 2),
        *(2, 9, 0, 2, 2, 0, 1, 1, 0, 0, 1),
    )


def test_every_field_of_a_synthetic_key_gets_its_own_number() -> None:
    key = problem_key.parse(
        "1-2-3-4-5x6x7-8-9-10-11-12-13x14x15-16x17x18-19x20x21-22-NCDHW-FP32-W_g32"
    )
    assert astuple(key.perf()) == (
        *("NCDHW", "FP32", "W", 3, 1, 3, 4, 2, 6, 7, 5, 8, 12),
        *(14, 15, 13, 17, 18, 16, 20, 21, 19, 22, 32),
    )


def test_int8_has_fins_key_and_only_forward() -> None:
    """fin answers for `convint8 -n 4 -c 32 -H 28 -W 28 -k 32 -y 1 -x 1 -F 1` with this key."""
    layer = ConvConfig(4, 32, 28, 28, 32, 1, 1, data_type=DataType.INT8)
    assert (
        problem_key.from_conv(layer).text() == "32-28-28-1x1-32-28-28-4-0x0-1x1-1x1-0-NCHW-INT8-F"
    )
    with pytest.raises(NoKey, match="forward only"):
        problem_key.from_conv(layer.facing(Direction.BACKWARD_DATA))


def test_a_transposed_layer_has_no_key() -> None:
    with pytest.raises(NoKey, match="transposed"):
        problem_key.from_conv(ConvConfig(1, 8, 9, 9, 8, 3, 3, mode="trans"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1-2-3",
        "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-X",
        "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F_q4",
        "64-28-28-3x3-64-28-28-16-1x1x1-1x1-1x1-0-NCHW-FP32-F",
        "064-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F",
        "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-NCHW-NCHW-FP32-F",
        "64-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F_g1",
        "six-28-28-3x3-64-28-28-16-1x1-1x1-1x1-0-NCHW-FP32-F",
    ],
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="not a find-db key"):
        problem_key.parse(text)


@given(st.text(alphabet="0123456789-xNCHWFP32_g", max_size=70))
def test_any_text_is_a_key_or_refused(text: str) -> None:
    with contextlib.suppress(BadInput):
        assert problem_key.parse(text).text() == text


@pytest.mark.parametrize("name", ["gfx942130", "gfx90a68", "gfx90878", "gfx1030_36"])
def test_the_keys_that_miopen_ships_read_and_write_back(name: str) -> None:
    lines = shared_data("miopen_db", f"{name}.HIP.fdb.txt.head").read_text().splitlines()
    assert len(lines) > 20
    for line in lines:
        key = line.partition("=")[0]
        parsed = problem_key.parse(key)
        assert parsed.text() == key


def test_miopens_keys_have_miopens_perf_rows() -> None:
    """Every one of the 9,393 rows that MIOpen ships for gfx942 is the row of a key that it
    ships."""
    text = bz2.decompress(
        shared_data("miopen_db", "gfx942130.HIP.fdb.txt.bz2").read_bytes()
    ).decode()
    ours = {problem_key.parse(line.partition("=")[0]).perf() for line in text.splitlines()}
    assert len(ours) > 9393
    theirs = {
        record.key for record in perf_db.read(shared_data("miopen_db", "gfx942130.trimmed.db"))
    }
    assert len(theirs) > 200
    assert theirs <= ours
