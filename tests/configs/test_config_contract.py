"""What holds for every kind of config: its texts lead back to it, and its key tells layers
apart."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
from configs_strategies import configs
from hypothesis import given

from tuna.configs import (
    BatchNormConfig,
    Config,
    ConvConfig,
    GemmConfig,
    from_json,
    parse_line,
    read_line,
)
from tuna.errors import BadInput

LAYER = ConvConfig(1, 64, 56, 56, 64, 3, 3, 1, 1)
NORM = BatchNormConfig(32, 64, 56, 56)


@given(configs)
def test_the_driver_text_leads_back_to_the_config(config: Config) -> None:
    assert list(read_line(config.text())) == [config]
    if config.driver():
        assert parse_line(config.driver()) == [config]


@given(configs)
def test_the_json_form_survives_a_real_json_file(config: Config) -> None:
    again = from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.key == config.key
    assert again.to_json() == config.to_json()


@given(configs, configs)
def test_keys_and_canonical_texts_are_equal_exactly_when_configs_are(
    one: Config, other: Config
) -> None:
    assert (one.key == other.key) == (one == other)
    assert (one.canonical() == other.canonical()) == (one == other)


@given(configs)
def test_the_key_is_the_sha256_of_the_canonical_text(config: Config) -> None:
    assert config.key == hashlib.sha256(config.canonical().encode()).hexdigest()


@given(configs)
def test_the_canonical_text_names_every_field_that_the_json_has(config: Config) -> None:
    named = [part.partition("=")[0] for part in config.canonical().split(";")]
    assert sorted(named) == sorted(["kind", *config.stated_fields()])


@given(configs)
def test_a_config_travels_between_processes(config: Config) -> None:
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert hash(again) == hash(config)


@given(configs)
def test_a_label_is_one_short_line(config: Config) -> None:
    assert len(config.label) <= 120
    assert config.label.isprintable()


def test_keys_that_are_in_databases_already_never_change() -> None:
    assert (
        LAYER.canonical()
        == "kind=convolution;spatial_dim=2;batchsize=1;in_channels=64;in_d=1;in_h=56;in_w=56;"
        "out_channels=64;fil_d=1;fil_h=3;fil_w=3;pad_d=0;pad_h=1;pad_w=1;"
        "conv_stride_d=0;conv_stride_h=1;conv_stride_w=1;dilation_d=0;dilation_h=1;dilation_w=1;"
        "group_count=1;mode=conv;pad_mode=default;trans_output_pad_d=0;trans_output_pad_h=0;"
        "trans_output_pad_w=0;direction=F;in_layout=NCHW;fil_layout=NCHW;out_layout=NCHW;data_type=FP32"
    )
    assert (
        GemmConfig(2, 3, 4, 5, trans_b=True).canonical()
        == "kind=gemm;m=2;n=3;k=4;batch_count=5;trans_a=0;trans_b=1;data_type=FP32"
    )
    assert (
        BatchNormConfig(32, 64, 56, 57, mode=1, save=1).canonical()
        == "kind=batch_norm;spatial_dim=2;batchsize=32;in_channels=64;in_d=1;in_h=56;in_w=57;"
        "mode=1;run=0;save=1;"
        "alpha=1.0;beta=0.0;direction=F;layout=NCHW;data_type=FP32"
    )


def test_fields_are_separated_so_that_digits_cannot_move_between_them() -> None:
    line = "MIOpenDriver conv -n 1 -H 64 -W 64 -F 1"
    (one,) = parse_line(f"{line} -p 1 -q 11")
    (other,) = parse_line(f"{line} -p 11 -q 1")
    assert one != other
    assert one.key != other.key


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        LAYER.batchsize = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mapping", "reason"),
    [
        ({}, "needs a 'kind'"),
        ({"kind": "pooling"}, "unknown kind"),
        ({"kind": ["gemm"]}, "unknown kind"),
        ({"kind": "gemm", "m": 1, "n": 1}, "needs k"),
        ({"kind": "gemm", "m": 1, "n": 1, "k": 1, "x": 1}, "no field x"),
        ({"kind": "gemm", "m": "1", "n": 1, "k": 1}, "m must be a whole number"),
        ({"kind": "gemm", "m": True, "n": 1, "k": 1}, "m must be a whole number"),
        ({"kind": "gemm", "m": 1, "n": 1, "k": 1, "trans_a": 1}, "trans_a must be true or false"),
        (
            {"kind": "gemm", "m": 1, "n": 1, "k": 1, "data_type": "FP64"},
            "data_type must be one of FP32",
        ),
        (LAYER.to_json() | {"direction": "X"}, "direction must be one of F, B, W"),
        (LAYER.to_json() | {"direction": ["F"]}, "direction must be one of F, B, W"),
        (LAYER.to_json() | {"in_h": 56.0}, "in_h must be a whole number"),
        (LAYER.to_json() | {"in_h": None}, "in_h must be a whole number"),
        (LAYER.to_json() | {"spatial_dim": 4}, "spatial_dim must be 2 or 3"),
        (LAYER.to_json() | {"pad_mode": "bogus"}, "pad_mode"),
        (LAYER.to_json() | {"pad_mode": "same", "dilation_h": [1]}, "dilation_h"),
        (LAYER.to_json() | {"pad_mode": "same", "conv_stride_h": 0}, "conv_stride_h"),
        (NORM.to_json() | {"in_h": -8}, "in_h must be at least 1"),
        (NORM.to_json() | {"in_h": 1.5}, "in_h must be a whole number"),
        (NORM.to_json() | {"in_d": 2}, "has in_d 1, got 2"),
        (NORM.to_json() | {"in_d": "2"}, "in_d must be a whole number"),
        (NORM.to_json() | {"spatial_dim": [2]}, "spatial_dim must be 2 or 3"),
        (NORM.to_json() | {"layout": ["NCHW"]}, "layout .* does not fit spatial_dim 2"),
        (NORM.to_json() | {"mode": 2}, "mode must be 0 or 1"),
        (NORM.to_json() | {"save": True}, "save must be 0 or 1"),
        (NORM.to_json() | {"run": None}, "run must be 0 or 1"),
        (NORM.to_json() | {"alpha": float("nan")}, "alpha must be finite"),
        (NORM.to_json() | {"beta": 10**400}, "beta must be finite"),
        (NORM.to_json() | {"beta": "0"}, "beta must be a number"),
        (NORM.to_json() | {"alpha": True}, "alpha must be a number"),
        (NORM.to_json() | {"data_type": "INT8"}, "no data_type INT8"),
        (NORM.to_json() | {"direction": None}, "direction must be one of"),
        ({"kind": "batch_norm", "batchsize": 1, "in_channels": 1, "in_h": 1}, "needs in_w"),
    ],
)
def test_a_wrong_json_form_is_refused_with_a_reason(
    mapping: dict[str, object], reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        from_json(mapping)


def test_a_json_form_written_by_hand_may_leave_out_what_has_a_default() -> None:
    assert from_json({"kind": "gemm", "m": 2, "n": 3, "k": 4}) == GemmConfig(2, 3, 4)
    norm = {"kind": "batch_norm", "batchsize": 32, "in_channels": 64, "in_h": 56, "in_w": 56}
    assert from_json(norm) == NORM
    assert from_json(norm | {"in_d": 8}) == BatchNormConfig(32, 64, 56, 56, 8, 3, layout="NCDHW")
    assert from_json(norm | {"layout": "NDHWC"}) == BatchNormConfig(
        32, 64, 56, 56, 1, 3, layout="NDHWC"
    )


def test_importing_configs_pulls_in_no_heavy_package() -> None:
    code = (
        "import sys, tuna.configs; print([m for m in ('pydantic', 'numpy', 'sqlalchemy', 'celery')"
        " if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
