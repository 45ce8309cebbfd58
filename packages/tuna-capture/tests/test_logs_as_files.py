"""Logs as files: real ones, mixed ones, broken ones, and long ones."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from shared_data import shared_data

from tuna.configs import ConvConfig, GemmConfig, LineCounts, parse_file, parse_lines
from tuna.errors import BadInput

DRIVER = "./bin/MIOpenDriver conv -n 1 -F 1"
ROW = "GemmTunableOp_float_NN,nn_8_4_2"


@pytest.mark.parametrize(
    ("name", "layers", "accepted", "ignored", "unsupported"),
    [
        ("hipblaslt.log", 3, 3, 0, 0),
        ("onednn_verbose.log", 8, 36, 7, 67),
        ("tunableop_results0.csv", 2, 2, 5, 0),
        ("tunableop_untuned0.csv", 3, 3, 0, 0),
    ],
)
def test_every_line_of_a_real_log_is_understood_or_named(
    name: str, layers: int, accepted: int, ignored: int, unsupported: int
) -> None:
    parsed = parse_file(shared_data("logs", name))
    counts = parsed.counts
    assert (len(parsed.configs), counts.accepted, counts.ignored, counts.unsupported) == (
        layers,
        accepted,
        ignored,
        unsupported,
    )
    assert counts.rejected == 0
    assert sum(rejection.lines for rejection in parsed.rejections) == unsupported
    assert len({rejection.reason for rejection in parsed.rejections}) == len(parsed.rejections)


#: Lines that were written for these tests, in the forms of IREE's BOO driver and of rocMLIR.
LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize(
    ("name", "labels", "counts", "left_out"),
    [
        (
            "boo_commands.txt",
            (
                "conv 4x48x20x30 k96 1x1 s1 p0 NHWC bf16 F",
                "conv 4x48x20x30 k48 3x1 s1 p1x0 g3 NHWC bf16 W",
                "conv 2x8x9x9 k16 3x3 s1 p1 NCHW fp32 F",
                "conv 2x8x5x9x9 k16 3x3x3 s1 p0 NCDHW fp16 B",
            ),
            LineCounts(15, accepted=5, ignored=3, rejected=3, unsupported=4, duplicates=1),
            {"a bias": 1},
        ),
        (
            "rocmlir_gemm.tsv",
            (
                "gemm 96x640x48 NN fp32",
                "gemm b12 96x96x16 NT fp16",
                "gemm 96x64x48 TN int8",
                "gemm 64x96x48 TT bf16>fp32",
                "gemm b2 5x6x7 NT fp16",
                "gemm b2 5x6x8 NT fp16",
            ),
            LineCounts(17, accepted=7, ignored=3, rejected=3, unsupported=4, duplicates=1),
            {},
        ),
    ],
)
def test_lines_of_iree_and_rocmlir_are_layers_or_named(
    name: str, labels: tuple[str, ...], counts: LineCounts, left_out: dict[str, int]
) -> None:
    parsed = parse_file(LOGS / name)
    assert tuple(config.label for config in parsed.configs) == labels
    assert (parsed.counts, parsed.left_out) == (counts, left_out)
    assert len(parsed.rejections) == counts.rejected + counts.unsupported, "each has its reason"


@pytest.mark.parametrize("name", ["boo_commands.txt", "rocmlir_gemm.tsv"])
def test_of_10000_broken_lines_each_is_counted(name: str) -> None:
    chance, good = random.Random(29), (LOGS / name).read_text().splitlines()
    words = sorted({*" ".join(good).split(), "", "-", "--", "=", "-1", "1e9", "9" * 30, "\t", "\0"})

    def broken() -> str:
        line = list(chance.choice(good))
        for _ in range(chance.randint(1, 3)):
            place, end = sorted(chance.choices(range(len(line) + 1), k=2))
            if chance.random() < 0.8:
                end = min(end, place + 1)
            line[place:end] = chance.choice(
                [*words, *"0123456789", chr(chance.randrange(1, 0x3000))]
            )
        return "".join(line).replace("\n", " ")

    parsed = parse_lines([*good, *(broken() for _ in range(10_000))], name)
    counts = parsed.counts
    assert counts.total == len(good) + 10_000
    assert counts.total == sum(
        (counts.accepted, counts.ignored, counts.rejected, counts.unsupported)
    )
    assert min(counts.accepted, counts.rejected, counts.unsupported) > 50, "all ends are met"
    assert sum(one.lines for one in parsed.rejections) == counts.rejected + counts.unsupported


def test_a_network_that_ran_three_ways_has_its_layers_with_their_counts() -> None:
    parsed = parse_file(shared_data("logs", "onednn_verbose.log"))
    found = {
        config.label: weight for config, weight in zip(parsed.configs, parsed.weights, strict=True)
    }
    assert found["conv 1x3x224x224 k64 7x7 s2 p3 NCHW fp32 F"] == 3
    assert found["conv 1x128x56x56 k128 3x3 s1 p1 g128 NHWC fp32 F"] == 6


def test_miopens_log_is_its_commands() -> None:
    lines = [
        f"MIOpen(HIP): Command [LogCmdConvolution] {DRIVER}",
        f"MIOpen: Command [LogCmdConvolution] {DRIVER}",
        "MIOpen(HIP): Command [LogCmdFusion] ./bin/MIOpenDriver CBAInfer -F 4 -n 128",
        "MIOpen(HIP): Info [get_device_name] Raw device name: gfx90a:sramecc+:xnack-",
        "12 345 MIOpen(HIP): Warning [ParseAndLoadDb] no database",
    ]
    counts = parse_lines(lines, "log").counts
    assert (counts.accepted, counts.unsupported, counts.ignored, counts.rejected) == (2, 1, 2, 0)


def test_mistakes_in_a_log_are_told_once_each_with_their_number() -> None:
    parsed = parse_lines([ROW, "epoch 1", "epoch 2", f"{ROW}_ld_1", f"{ROW}_ld_1,2", ROW], "log")
    assert [(rejection.line, rejection.lines) for rejection in parsed.rejections] == [
        (2, 2),
        (4, 2),
    ]
    assert (parsed.counts.rejected, parsed.weights) == (4, (2,))
    with pytest.raises(BadInput, match=r"log:2: .*\(and 3 more\)"):
        parsed.check_strict()


def test_what_a_crash_leaves_in_a_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(
        f"{ROW}\n\0\0\0\0\n{ROW}\0\n\xff\xfe\n".encode("latin-1")
        + b"x" * (1 << 20)
        + f"\n{ROW}".encode()
    )
    parsed = parse_file(path)
    assert (parsed.counts.accepted, parsed.counts.rejected, parsed.counts.ignored) == (2, 4, 1)
    assert "holds a NUL" in parsed.rejections[0].reason
    assert all(rejection.text.encode() for rejection in parsed.rejections)


def test_a_damaged_line_refuses_a_file_that_is_not_a_log(tmp_path: Path) -> None:
    path = tmp_path / "layers"
    for data, reason in (
        (b"\0", "NUL"),
        (b"\xff\xfe\n", "UTF-8"),
        (b"x" * (1 << 20), "does not end"),
    ):
        path.write_bytes(f"{DRIVER}\n".encode() + data)
        with pytest.raises(BadInput, match=reason):
            parse_file(path)


def test_lines_that_never_end_refuse_a_log_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(f"{ROW}\n".encode() + b"x" * (20 << 20))
    with pytest.raises(BadInput, match="does not end"):
        parse_file(path)


def test_a_long_log_is_read_at_a_hundred_thousand_lines_a_second() -> None:
    text = (
        "onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx2,forward_training,"
        "src:f32::blocked:abcd::f0 "
        "wei:f32:a:blocked:Acdb8a::f0 bia:undef::undef:::"
        " dst:f32:a:blocked:aBcd8b::f0,attr-scratchpad:user,"
        "alg:convolution_direct,mb{}_ic3oc16_ih32oh32kh3sh1dh0ph1_iw32ow32kw3sw1dw0pw1,0.{}\n"
    )
    lines = [text.format(1 + number % 50, number) for number in range(50_000)]
    start = time.thread_time()
    parsed = parse_lines(lines, "log")
    assert time.thread_time() - start < 0.5
    assert (len(parsed.configs), set(parsed.weights)) == (50, {1000})


def test_of_two_accounts_the_first_has_the_weights() -> None:
    first = parse_lines([ROW, ROW, "# note"], "log")
    both = first.with_others(
        parse_lines([ROW, f"{DRIVER}", "GemmTunableOp_float_NN,nn_9_4_2"], "rows")
    )
    assert both.configs == (
        GemmConfig(4, 8, 2),
        *parse_lines([DRIVER], "x").configs,
        GemmConfig(4, 9, 2),
    )
    assert isinstance(both.configs[1], ConvConfig)
    assert both.weights == (2, 1, 1)
    assert (both.counts.total, both.counts.accepted, both.counts.duplicates) == (6, 5, 2)
