"""Batch normalisations: the MIOpenDriver bnorm command, its directions and defaults, and real
lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shared_data import shared_data

from tuna.configs import BatchNormConfig, DataType, Direction, parse_file, parse_line
from tuna.errors import BadInput

LINE = "./bin/MIOpenDriver bnorm -n 32 -c 64 -H 28 -W 30 --forw 1"


def one(text: str) -> BatchNormConfig:
    """The only config of a line, which must be a batch normalisation."""
    (config,) = parse_line(text)
    assert isinstance(config, BatchNormConfig)
    return config


def test_what_is_left_out_has_miopens_defaults_not_mitunas() -> None:
    assert one("MIOpenDriver bnorm -F 1") == BatchNormConfig(32, 3, 32, 32)
    assert one("MIOpenDriver bnorm -F 1").to_json() == {
        **{
            "kind": "batch_norm",
            "spatial_dim": 2,
            "batchsize": 32,
            "in_channels": 3,
            "in_d": 1,
            "in_h": 32,
        },
        **{"in_w": 32, "mode": 0, "run": 0, "save": 0, "alpha": 1.0, "beta": 0.0, "direction": "F"},
        **{"layout": "NCHW", "data_type": "FP32"},
    }


def test_short_and_long_flags_say_the_same() -> None:
    short = one(
        "MIOpenDriver bnormfp16 -F 0 -b 1 -n 2 -c 3 -D 4 -H 5 -W 6 -A 0.5 -B .25 -m 1 -r 1 -s 1 -L"
        " NDHWC"
    )
    assert short == one(
        "MIOpenDriver bnormfp16 --forw 0 --back 1 --batchsize 2 --in_channels 3 --in_d=4 --in_h 5"
        " --in_w 6 --alpha 5e-1 --beta 0.25 --mode 1 --run 1 --save 1 --layout NDHWC"
    )
    assert short == BatchNormConfig(
        *(2, 3, 5, 6, 4, 3, 1, 1, 1, 0.5, 0.25),
        *(Direction.BACKWARD_WEIGHTS, "NDHWC", DataType.FP16),
    )


@pytest.mark.parametrize(
    ("flags", "direction"),
    [
        ("-F 1", Direction.FORWARD),
        ("-F 1 -b 0", Direction.FORWARD),
        ("--forw 2", Direction.BACKWARD_DATA),
        ("--back 1", Direction.BACKWARD_WEIGHTS),
        ("-F 0 -b 1", Direction.BACKWARD_WEIGHTS),
    ],
)
def test_training_inference_and_backward_are_three_directions(
    flags: str, direction: Direction
) -> None:
    assert one(f"MIOpenDriver bnorm {flags}").direction is direction


@pytest.mark.parametrize("flags", ["", "-F 0", "-F 0 -b 0", "-F 1 -b 1", "-F 2 --back 1"])
def test_exactly_one_of_forw_and_back_must_be_set(flags: str) -> None:
    with pytest.raises(BadInput, match="one and only one of forw or back must be set"):
        parse_line(f"MIOpenDriver bnorm {flags}")


def test_the_short_s_means_save_and_not_search() -> None:
    assert one(f"{LINE} -s 1").save == 1
    assert one(f"{LINE} -s 1") == one(f"{LINE} --save 1") != one(LINE)


def test_each_command_has_its_data_type() -> None:
    for command, name in {"bnorm": "FP32", "bnormfp16": "FP16", "bnormbfp16": "BF16"}.items():
        config = one(f"MIOpenDriver {command} -F 1")
        assert config.data_type is DataType[name]
        assert f" {command} " in config.driver()


@pytest.mark.parametrize("flag", ["-D", "-!", "--in_d"])
def test_a_depth_makes_three_dimensions(flag: str) -> None:
    assert one(f"{LINE} {flag} 8") == BatchNormConfig(32, 64, 28, 30, 8, 3, layout="NCDHW")
    assert one(f"{LINE} {flag} 8 -L NDHWC").layout == "NDHWC"
    assert one(f"{LINE} {flag} 0") == one(f"{LINE} {flag} 1") == one(LINE)


def test_a_layout_with_a_depth_makes_three_dimensions() -> None:
    config = one(f"{LINE} -L NCDHW -D 1")
    assert (config.spatial_dim, config.in_d) == (3, 1)
    assert config != one(LINE)
    assert one(f"{LINE} --layout NHWC").spatial_dim == 2


def test_the_command_has_no_depth_in_two_dimensions() -> None:
    """MIOpenDriver takes an in_d of 1 for a third dimension, which its default layout then does not
    have."""
    assert (
        one(LINE).driver()
        == "./bin/MIOpenDriver bnorm --batchsize 32 --alpha 1.0 --beta 0.0 --forw 1 --back 0 --mode"
        " 0 --run 0 --in_d 0 --in_h 28 --in_w 30 --in_channels 64 --save 0 --layout NCHW"
    )


def test_known_flags_that_do_not_describe_the_layer_are_ignored() -> None:
    assert one(
        f"{LINE} -i 5 -V 0 -t 1 -w 1 -P 0 -S -1 --iter 2 --verify 1 --time 0 --wall=1 --printconv 0"
    ) == one(LINE)
    assert one(f"{LINE} -f 0 -I 0 -Q 0 -x 0.5 -y 2") == one(LINE)
    assert one(f"{LINE} -t") == one(LINE)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("-s", "flag -s has no value"),
        ("-n -8", "batchsize must be at least 1, got -8"),
        ("-H 0", "in_h must be at least 1"),
        ("-H 1.5", "flag -H needs a whole number, got '1.5'"),
        ("-D -1", "in_d must be at least 1, got -1"),
        ("-c 2147483648", "in_channels must be at most 2147483647"),
        ("-F 1.", "flag -F needs a whole number"),
        ("-F 3", "--forw must be 0 .off., 1 .training. or 2"),
        ("-F 4", "--forw must be 0"),
        ("-F 0 -b 2", "--back must be 0 or 1, got 2"),
        ("-F -3 -b 1", "--forw must be 0"),
        ("-m 2", "mode must be 0 or 1, got 2"),
        ("-s 7", "save must be 0 or 1, got 7"),
        ("-r -1", "run must be 0 or 1"),
        ("-A nan", "alpha must be finite"),
        ("-B 1e999", "beta must be finite"),
        ("-A one", "flag -A needs a number, got 'one'"),
        ("-A 1_0", "flag -A needs a number"),
        ("-A ٣", "flag -A needs a number"),
        ("-L NHWC -D 2", "layout 'NHWC' does not fit spatial_dim 3"),
        ("-L nchw", "layout 'nchw' does not fit spatial_dim 2"),
        ("-f 3", "activ_mode. is supported only with 0"),
        ("-k 8", "unknown flag -k"),
        ("-n 2147483647 -c 2147483647 -H 3", "too large"),
    ],
)
def test_a_wrong_line_is_refused_with_a_reason(flags: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        parse_line(f"{LINE} {flags}")


def test_equal_factors_give_equal_layers_however_they_are_written() -> None:
    base = one(LINE)
    assert one(f"{LINE} -A 1 -B -0.0").key == one(f"{LINE} -A 1.0 -B 0").key == base.key
    assert BatchNormConfig(32, 64, 28, 30, alpha=1, beta=-0.0).canonical() == base.canonical()


def test_flops_count_the_statistics_only_where_they_are_computed() -> None:
    elements = 32 * 64 * 28 * 30
    each = {
        **{"-F 1": 8, "-F 1 -s 1 -r 1": 8, "-F 2": 8, "-F 2 -s 1": 8, "-F 2 -r 1": 4},
        **{"-F 0 -b 1": 14, "-F 0 -b 1 -r 1": 14, "-F 0 -b 1 -s 1": 10},
    }
    for flags, operations in each.items():
        assert one(f"{LINE} {flags}").flops == operations * elements, flags
    assert one(f"{LINE} -D 3").flops == 3 * 8 * elements


def test_labels_tell_layers_apart_for_people() -> None:
    assert one(f"{LINE} -m 1 -s 1 -r 1").label == "bnorm 32x64x28x30 spatial save run NCHW fp32 F"
    assert (
        one(f"{LINE} -D 4 -A 0.5 -B 2").label
        == "bnorm 32x64x4x28x30 activation a0.5 b2 NCDHW fp32 F"
    )


def test_every_line_of_the_real_list_is_read_with_its_save_flag(driver_commands: Path) -> None:
    parsed = parse_file(driver_commands / "batch_norm.txt")
    lines = (driver_commands / "batch_norm.txt").read_text().splitlines()
    assert len(parsed.configs) == parsed.counts.accepted == len(lines) == 28
    for line, config in zip(lines, parsed.configs, strict=True):
        assert isinstance(config, BatchNormConfig)
        assert (config.data_type, config.mode) == (DataType.FP16, 1)
        assert (config.save, config.run) == (int(" -s 1" in line), int(" -r 1" in line))
    directions = [config.to_json()["direction"] for config in parsed.configs]
    assert {letter: directions.count(letter) for letter in "FBW"} == {"F": 12, "B": 4, "W": 12}


def _from_row(row: dict[str, Any]) -> BatchNormConfig:
    words = {
        name: row[name]
        for name in ("alpha", "beta", "forw", "back", "mode", "run", "save", "batchsize")
    }
    words |= {name: row[name] for name in ("in_channels", "in_d", "in_h", "in_w")} | {
        "layout": row["in_layout"]
    }
    return one(
        f"MIOpenDriver {row['cmd']} "
        + " ".join(f"--{name} {value}" for name, value in words.items())
    )


def test_mitunas_own_rows_give_the_direction_that_mituna_gives_them() -> None:
    rows = json.loads(shared_data("miopen_db", "bn_configs_rows.txt").read_text())["bn_configs"]
    assert len(rows) > 15
    for row in rows:
        config = _from_row(row)
        assert config.direction.value == row["direction"]
        assert config.to_json() == config.to_json() | {
            name: row[name]
            for name in ("batchsize", "in_channels", "in_d", "in_h", "in_w", "mode", "run", "save")
        }
