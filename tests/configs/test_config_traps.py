"""The values that MITuna's own tests of driver lines and keys expect, as far as they are right."""

from __future__ import annotations

import pytest

from tuna.configs import BatchNormConfig, ConvConfig, DataType, Direction, parse_line, parse_lines


@pytest.mark.parametrize("value", ["", "="])
def test_a_key_with_one_word_for_three_equal_layouts_names_its_layer(value: str) -> None:
    """MITuna's test_driver.py has it; MIOpen itself writes one word for NCHW and NCDHW only."""
    parsed = parse_lines([f"64-75-75-3x3-64-75-75-512-1x1-1x1-1x1-0-NHWC-FP16-W{value}"], "keys")
    assert [str(rejection) for rejection in parsed.rejections] == []
    (config,) = parsed.configs
    assert isinstance(config, ConvConfig)
    assert (config.in_layout, config.fil_layout, config.out_layout) == ("NHWC", "NHWC", "NHWC")
    assert (config.data_type, config.direction, config.batchsize) == (
        DataType.FP16,
        Direction.BACKWARD_WEIGHTS,
        512,
    )
    assert parse_line(config.driver()) == [config]


def test_the_batch_norm_line_of_mitunas_test_has_all_its_values() -> None:
    (config,) = parse_line(
        "./bin/MIOpenDriver bnormfp16 -n 256 -c 64 -H 56 -W 56 -m 1 --forw 1 -b 0 -s 1 -r 1"
    )
    assert config == BatchNormConfig(
        *(256, 64, 56, 56), mode=1, run=1, save=1, alpha=1.0, beta=0.0, data_type=DataType.FP16
    )
    assert " --forw 1 --back 0 --mode 1 --run 1 " in config.driver()
