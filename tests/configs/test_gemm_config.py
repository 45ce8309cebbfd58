"""Matrix multiplications: validation and the MIOpenDriver gemm command."""

from __future__ import annotations

import pytest

from tuna.configs import ConvConfig, DataType, GemmConfig, from_json, parse_line
from tuna.errors import BadInput


def test_the_defaults_are_those_of_the_gemm_driver() -> None:
    assert parse_line("MIOpenDriver gemm") == [GemmConfig(256, 256, 256)]


def test_short_and_long_flags_say_the_same() -> None:
    expected = [GemmConfig(2, 3, 4, 5, trans_a=True, data_type=DataType.FP16)]
    assert parse_line("MIOpenDriver gemmfp16 -m 2 -n 3 -k 4 -b 5 -u 1 -v 0") == expected
    assert (
        parse_line("MIOpenDriver gemmfp16 --a_h 2 --b_w=3 --a_w 4 --batch_count 5 --transA 1")
        == expected
    )
    assert (
        parse_line("MIOpenDriver gemmfp16 --a_h 2 --b_w 3 --a_w 4 --batchsize 5 --transA 1")
        == expected
    )


def test_a_column_major_product_is_the_transposed_row_major_one() -> None:
    (config,) = parse_line("MIOpenDriver gemm -m 2 -n 3 -k 4 -u 1 -v 0 -C 1")
    assert config == GemmConfig(3, 2, 4, trans_a=False, trans_b=True)


def test_flags_about_the_run_are_ignored() -> None:
    assert parse_line("MIOpenDriver gemm -F 1 -i 10 -V 0 -t 1 -A 2.0 -B 0.0") == [
        GemmConfig(256, 256, 256)
    ]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("-m 0", "m must be at least 1"),
        ("-m 1.5", "flag -m needs a whole number"),
        ("-u 2", "--transA must be 0 or 1"),
        ("-B 1.0", "supported only with 0"),
        ("-H 4", "unknown flag -H"),
        ("-m", "flag -m has no value"),
        ("-m 2147483647 -n 2147483647 -k 2147483647", "too large"),
    ],
)
def test_a_wrong_gemm_line_is_refused_with_a_reason(flags: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        parse_line(f"MIOpenDriver gemm {flags}")


def test_flops_and_label() -> None:
    config = GemmConfig(128, 256, 64, 8, trans_b=True, data_type=DataType.FP16)
    assert config.flops == 2 * 8 * 128 * 256 * 64
    assert config.label == "gemm b8 128x256x64 NT fp16"
    assert GemmConfig(1, 2, 3).label == "gemm 1x2x3 NN fp32"


def test_what_equals_a_default_is_the_same_layer_with_the_same_key() -> None:
    plain = GemmConfig(2, 3, 4, 5, trans_a=True)
    said = GemmConfig(
        *(2, 3, 4, 5, True, False, DataType.FP32),
        *(2, 3, 3, 8, 12, 6),
        b_type=DataType.FP32,
        c_type=DataType.FP32,
    )
    assert said == plain
    assert said.key == plain.key
    assert plain.json_text() == (
        '{"kind":"gemm","m":2,"n":3,"k":4,"batch_count":5,"trans_a":true,"trans_b":false,"data_type":"FP32"}'
    )
    assert GemmConfig(2, 3, 4, stride_a=0, stride_b=9) == GemmConfig(2, 3, 4)
    assert GemmConfig(1, 3, 4, lda=9) == GemmConfig(1, 3, 4)
    assert GemmConfig(2, 3, 4, data_type=DataType.INT8, c_type=DataType.INT32).is_plain


def test_a_gap_between_rows_moves_where_packed_matrices_lie() -> None:
    config = GemmConfig(2, 3, 4, 5, lda=8, stride_a=16)
    assert (config.lda, config.stride_a) == (8, None)
    assert GemmConfig(2, 3, 4, 5, lda=8, stride_a=8).stride_a == 8


def test_what_miopendriver_cannot_say_is_json() -> None:
    config = GemmConfig(
        2, 3, 64, ldb=8, data_type=DataType.FP8_E4M3, c_type=DataType.BF16, scale_b="block32_e8m0"
    )
    assert not config.is_plain
    assert config.driver() is None
    assert config.canonical() == (
        "kind=gemm;m=2;n=3;k=64;batch_count=1;trans_a=0;trans_b=0;data_type=FP8_E4M3;ldb=8;c_type=BF16;scale_b=block32_e8m0"
    )
    assert config.label == "gemm 2x3x64 NN fp8_e4m3>bf16 ld -,8,- scale -,block32_e8m0,-"
    assert from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lda": 3}, "lda must be a whole number from 4"),
        ({"lda": True}, "lda must be a whole number"),
        ({"ldc": 2**31}, "ldc must be"),
        ({"stride_b": -1}, "stride_b must be a whole number from 0"),
        ({"stride_c": 0}, "stride_c must be a whole number from 1"),
        ({"data_type": "INT32"}, "data_type must be one of"),
        ({"b_type": "INT32"}, "b_type must be one of"),
        ({"c_type": 1}, "c_type must be one of"),
        ({"compute_type": "FP64"}, "compute_type must be one of TF32"),
        ({"compute_type": "TF32", "data_type": "FP16"}, "only fp32 inputs"),
        ({"scale_a": "row"}, "scale_a must be tensor, vector"),
        ({"scale_a": None}, "scale_a must be"),
    ],
)
def test_a_wrong_field_is_refused_with_a_reason(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        from_json({"kind": "gemm", "m": 2, "n": 3, "k": 4, **fields})


@pytest.mark.parametrize("data_type", ["INT32", "FP8_E4M3", DataType.FP8_E5M2])
def test_a_convolution_has_only_the_types_that_miopen_has(data_type: str) -> None:
    with pytest.raises(BadInput, match="data_type must be one of FP32, FP16, BF16, INT8"):
        ConvConfig(1, 1, 1, 1, 1, 1, 1, data_type=data_type)  # type: ignore[arg-type]
