"""Products in the logs of hipBLASLt and of PyTorch's TunableOp: column-major there, row-major
here."""

from __future__ import annotations

import pytest

from tuna.configs import DataType, GemmConfig, parse_lines, read_line
from tuna.errors import BadInput

BENCH = (
    "hipblaslt-bench --api_method c -m 8 -n 4 -k 2 --transA N --transB N --a_type f16_r --b_type"
    " f16_r --d_type f16_r --compute_type f32_r"
)
FP16, BF16, FP8 = DataType.FP16, DataType.BF16, DataType.FP8_E4M3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", GemmConfig(4, 8, 2, data_type=FP16)),
        (
            "--lda 8 --ldb 2 --ldc 8 --ldd 8 --stride_a 0 --stride_b 0 --stride_d 0",
            GemmConfig(4, 8, 2, data_type=FP16),
        ),
        ("--lda 10 --ldb 3 --ldd 11", GemmConfig(4, 8, 2, data_type=FP16, lda=3, ldb=10, ldc=11)),
        ("--transA T", GemmConfig(4, 8, 2, trans_b=True, data_type=FP16)),
        ("--transB C --ldb 5", GemmConfig(4, 8, 2, trans_a=True, lda=5, data_type=FP16)),
        (
            "--batch_count 3 --stride_a 16 --stride_b 0 --stride_d 32",
            GemmConfig(4, 8, 2, 3, data_type=FP16, stride_a=0),
        ),
        ("--d_type f32_r", GemmConfig(4, 8, 2, data_type=FP16, c_type=DataType.FP32)),
        (
            "--a_type bf8_r --b_type f8_r --d_type bf16_r --scaleA 1 --scaleB 2 --scaleD 1",
            GemmConfig(
                *(4, 8, 2),
                data_type=FP8,
                b_type=DataType.FP8_E5M2,
                c_type=BF16,
                scale_a="vector",
                scale_b="tensor",
                scale_c="tensor",
            ),
        ),
        (
            "--a_type f32_r --b_type f32_r --d_type f32_r --compute_type xf32_r",
            GemmConfig(4, 8, 2, compute_type="TF32"),
        ),
        (
            "--a_type i8_r --b_type i8_r --d_type i32_r --compute_type i32_r",
            GemmConfig(4, 8, 2, data_type=DataType.INT8),
        ),
    ],
)
def test_a_bench_line_is_the_row_major_product(flags: str, expected: GemmConfig) -> None:
    kept = [word for word in flags.split() if word.startswith("--")]
    words = BENCH.split()
    for flag in kept:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    assert read_line(f"{' '.join(words)} {flags}") == [expected]


def test_how_it_is_run_makes_no_other_layer_and_what_is_beside_it_is_named() -> None:
    beside = (
        "--bias_vector --activation_type relu --beta 1.000000 --solution_index -1 --activation_arg2"
        " -inf --scaleC"
    )
    parsed = parse_lines(
        [BENCH, f"{BENCH} {beside}", f"{BENCH} --beta 0.000000 --activation_type none"], "log"
    )
    assert parsed.weights == (3,)
    assert parsed.left_out == {
        "a bias": 1,
        "an activation (relu)": 1,
        "C added to the answer": 1,
        "a scale of the C that is added": 1,
    }


@pytest.mark.parametrize(
    ("text", "reason", "unsupported"),
    [
        (f"{BENCH} -m 9", "groups", True),
        (f"{BENCH} --grouped_gemm 1", "groups", True),
        (BENCH.replace("-m 8", "-m 0"), "empty", True),
        (BENCH.replace("--a_type f16_r", "--a_type f64_r"), "no type for hipBLASLt's f64_r", True),
        (f"{BENCH} --compute_type f64_r", "compute type f64_r", True),
        (f"{BENCH} --scaleA 1001", "scale 1001", True),
        (f"{BENCH} --lda 7", "ldb must be a whole number from 8", False),
        (f"{BENCH} --new_thing 3", "unknown flag --new_thing", False),
        (f"{BENCH} 3 4", "is where a flag is expected", False),
        (BENCH.replace("-k 2", "-k x"), "needs a whole number", False),
        (BENCH[:50], "cut short", False),
        (BENCH[:-21], "no --compute_type: it is cut short", False),
    ],
)
def test_other_bench_lines_are_named(text: str, reason: str, unsupported: bool) -> None:
    (rejection,) = parse_lines([text], "log").rejections
    assert reason in rejection.reason
    assert rejection.unsupported is unsupported


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("GemmTunableOp_float_NT,nt_8_4_2", GemmConfig(4, 8, 2, trans_a=True)),
        ("GemmTunableOp_tf32_NN,nn_8_4_2_ld_8_2_8", GemmConfig(4, 8, 2, compute_type="TF32")),
        (
            "GemmTunableOp_BFloat16_TN,tn_8_4_2_ld_2_2_9,Gemm_Rocblas_45,0.1",
            GemmConfig(4, 8, 2, trans_b=True, data_type=BF16, ldc=9),
        ),
        (
            "GemmStridedBatchedTunableOp_Half_NN,nn_8_4_2_B_5_ld_8_2_8",
            GemmConfig(4, 8, 2, 5, data_type=FP16),
        ),
        (
            "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e5m2_BFloat16_TN,tn_8_4_2_ld_2_2_8_rw_1_bias_None",
            GemmConfig(
                *(4, 8, 2),
                trans_b=True,
                data_type=DataType.FP8_E5M2,
                b_type=FP8,
                c_type=BF16,
                scale_a="vector",
                scale_b="vector",
            ),
        ),
        (
            "ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_Half_NN,nn_8_4_2_ld_8_2_8_rw_0_bias_Half",
            GemmConfig(
                4,
                8,
                2,
                data_type=DataType.FP8_E4M3FNUZ,
                c_type=FP16,
                scale_a="tensor",
                scale_b="tensor",
            ),
        ),
    ],
)
def test_a_row_of_tunableop_is_the_row_major_product(row: str, expected: GemmConfig) -> None:
    parsed = parse_lines(["Validator,PT_VERSION,2.10.0", row], "log")
    assert (parsed.configs, parsed.counts.ignored) == ((expected,), 1)
    assert parsed.left_out == ({"a bias": 1} if row.endswith("bias_Half") else {})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("GemmTunableOp_double_NN,nn_8_4_2", "no type for TunableOp's double"),
        ("GemmTunableOp_c10::complex<float>_NN,nn_8_4_2", "no type"),
        ("GroupedTunableOp_float_NN,nn_8_4_2", "does not tune TunableOp's Grouped"),
        ("GemmTunableOp_float_NN,nn_*_4_2_ld_8_2_8", "vary"),
        ("GemmTunableOp_float_NN,nn_8_4", "cannot be read"),
        ("GemmTunableOp_float_NN", "cannot be read"),
    ],
)
def test_other_rows_are_named(row: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read_line(row)
