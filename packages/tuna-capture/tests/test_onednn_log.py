"""oneDNN's verbose lines, of its versions 1 to 3: which layers they name, and what they say that no
config holds."""

from __future__ import annotations

import pytest

from tuna.configs import (
    ConvConfig,
    DataType,
    Direction,
    GemmConfig,
    UnsupportedLine,
    parse_lines,
    read_line,
)
from tuna.errors import BadInput
from tuna_capture.onednn_log import LINE_FORM

CONV = ConvConfig(2, 16, 32, 32, 32, 3, 3, 1, 1, 2, 2, group_count=2)
PLAIN = (
    "src:f32::blocked:abcd::f0 wei:f32:a:blocked:Acdb8a::f0 bia:undef::undef:::"
    " dst:f32:a:blocked:aBcd8b::f0"
)
SIZES = "g2mb2_ic16oc32_ih32oh16kh3sh2dh0ph1_iw32ow16kw3sw2dw0pw1"


def line(
    problem: str = SIZES,
    memory: str = PLAIN,
    *,
    prop: str = "forward_training",
    kind: str = "convolution",
    attrs: str = "",
) -> str:
    """A line of version 3."""
    return (
        f"onednn_verbose,v1,primitive,exec,cpu,{kind},jit:avx2,{prop},{memory},{attrs},alg:x,"
        f"{problem},0.0541992"
    )


def matmul(
    problem: str, src: str, wei: str, dst: str = "f32::blocked:ab::f0", attrs: str = ""
) -> str:
    """A line of version 3."""
    return line(problem, f"src:{src} wei:{wei} dst:{dst}", prop="undef", kind="matmul", attrs=attrs)


V2 = (
    "src_f32::blocked:abcd:f0 wei_f32:p:blocked:Acdb8a:f0 bia_undef::undef::f0"
    " dst_f32:a:blocked:aBcd8b:f0"
)


@pytest.mark.parametrize(
    "text",
    [
        line(),
        line().replace("v1,", "v1,1693533460193.346924,"),
        line().replace("v1,primitive,", ""),
        line(memory=V2).replace("v1,primitive,", ""),
        line(memory=V2).replace(
            "onednn_verbose,v1,primitive,", "dnnl_verbose,1607393146348.667969,"
        ),
        "epoch 3 " + line(),
        line("g2mb2ic16ih32oc32oh16kh3sh2dh0ph1iw32ow16kw3sw2dw0pw1"),
        line(prop="forward_inference"),
    ],
)
def test_every_version_names_the_same_convolution(text: str) -> None:
    assert read_line(text) == [CONV]


@pytest.mark.parametrize(
    ("problem", "fields"),
    [
        (
            "mb1_ic4oc8_ih9oh5kh3sh1dh1ph0_iw9ow5kw3sw1dw1pw0",
            ConvConfig(1, 4, 9, 9, 8, 3, 3, dilation_h=2, dilation_w=2),
        ),
        ("mb1_ic4oc8_iw20ow18kw3sw1dw0pw0", ConvConfig(1, 4, 1, 20, 8, 1, 3)),
    ],
)
def test_dilations_count_from_0_and_a_single_axis_is_the_width(
    problem: str, fields: ConvConfig
) -> None:
    assert read_line(line(problem)) == [fields]


def test_three_dimensions_and_backward_passes() -> None:
    problem = "mb1_ic4oc8_id6od4kd3sd1dd0pd0_ih6oh4kh3sh1dh0ph0_iw6ow4kw3sw1dw0pw0"
    memory = "src:bf16::blocked:acdeb::f0 wei:bf16:a:blocked:any::f0 dst:bf16:a:blocked:acdeb::f0"
    (config,) = read_line(line(problem, memory, prop="backward_weights"))
    assert config.label == "conv 1x4x6x6x6 k8 3x3x3 s1 p0 NDHWC bf16 W"
    (config,) = read_line(line(prop="backward_data"))
    assert config == CONV.facing(Direction.BACKWARD_DATA)


def test_a_deconvolution_is_a_transposed_convolution() -> None:
    problem = "mb1_ic4oc8_ih8oh16kh3sh2dh0ph1_iw8ow16kw3sw2dw0pw1"
    (config,) = read_line(line(problem, kind="deconvolution"))
    assert isinstance(config, ConvConfig)
    assert (config.mode, config.trans_output_pad_h, config.output_size) == ("trans", 1, (16, 16))


def test_a_layout_that_onednn_chose_is_not_the_programs() -> None:
    chosen = PLAIN.replace("src:f32::blocked:abcd", "src:f32:a:blocked:acdb")
    (by_library,) = read_line(line(memory=chosen))
    (by_program,) = read_line(line(memory=PLAIN.replace("abcd", "acdb")))
    assert (by_library.to_json()["in_layout"], by_program.to_json()["in_layout"]) == (
        "NCHW",
        "NHWC",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line(kind="reorder"), "oneDNN's reorder"),
        (line(SIZES.replace("oh16", "oh17")), "padded differently"),
        (line(SIZES.replace("sh2", "sh0")), "padded differently"),
        (
            line(memory=PLAIN.replace("src:f32", "src:f64")),
            "no type for oneDNN's convolution of f64, f32, f32",
        ),
        (line(memory=PLAIN.replace("src:f32", "src:u8")), "oneDNN's convolution of u8, f32, f32"),
        (line(memory=PLAIN.replace("dst:f32", "dst:bf16")), "of f32, f32, bf16"),
        (line(prop="backward_bias"), "no direction"),
        (line().replace("primitive,", "graph,"), "graphs"),
        (matmul("3x4:4x5", "f32::sparse:csr::f0", "f32::blocked:ab::f0"), "sparse"),
    ],
)
def test_what_tuna_does_not_tune_is_named(text: str, reason: str) -> None:
    with pytest.raises(UnsupportedLine, match=reason):
        read_line(text)


@pytest.mark.parametrize("cut", [12, 40, 75, 100, 150, 190, 225])
def test_half_a_line_is_a_mistake_and_no_layer(cut: int) -> None:
    parsed = parse_lines([line(), line()[:-cut]], "log")
    assert (parsed.counts.accepted, parsed.counts.rejected, parsed.weights) == (1, 1, (1,))


@pytest.mark.parametrize(
    "problem",
    ["mb1", "mb1_ic4", "mb1_ic4oc8_ih3", "mb1_??", SIZES.replace("ic16", "ic-16"), "x" * 99],
)
def test_sizes_that_cannot_be_are_a_mistake(problem: str) -> None:
    with pytest.raises(BadInput):
        read_line(line(problem))


def test_headers_and_creations_ask_for_nothing() -> None:
    others = [
        "onednn_verbose,v1,info,cpu,isa:Intel AVX2",
        "onednn_verbose,info,oneDNN v3.2.0 (commit 2a3fbc8)",
        "onednn_verbose,v1,primitive,info,template:operation,engine,primitive",
        "onednn_verbose,v1,graph,info,template:operation,engine,partition_id",
        line().replace("exec", "create:cache_miss"),
    ]
    parsed = parse_lines([*others, line(), line().replace("0.0541992", "0.1")], "log")
    assert (parsed.counts.ignored, parsed.counts.accepted, parsed.weights) == (5, 2, (2,))


def test_what_a_config_does_not_hold_is_counted() -> None:
    biased = PLAIN.replace("bia:undef::undef:::", "bia:f32::blocked:a::f0")
    attrs = "attr-scratchpad:user attr-post-ops:sum:1:0:f32+eltwise_relu:0"
    parsed = parse_lines(
        [line(memory=biased, attrs=attrs), line(memory=biased, attrs=attrs), line()], "log"
    )
    assert parsed.left_out == {"a bias": 2, "the post-op sum": 2, "the post-op eltwise_relu": 2}
    assert parsed.weights == (3,)


AB, BA = "f32::blocked:ab::f0", "f32::blocked:ba::f0"
ABC = "f32::blocked:abc::f0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (matmul("3x4:4x5", AB, BA), GemmConfig(3, 5, 4, trans_b=True)),
        (matmul("3x4:4x5:3x5", AB, AB), GemmConfig(3, 5, 4)),
        (matmul("3x4:4x5", BA, AB), GemmConfig(3, 5, 4, trans_a=True)),
        (matmul("3x4:4x5", "f32::blocked:ab:9x1:f0", AB), GemmConfig(3, 5, 4, lda=9)),
        (matmul("3x4:4x5", AB, "f32::blocked:ba:1x7:f0"), GemmConfig(3, 5, 4, trans_b=True, ldb=7)),
        (matmul("3x4:4x5", AB, "f32:a:blocked:BA16a64b::f0"), GemmConfig(3, 5, 4)),
        (matmul("6x3x4:6x4x5", ABC, ABC, ABC), GemmConfig(3, 5, 4, 6)),
        (matmul("6x3x4:1x4x5", ABC, ABC, ABC), GemmConfig(3, 5, 4, 6, stride_b=0)),
        (
            matmul(
                "2x6x3x4:2x6x4x5",
                "f32::blocked:abcd::f0",
                "f32::blocked:abdc::f0",
                "f32::blocked:abcd::f0",
            ),
            GemmConfig(3, 5, 4, 12, trans_b=True),
        ),
        (
            matmul("6x3x4:6x4x5", "f32::blocked:bac::f0", ABC, "f32::blocked:bac::f0"),
            GemmConfig(3, 5, 4, 6, lda=24, ldc=30, stride_a=4, stride_c=5),
        ),
        (
            matmul("3x4:4x5", "bf16::blocked:ab::f0", "bf16::blocked:ab::f0"),
            GemmConfig(3, 5, 4, data_type=DataType.BF16, c_type=DataType.FP32),
        ),
        (
            matmul("3x4:4x5", "s8::blocked:ab::f0", "s8::blocked:ab::f0", "s32::blocked:ab::f0"),
            GemmConfig(3, 5, 4, data_type=DataType.INT8),
        ),
        (
            matmul(
                "3x64:64x5",
                "f8_e4m3::blocked:ab::f0",
                "f8_e5m2::blocked:ab::f0",
                "bf16::blocked:ab::f0",
                "attr-scales:src:0:f32+wei:3:f32:32x1+dst:2:f32",
            ),
            GemmConfig(
                *(3, 5, 64),
                data_type=DataType.FP8_E4M3,
                b_type=DataType.FP8_E5M2,
                c_type=DataType.BF16,
                scale_a="tensor",
                scale_b="block32x1_f32",
                scale_c="vector",
            ),
        ),
        (
            matmul(
                "3x4:4x5",
                "u8::blocked:ab::f0",
                "s8::blocked:ab::f0",
                attrs="attr-scales:src0:0:f32+wei:2:f32",
            ),
            GemmConfig(
                *(3, 5, 4),
                data_type=DataType.UINT8,
                b_type=DataType.INT8,
                c_type=DataType.FP32,
                scale_a="tensor",
                scale_b="vector",
            ),
        ),
        (
            (
                "onednn_verbose,exec,cpu,matmul,gemm:jit:f32,undef,src_f32::blocked:abc::f0"
                " wei_f32::blocked:abc::f0 bia_f32::blocked:abc::f0_mask4"
                " dst_f32::blocked:abc::f0,,,1x12800x128:1x128x64,39.0911"
            ),
            GemmConfig(12800, 64, 128),
        ),
        (
            matmul("3x4:4x5", AB, AB, attrs="attr-fpmath:bf16"),
            GemmConfig(3, 5, 4, compute_type="BF16"),
        ),
        (
            line(
                "m3n5k4",
                "src_f32::blocked:ba:f0 wei_f32::blocked:ab:f0 dst_f32::blocked:ab:f0",
                kind="gemm_api",
                attrs="lda:9 ",
            ),
            GemmConfig(3, 5, 4, trans_a=True, lda=9),
        ),
    ],
)
def test_products_are_gemms(text: str, expected: GemmConfig) -> None:
    assert read_line(text) == [expected]


@pytest.mark.parametrize(
    ("prop", "expected"),
    [
        ("forward_inference", GemmConfig(8, 32, 64, trans_b=True)),
        ("backward_data", GemmConfig(8, 64, 32)),
        ("backward_weights", GemmConfig(32, 64, 8, trans_a=True)),
    ],
)
def test_an_inner_product_is_a_gemm_in_each_direction(prop: str, expected: GemmConfig) -> None:
    memory = (
        "src:f32:a:blocked:ab::f0 wei:f32:a:blocked:ab::f0 bia:f32::blocked:a::f0"
        " dst:f32:a:blocked:ab::f0"
    )
    assert read_line(line("mb8ic4ih4iw4oc32", memory, prop=prop, kind="inner_product")) == [
        expected
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (matmul("3x4:4x5", AB, AB, BA), "stored transposed"),
        (matmul("3x4:4x5", "f32::blocked:ab:9x2:f0", AB), "both have gaps"),
        (matmul("2x6x3x4:1x6x4x5", *["f32::blocked:abcd::f0"] * 3), "no single stride"),
        (matmul("0x4:4x5", AB, AB), "empty"),
        (matmul("3x4:5x5", AB, AB), "do not fit"),
        (matmul("3x*:*x5", AB, AB), "cannot be read"),
        (matmul("3x4", AB, AB), "do not fit"),
        (matmul("3x4:4x5", AB, AB, attrs="attr-fpmath:any"), "fpmath any"),
    ],
)
def test_products_that_a_gemm_config_cannot_say_are_named(text: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read_line(text)


def test_equal_lines_ask_for_the_same_whatever_their_time() -> None:
    assert LINE_FORM.asks_for is not None
    assert LINE_FORM.asks_for(line()) == LINE_FORM.asks_for(line().replace("0.0541992", "99"))
    assert LINE_FORM.asks_for(line()) != LINE_FORM.asks_for(line(prop="backward_data"))
