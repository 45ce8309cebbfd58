"""Logs as files: real ones, mixed ones, broken ones, and long ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from shared_data import shared_data

from tuna.configs import ConvConfig, GemmConfig, parse_file, parse_lines
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


def test_the_same_in_a_file_that_is_no_log_refuses_it(tmp_path: Path) -> None:
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
