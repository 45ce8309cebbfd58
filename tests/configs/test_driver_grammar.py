"""The MIOpenDriver grammar for convolutions: flags, defaults, directions, layouts, and lines that
are wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuna.configs import ConvConfig, DataType, UnsupportedLine, parse_line
from tuna.errors import BadInput

WORDS = "-n -H --in_h=3 -F 1 0 -I NHWC -z same -u # -# = -"
LINE = "./bin/MIOpenDriver conv -n 1 -c 8 -H 16 -W 16 -k 8 -F 1"


def one(text: str) -> ConvConfig:
    """The only config of a line, which must be a convolution."""
    (config,) = parse_line(text)
    assert isinstance(config, ConvConfig)
    return config


@pytest.mark.parametrize(
    "program",
    ["MIOpenDriver.exe", r"C:\ROCm\bin\MIOpenDriver.EXE", '"C:\\AMD ROCm\\MIOpenDriver.exe"'],
)
def test_a_line_of_windows_names_the_program_with_its_ending(program: str) -> None:
    assert parse_line(LINE.replace("./bin/MIOpenDriver", program)) == parse_line(LINE)


def test_a_bare_command_has_miopens_defaults_in_all_three_directions() -> None:
    configs = parse_line("MIOpenDriver conv")
    assert [config.label for config in configs] == [
        f"conv 100x3x32x32 k32 3x3 s1 p0 NCHW fp32 {letter}" for letter in "FBW"
    ]


def test_a_bare_three_dimensional_command_has_miopens_defaults() -> None:
    config = one("MIOpenDriver conv --spatial_dim 3 -F 1")
    assert config.label == "conv 100x3x32x32x32 k32 3x3x3 s1 p0 NCDHW fp32 F"
    assert (config.conv_stride_d, config.dilation_d) == (1, 1)


@pytest.mark.parametrize(
    ("mask", "letters"), [*enumerate(["FBW", "F", "B", "FB", "W", "FW", "BW", "FBW"])]
)
def test_the_direction_flag_is_a_bit_mask(mask: int, letters: str) -> None:
    line = LINE.removesuffix(" -F 1")
    for form in (f"-F {mask}", f"--forw {mask}", f"-F={mask}", f"--forw={mask}"):
        configs = parse_line(f"{line} {form}")
        assert "".join(config.to_json()["direction"] for config in configs) == letters
        assert len({config.key for config in configs}) == len(letters)


@pytest.mark.parametrize("value", ["8", "-1", "1.", "F", "99999999999999999999999"])
def test_other_values_of_the_direction_flag_are_refused(value: str) -> None:
    with pytest.raises(BadInput, match="-F"):
        parse_line(f"MIOpenDriver conv -F {value}")


SHORT = (
    "-n 2 -c 6 -! 11 -H 12 -W 13 -k 9 -@ 2 -y 3 -x 4 -$ 1 -p 2 -q 3 -# 2 -u 3 -v 1 -^ 1 -l 2 -j 2"
    " -g 3 -m conv -F 4"
)
LONG = (
    "--batchsize 2 --in_channels 6 --in_d 11 --in_h 12 --in_w 13 --out_channels 9 --fil_d 2 --fil_h"
    " 3 --fil_w 4 --pad_d 1 --pad_h 2 --pad_w 3 --conv_stride_d 2 --conv_stride_h 3 --conv_stride_w"
    " 1 --dilation_d 1 --dilation_h 2 --dilation_w 2 --group_count 3 --mode conv --forw 4"
)


def test_short_and_long_flags_say_the_same() -> None:
    config = one(f"MIOpenDriver convbfp16 -_ 3 -I NDHWC {SHORT}")
    assert config == one(f"MIOpenDriver convbfp16 --spatial_dim 3 --in_layout NDHWC {LONG}")
    assert config == one(
        f"MIOpenDriver convbfp16 --spatial_dim=3 --in_layout=NDHWC {LONG}".replace(
            " --forw 4", " -F=4"
        )
    )
    assert config.label == "conv 2x6x11x12x13 k9 2x3x4 s2x3x1 p1x2x3 d1x2x2 g3 NDHWC bf16 W"


def test_two_dimensions_ignore_what_is_said_about_depth() -> None:
    depth = "--in_d 7 --fil_d 3 --pad_d 1 --conv_stride_d 2 --dilation_d 2 -% 1"
    assert one(f"{LINE} {depth}") == one(LINE)
    config = one("MIOpenDriver convfp16 -F 2")
    assert (config.in_d, config.fil_d, config.pad_d, config.conv_stride_d, config.dilation_d) == (
        1,
        1,
        0,
        0,
        0,
    )


def test_each_command_has_its_data_type() -> None:
    types = {"conv": "FP32", "convfp16": "FP16", "convbfp16": "BF16", "convint8": "INT8"}
    for command, name in types.items():
        assert one(f"MIOpenDriver {command} -F 1").data_type is DataType[name]


@pytest.mark.parametrize(
    "prefix",
    ["", "./bin/", "/opt/rocm/bin/", "miopenConvolutionForward: ./bin/", "MIOpen(HIP): [Log] ./"],
)
def test_what_stands_before_the_program_name_is_skipped(prefix: str) -> None:
    assert one(f"{prefix}{LINE.removeprefix('./bin/')}") == one(LINE)


def test_a_flag_given_twice_counts_as_given_last() -> None:
    assert one(f"{LINE} -H 20 --in_h 24").in_h == 24


def test_known_flags_that_do_not_describe_the_layer_are_ignored() -> None:
    about = (
        "-t 1 -V 0 -i 5 -w 1 -s 1 -b 1 -P 0 -o 1 -d in.bin -e w.bin -a b.bin -D dy.bin -C cache -S"
        " -1 -G 1 -r 0"
    )
    assert one(f"{LINE} {about}") == one(LINE)
    about = (
        "--time 1 --verify 0 --iter 5 --wall 1 --search=1 --bias 1 --printconv 0 --dump_output 1"
        " --in_data x"
    )
    assert one(
        f"{LINE} {about} --weights x --in_bias x --dout_data x --solution ConvDirect --pad_val 0"
    ) == one(LINE)
    assert one(f"{LINE} -Z 0 -L 1 -U -1 -T -1 -R -1") == one(LINE)


@pytest.mark.parametrize("flag", ["-t", "--time", "-V", "-s", "-w"])
def test_an_ignored_flag_may_have_lost_its_value_at_the_end_of_the_line(flag: str) -> None:
    assert one(f"{LINE} {flag}") == one(LINE)
    assert one(f"{LINE} --in_h=16 {flag}") == one(LINE)


@pytest.mark.parametrize("flag", ["-I", "-O", "-f", "--in_layout", "--out_layout", "--fil_layout"])
def test_one_layout_given_alone_counts_for_all_three_tensors(flag: str) -> None:
    config = one(f"{LINE} {flag} NHWC")
    assert (config.in_layout, config.fil_layout, config.out_layout) == ("NHWC", "NHWC", "NHWC")


@pytest.mark.parametrize(
    "flags", ["-I NHWC -O NCHW", "-I NHWC -O NCHW -f NHWC", "--in_layout NCHW --fil_layout NHWC"]
)
def test_different_layouts_are_refused(flags: str) -> None:
    with pytest.raises(BadInput, match="must have the same layout"):
        parse_line(f"{LINE} {flags}")


@pytest.mark.parametrize("flags", ["-I NCDHW", "-_ 3 -I NHWC", "-I nchw", "-I CHWN", "-I NCHWc4"])
def test_a_layout_must_fit_the_dimensions(flags: str) -> None:
    with pytest.raises(BadInput, match="does not fit spatial_dim"):
        parse_line(f"{LINE} {flags}")


@pytest.mark.parametrize(
    ("flags", "pads"),
    [
        ("-z valid -p 1 -q 1", (0, 0)),
        ("-z same -p 5", (1, 1)),
        ("-z same -y 5 -x 7", (2, 3)),
        ("-z same -y 7 -x 7 -u 2 -v 2", (2, 2)),
        ("-z same -H 17 -u 2", (1, 1)),
        ("-z same -y 1 -x 1 -l 2 -j 2 -p 3", (0, 0)),
        ("-z same -l 2 -p 3", (3, 0)),
        ("-z valid -j 2 -p 3", (3, 0)),
        ("-z same -m trans -p 1", (1, 0)),
        ("-z default -p 1 -q 1", (1, 1)),
    ],
)
def test_a_pad_mode_becomes_the_pads_that_miopendriver_uses(
    flags: str, pads: tuple[int, int]
) -> None:
    config = one(f"{LINE} {flags}")
    assert (config.pad_h, config.pad_w) == pads
    assert config.pad_mode == "default"


def test_output_padding_counts_only_when_transposed() -> None:
    assert one(f"{LINE} -Y 1 -X 1 -u 2 -v 2") == one(f"{LINE} -u 2 -v 2")
    assert one(f"{LINE} -Y 1 -X 1 -u 2 -v 2 -m trans").output_size == (34, 34)


def test_a_comment_may_follow_the_flags() -> None:
    assert one(f"{LINE} # the stem, -H 3") == one(LINE)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("-H abc", "flag -H needs a whole number, got 'abc'"),
        ("-H 1.5", "flag -H needs a whole number, got '1.5'"),
        ("-H 1.", "flag -H needs a whole number"),
        ("-H +5", "flag -H needs a whole number"),
        ("-H 1_0", "flag -H needs a whole number"),
        ("-H ٣", "flag -H needs a whole number"),
        ("-H=", "flag -H needs a whole number, got ''"),
        ("-H -W 5", "flag -H needs a whole number, got '-W'"),
        ("-H 0", "in_h must be at least 1, got 0"),
        ("-u 0 -z same", "conv_stride_h must be at least 1"),
        ("-H 9999999999999999999999999", "at most 2147483647"),
        ("-y 17", "the filter does not fit along h"),
        ("-H", "flag -H has no value"),
        ("-Z", "flag -Z has no value"),
        ("-t 1 -I", "flag -I has no value"),
        ("-t -H 5", "'5' is where a flag is expected"),
        ("--bogus 1", "unknown flag --bogus"),
        ("--bogus=1", "unknown flag --bogus"),
        ("-in_h 5", "unknown flag -in_h"),
        ("--H 5", "unknown flag --H"),
        ("5", "'5' is where a flag is expected"),
        ("-m full", "mode must be conv or trans"),
        ("-z bogus", "pad_mode must be default, same or valid"),
        ("-_ 4", "spatial_dim must be 2 or 3"),
        ("-Z 1 -L 4", r"tensor_vect\) is supported only with 0"),
        ("-U fp8", "in_cast_type"),
    ],
)
def test_a_wrong_line_is_refused_with_a_reason(flags: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        parse_line(f"{LINE} {flags}")


@pytest.mark.parametrize(
    "line", ["", "conv -n 1", "# MIOpen", "MIOpenDriver", "MIOpenDriver -n 1", "MIOpenDriverX conv"]
)
def test_a_line_without_a_command_is_refused(line: str) -> None:
    with pytest.raises(BadInput, match="MIOpenDriver"):
        parse_line(line)


@pytest.mark.parametrize("command", ["pool", "bnormfp8", "convfp8", "CBAInfer", "softmax"])
def test_other_commands_are_unsupported_not_wrong(command: str) -> None:
    with pytest.raises(UnsupportedLine, match=command):
        parse_line(f"./bin/MIOpenDriver {command} -n 1")


def test_the_canonical_driver_text_is_the_one_that_mituna_writes() -> None:
    short = (
        "-n 128 -c 1024 -H 14 -W 14 -k 2048 -y 1 -x 1 -p 0 -q 0 -u 2 -v 2 -l 1 -j 1 -m conv -g 1 -F"
        " 2 -t 1"
    )
    assert (
        one(f"./bin/MIOpenDriver conv {short}").driver()
        == "./bin/MIOpenDriver conv --batchsize 128 --spatial_dim 2 --pad_h 0 --pad_w 0 --pad_d 0"
        " --conv_stride_h 2 --conv_stride_w 2 --conv_stride_d 0 --dilation_h 1 --dilation_w 1"
        " --dilation_d 0 --group_count 1 --mode conv --pad_mode default --trans_output_pad_h 0"
        " --trans_output_pad_w 0 --trans_output_pad_d 0 --out_layout NCHW --in_layout NCHW"
        " --fil_layout NCHW --in_d 1 --in_h 14 --in_w 14 --fil_d 1 --fil_h 1 --fil_w 1"
        " --in_channels 1024 --out_channels 2048 --forw 2"
    )


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_no_text_makes_the_parser_fail_otherwise_than_with_a_reason(text: str) -> None:
    starts = (
        "",
        "MIOpenDriver ",
        "MIOpenDriver conv ",
        "MIOpenDriver gemm -m ",
        "MIOpenDriver bnorm -A ",
    )
    for line in (start + text for start in starts):
        try:
            parse_line(line)
        except BadInput as error:
            assert str(error)


@given(st.lists(st.sampled_from(WORDS.split())))
def test_no_order_of_words_makes_the_parser_fail_otherwise_than_with_a_reason(
    words: list[str],
) -> None:
    try:
        parse_line(" ".join(["MIOpenDriver", "conv", *words]))
    except BadInput as error:
        assert str(error)
