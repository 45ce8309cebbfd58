"""Matrix multiplications: validation and the MIOpenDriver gemm command."""

from __future__ import annotations

import pytest

from tuna.configs import DataType, GemmConfig, parse_line
from tuna.errors import BadInput


def test_the_defaults_are_those_of_the_gemm_driver() -> None:
    assert parse_line("MIOpenDriver gemm") == [GemmConfig(256, 256, 256)]


def test_short_and_long_flags_say_the_same() -> None:
    expected = [GemmConfig(2, 3, 4, 5, trans_a=True, data_type=DataType.FP16)]
    assert parse_line("MIOpenDriver gemmfp16 -m 2 -n 3 -k 4 -b 5 -u 1 -v 0") == expected
    assert parse_line("MIOpenDriver gemmfp16 --a_h 2 --b_w=3 --a_w 4 --batch_count 5 --transA 1") == expected
    assert parse_line("MIOpenDriver gemmfp16 --a_h 2 --b_w 3 --a_w 4 --batchsize 5 --transA 1") == expected


def test_a_column_major_product_is_the_transposed_row_major_one() -> None:
    (config,) = parse_line("MIOpenDriver gemm -m 2 -n 3 -k 4 -u 1 -v 0 -C 1")
    assert config == GemmConfig(3, 2, 4, trans_a=False, trans_b=True)


def test_flags_about_the_run_are_ignored() -> None:
    assert parse_line("MIOpenDriver gemm -F 1 -i 10 -V 0 -t 1 -A 2.0 -B 0.0") == [GemmConfig(256, 256, 256)]


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
